"""Held-out measurements: likelihood of text, accuracy against a task's verifier, preference within pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rl_megatron.algorithms.rewards import completions, score
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.tasks import Problem, Task
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.losses import NLLLoss
from rl_megatron.losses.functional import masked_mean, masked_sum
from rl_megatron.policy.megatron_policy import MegatronPolicy

_NUM_SAMPLES_KEPT = 6


def heldout_measures(stage: StageConfig) -> tuple[str, ...]:
    """Which of the measures below the stage's evaluations give."""
    source = stage.data.source
    if source == "preference":
        preference = ("preference_accuracy", "preference_margin")
        return preference + (("reward_accuracy", "reward_margin") if stage.algorithm.name == "dpo" else ())
    if source == "text":
        return ("nll_per_token", "nll_per_character")
    return ("accuracy",) if source == "task" else ("nll_per_token",)


@dataclass(frozen=True)
class HeldoutText:
    """Held-out rows; `tokens_per_character`, where the rows are plain text, turns nats per token into per character."""

    batch: BatchedDataDict
    tokens_per_character: float | None = None

    def measure(self, policy: MegatronPolicy) -> dict[str, float]:
        """`nll_per_token` = −Σ log p / number of tokens, in nats, and `nll_per_character` for plain text."""
        nll = policy.train(self.batch, NLLLoss(), eval_mode=True, gbs=self.batch.size)["loss"]
        if self.tokens_per_character is None:
            return {"nll_per_token": nll}
        return {"nll_per_token": nll, "nll_per_character": nll * self.tokens_per_character}


@dataclass(frozen=True)
class HeldoutPairs:
    """Held-out pairs, chosen rows 0, 2, 4 …, rejected rows 1, 3, 5 …; `per_token`, where answers of different lengths
    are compared by their mean log-probability rather than by its sum."""

    batch: BatchedDataDict
    per_token: bool = False

    def measure(self, model: MegatronPolicy) -> dict[str, float]:
        """`preference_accuracy`, the share of pairs whose chosen answer the model prefers (ties count half), and
        `preference_margin`, by how much on average. What a model prefers: a reward model what it scores higher at its
        last token; a language model what is likelier (margin in nats). Where it has a reference policy also
        `reward_accuracy` and `reward_margin`, of log π − log π_ref, which is DPO's reward up to β."""
        if model.head == "score":
            return _preferences("preference", model.score(self.batch)["scores"])
        likelihood = self._of_answers(model.get_logprobs(self.batch)["logprobs"])
        measures = _preferences("preference", likelihood)
        if model.has_reference:
            reference = self._of_answers(model.get_reference_policy_logprobs(self.batch)["reference_logprobs"])
            measures |= _preferences("reward", likelihood - reference)
        return measures

    def _of_answers(self, logprobs: Tensor) -> Tensor:
        mask = self.batch["token_mask"]
        return masked_mean(logprobs, mask, dim=1) if self.per_token else masked_sum(logprobs, mask, dim=1)


def _preferences(name: str, values: Tensor) -> dict[str, float]:
    margins = (values[::2] - values[1::2]).double()
    return {
        f"{name}_accuracy": ((margins.sign() + 1) / 2).mean().item(),
        f"{name}_margin": margins.mean().item(),
    }


@dataclass(frozen=True)
class HeldoutProblems:
    """Held-out problems, answered greedily."""

    task: Task
    problems: Sequence[Problem]
    tokenizer: Tokenizer
    sampling: Sampling  # greedy

    def measure(self, engine: RolloutEngine) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """`accuracy`, the mean reward in [0, 1], and a few samples to look at."""
        prompts = [self.tokenizer.encode(problem.prompt) for problem in self.problems]
        rollouts = engine.generate(prompts, self.sampling, seed=0)
        texts = completions(rollouts, self.tokenizer)
        rewards = score(self.task, self.problems, texts).tolist()
        samples = [
            {"prompt": problem.prompt, "completion": text, "answer": problem.answer, "reward": reward}
            for problem, text, reward in zip(self.problems, texts, rewards, strict=True)
        ]
        return {"accuracy": sum(rewards) / len(rewards)}, samples[:_NUM_SAMPLES_KEPT]
