"""Evaluation on held-out data: likelihood of text, preference within pairs, and accuracy by a task's rewards.

The kind of the held-out data determines the evaluation of a stage. A plugin that adds a data source with a new kind of
data registers an evaluation for that kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from rl_megatron import log
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.config.data import ANSWERS, DOCUMENTS, PAIRS, PROBLEMS
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.sources import build_source
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import encode_prompts
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.generation.stage_sampling import make_sampling
from rl_megatron.losses import NLLLoss
from rl_megatron.losses.functional import masked_mean, masked_sum
from rl_megatron.losses.registry import configured_loss
from rl_megatron.rollouts.scored import Scored, ScoredRollouts
from rl_megatron.training.megatron_policy import MegatronPolicy

if TYPE_CHECKING:
    from rl_megatron.data.sources.source import HeldoutBatch, HeldoutProblemSet

_NUM_SAMPLES_KEPT = 6
EvalResult = tuple[dict[str, float], list[dict[str, Any]]]


class Evaluation(ABC):
    """Held-out data, and the eval metrics that are computed on it."""

    @classmethod
    @abstractmethod
    def from_stage(cls, stage: StageConfig, heldout: Any, tokenizer: Tokenizer) -> Self:
        """Return the evaluation on the held-out data of the stage's data source.

        Raises:
            ConfigError: The held-out data cannot be used.
        """

    @classmethod
    @abstractmethod
    def metric_names(cls, stage: StageConfig, has_reference: bool) -> tuple[str, ...]:
        """Return the names of the stage's eval metrics, which are declared in config/metrics.py."""

    @abstractmethod
    def evaluate(self, policy: MegatronPolicy, engine: RolloutEngine) -> EvalResult:
        """Return the eval metrics of the policy, and samples for people to read."""

    def with_rollouts(self, rollouts: ScoredRollouts) -> Self:
        """Return this evaluation with the stage's scored rollouts, if it needs them."""
        return self

    def item_lengths(self) -> list[list[int]]:
        """Return, for each item that the model reads, the lengths of its sequences in tokens."""
        return []


EVALUATIONS: Registry[type[Evaluation]] = Registry("evaluation of a kind of data")
EvaluationT = TypeVar("EvaluationT", bound=type[Evaluation])


def register_evaluation(kind: str) -> Callable[[EvaluationT], EvaluationT]:
    """Return a class decorator that registers the evaluation of a kind of held-out data."""

    def add(cls: EvaluationT) -> EvaluationT:
        EVALUATIONS.register(kind)(cls)
        return cls

    return add


def metric_names(stage: StageConfig, has_reference: bool) -> tuple[str, ...]:
    """Return the names of the eval metrics on the stage's held-out data; some exist only with a reference policy."""
    return EVALUATIONS[stage.data.heldout_kind].metric_names(stage, has_reference)


def build_evaluation(stage: StageConfig, tokenizer: Tokenizer) -> Evaluation:
    """Return the evaluation on the stage's held-out data."""
    heldout = build_source(stage).heldout(tokenizer)
    return EVALUATIONS[stage.data.heldout_kind].from_stage(stage, heldout, tokenizer)


@register_evaluation(ANSWERS)
@dataclass(frozen=True)
class HeldoutAnswers(Evaluation):
    """Held-out sequences. The likelihood of the tokens whose `token_mask` is 1 is evaluated."""

    batch: BatchedDataDict

    @classmethod
    def from_stage(cls, stage: StageConfig, heldout: HeldoutBatch, tokenizer: Tokenizer) -> Self:
        return cls(heldout.batch)

    @classmethod
    def metric_names(cls, stage: StageConfig, has_reference: bool) -> tuple[str, ...]:
        return ("nll_per_token",)

    def evaluate(self, policy: MegatronPolicy, engine: RolloutEngine | None = None) -> EvalResult:
        """Return `nll_per_token` = −Σ log p / number of tokens, in nats."""
        return {"nll_per_token": self._compute_nll(policy)}, []

    def item_lengths(self) -> list[list[int]]:
        return self.batch["input_lengths"].view(-1, 1).tolist()

    def _compute_nll(self, policy: MegatronPolicy) -> float:
        return policy.train(self.batch, NLLLoss(), eval_mode=True, gbs=self.batch.size)["loss"]


@register_evaluation(DOCUMENTS)
@dataclass(frozen=True)
class HeldoutText(HeldoutAnswers):
    """Held-out windows of plain text.

    Attributes:
        tokens_per_character: The factor from nats per token to nats per character.
    """

    tokens_per_character: float = 1.0

    @classmethod
    def from_stage(cls, stage: StageConfig, heldout: HeldoutBatch, tokenizer: Tokenizer) -> Self:
        """Return the evaluation on the held-out text; the data source must set its `tokens_per_character`."""
        if heldout.tokens_per_character is None:
            raise TypeError(
                f"data.source={stage.data.source} holds out text without tokens_per_character: set it in HeldoutBatch"
            )
        return cls(heldout.batch, heldout.tokens_per_character)

    @classmethod
    def metric_names(cls, stage: StageConfig, has_reference: bool) -> tuple[str, ...]:
        return ("nll_per_token", "nll_per_character")

    def evaluate(self, policy: MegatronPolicy, engine: RolloutEngine | None = None) -> EvalResult:
        """Return `nll_per_token` and `nll_per_character`, in nats."""
        nll = self._compute_nll(policy)
        return {"nll_per_token": nll, "nll_per_character": nll * self.tokens_per_character}, []


