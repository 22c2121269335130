"""Held-out measurements: negative log-likelihood of text, and accuracy against a task's verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_megatron.algorithms.rewards import completions, score
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.tasks import Problem, Task
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.losses import NLLLoss
from rl_megatron.policy.megatron_policy import MegatronPolicy

_NUM_SAMPLES_KEPT = 6


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