@register_evaluation(PAIRS)
@dataclass(frozen=True)
class HeldoutPairs(Evaluation):
    """Held-out pairs: chosen sequences 0, 2, 4 …, rejected sequences 1, 3, 5 ….

    Attributes:
        per_token: Whether answers are compared by their mean log-probability per token, rather than by their total.
    """

    batch: BatchedDataDict
    per_token: bool = False

    @classmethod
    def from_stage(cls, stage: StageConfig, heldout: HeldoutBatch, tokenizer: Tokenizer) -> Self:
        batch = heldout.batch
        if stage.train.share_prefixes == "auto":
            batch = batch | {PREFIX_SET: torch.arange(batch.size) // 2}
        return cls(batch, per_token=getattr(configured_loss(stage.loss), "averages_logprobs", False))

    @classmethod
    def metric_names(cls, stage: StageConfig, has_reference: bool) -> tuple[str, ...]:
        """Return the names of the eval metrics, which include the reward's if the algorithm has a reference policy."""
        names = ("preference_accuracy", "preference_margin")
        return names + (("reward_accuracy", "reward_margin") if has_reference else ())

    def evaluate(self, policy: MegatronPolicy, engine: RolloutEngine | None = None) -> EvalResult:
        """Return how often, and by how much, the model prefers the chosen answer.

        `preference_accuracy` is the share of pairs whose chosen answer the model prefers (ties count half), and
        `preference_margin` is the mean margin. A reward model prefers the answer with the higher score at its last
        token; a language model prefers the likelier answer (margin in nats). With a reference policy, there are also
        `reward_accuracy` and `reward_margin`: the same for log π − log π_ref, which is DPO's reward up to the factor β.
        """
        if policy.model.head == "score":
            return _compare_pairs("preference_", policy.score(self.batch)["scores"]), []
        likelihood = self._reduce_answers(policy.get_logprobs(self.batch)["logprobs"])
        metrics = _compare_pairs("preference_", likelihood)
        if policy.reference is not None:
            reference = self._reduce_answers(policy.get_reference_policy_logprobs(self.batch)["reference_logprobs"])
            metrics |= _compare_pairs("reward_", likelihood - reference)
        return metrics, []

    def item_lengths(self) -> list[list[int]]:
        """Return the numbers of tokens of the two sequences of every pair."""
        return self.batch["input_lengths"].view(-1, 2).tolist()

    def _reduce_answers(self, logprobs: Tensor) -> Tensor:
        mask = self.batch["token_mask"]
        return masked_mean(logprobs, mask, dim=1) if self.per_token else masked_sum(logprobs, mask, dim=1)


def _compare_pairs(prefix: str, values: Tensor) -> dict[str, float]:
    margins = (values[::2] - values[1::2]).double()
    return {
        f"{prefix}accuracy": ((margins.sign() + 1) / 2).mean().item(),
        f"{prefix}margin": margins.mean().item(),
    }


@register_evaluation(PROBLEMS)
@dataclass(frozen=True)
class HeldoutProblems(Evaluation):
    """Held-out problems, which the policy answers greedily."""

    prompts: Sequence[EncodedPrompt]
    tokenizer: Tokenizer
    sampling: Sampling  # greedy
    metric: str  # the name of the mean reward
    rollouts: ScoredRollouts | None = None

    @classmethod
    def from_stage(cls, stage: StageConfig, heldout: HeldoutProblemSet, tokenizer: Tokenizer) -> Self:
        encoded = encode_prompts(stage, heldout.problems, build_source(stage).renderer(tokenizer))
        sampling = make_sampling(stage, tokenizer, greedy=True, end_of_turn_ids=encoded.end_of_turn_ids)
        (metric,) = cls.metric_names(stage, has_reference=False)
        return cls(encoded.prompts, tokenizer, sampling, metric)

    @classmethod
    def metric_names(cls, stage: StageConfig, has_reference: bool) -> tuple[str, ...]:
        """Return the name of the eval metric: "accuracy" if a task rewards answers, otherwise "reward"."""
        return ("reward",) if stage.reward.functions or stage.rollout.worker != "completion" else ("accuracy",)

    def with_rollouts(self, rollouts: ScoredRollouts) -> Self:
        """Return this evaluation with the stage's scored rollouts."""
        return replace(self, rollouts=rollouts)

    def evaluate(self, policy: MegatronPolicy | None, engine: RolloutEngine) -> EvalResult:
        """Return the mean reward, the metrics of the reward functions, and a few samples for people to read."""
        assert self.rollouts is not None  # `with_rollouts` is called first
        scored = self.rollouts.make(engine, self.prompts, self.sampling, seed=0)
        return self.rollouts.runner.ranks.share(lambda: self._read_result(scored))

    def _read_result(self, scored: Scored | None) -> EvalResult:
        assert scored is not None  # this is rank 0
        if scored.num_failed:
            log.LOGGER.warning(
                "held-out problems: %d of %d trajectories failed, and count as wrong answers",
                *(scored.num_failed, len(self.prompts)),
            )
        rewards = scored.rewards.tolist()
        shown = zip(self.prompts[:_NUM_SAMPLES_KEPT], scored.samples, rewards, strict=False)
        samples = [
            {
                "prompt": self.tokenizer.decode(prompt.ids, skip_special_tokens=False),  # as the model saw it
                "completion": sample.completion,
                "answer": prompt.problem.answer,
                "reward": reward,
            }
            for prompt, sample, reward in shown
        ]
        return {self.metric: sum(rewards) / len(rewards)} | scored.metrics.values(), samples
