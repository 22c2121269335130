"""Reward models on the ranks of the policy: they score whole sequences in sharded batches, like a value model.

A model runs under the policy's parallel layout. Rank 0 sends each sequence to the data-parallel rank that scores it,
and all ranks get the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rl_megatron import log
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.checkpoint.directory import check_checkpoint, check_head, read_manifest, read_model_section
from rl_megatron.checkpoint.hf_weights import open_hugging_face
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.reward_models import OF_STAGES, RewardModelArguments, ScoringModel, list_models_on_ranks
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import Padding
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.topology import degrees
from rl_megatron.topology.topology import Topology
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.reference import HostWeights

FindCheckpoint = Callable[[str], Path]
"""Returns the last checkpoint of a stage, by its name."""
_SMALLEST_STD = 1e-6  # scores that are all equal become 0


@dataclass
class RunningStatistics:
    """The mean and the standard deviation of all numbers so far, in double precision.

    `squares` is the sum of squared deviations.

    Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Sequence[float]) -> None:
        """Add numbers to the statistics."""
        number = len(values)
        if not number:
            return
        mean = math.fsum(values) / number
        squares = math.fsum((value - mean) ** 2 for value in values)
        total, apart = self.count + number, mean - self.mean
        self.squares += squares + apart**2 * self.count * number / total
        self.mean += apart * number / total
        self.count = total

    def normalize(self, value: float) -> float:
        """Return (value − mean) / standard deviation, or the value itself if nothing was added yet."""
        if not self.count:
            return value
        return (value - self.mean) / max(math.sqrt(self.squares / self.count), _SMALLEST_STD)

    def state_dict(self) -> dict[str, float]:
        """Return `count`, `mean` and `squares`."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from what `state_dict` returned."""
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])


class SequenceScorer:
    """One model with a score head. It owns the weights and their placement."""

    def __init__(self, policy: MegatronPolicy, tokenizer: Tokenizer, placement: str):
        """Use a model with loaded weights, without gradients."""
        for model_chunk in policy.model.model_chunks:
            model_chunk.eval().requires_grad_(False)
        self._policy, self._padding = policy, Padding(tokenizer.pad_id, 1)
        device = policy.topology.device
        offloads = placement == "offload" and device.type == "cuda"
        self._host = HostWeights(policy.model.model_chunks, device) if offloads else None
        if placement == "offload" and not offloads:
            log.once("placement=offload of a reward model has no effect on a CPU, whose memory is the host's")

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return, on every rank, the scores of rank 0's sequences after their last tokens. Collective."""
        topology = self._policy.topology
        ranks = topology.ranks
        if not ranks.share(lambda: len(sequences)):
            return []
        padded = self._padding.collate([list(sequence) for sequence in sequences]) if ranks.leads else None
        if padded is not None and self._policy.batching.share_prefixes:
            padded[PREFIX_SET] = torch.zeros(len(sequences), dtype=torch.long)  # any two may have a common prompt
        with self._host.on_device() if self._host is not None else nullcontext():
            batch = self._policy.distribute(Batch.gather_facts(padded, topology))
            batch["scores"] = self._policy.score(batch)["scores"].cpu()
        at_home = batch.gather_at_homes(["scores"])
        return ranks.share(at_home["scores"].tolist)

    def close(self) -> None:
        """Release the model."""
        self._policy.shutdown()


@dataclass
class RewardModel:
    """The reward function `reward_model` on the policy's ranks: one model, or several with a combined score.

    Attributes:
        statistics: Statistics of the scores in training so far, for `normalize=running`.
        is_frozen: Whether new scores leave the statistics unchanged, as during an evaluation.
    """

    arguments: RewardModelArguments
    scorers: Sequence[SequenceScorer]
    statistics: RunningStatistics = field(default_factory=RunningStatistics)
    is_frozen: bool = False

    def score(self, sequences: Sequence[Sequence[int]]) -> list[dict[str, float]]:
        """Return each sequence's `score`, its metric `raw` and, with several models, `spread`. Collective."""
        scores_by_model = [scorer.score(sequences) for scorer in self.scorers]
        scores_by_sequence = list(zip(*scores_by_model, strict=True))
        combined = [self._combine(scores) for scores in scores_by_sequence]
        running = self.arguments.normalize == "running"
        if running and not self.is_frozen:
            self.statistics.add([value for value in combined if math.isfinite(value)])
        results = []
        for value, scores in zip(combined, scores_by_sequence, strict=True):
            score = self.statistics.normalize(value) if running else value
            clip = self.arguments.clip
            metrics = {"raw": sum(scores) / len(scores)}
            if len(scores) > 1:
                metrics["spread"] = max(scores) - min(scores)
            results.append({"score": score if clip is None else min(max(score, -clip), clip), **metrics})
        return results

    def _combine(self, scores: Sequence[float]) -> float:
        """Return the models' combined score, or NaN if one score is not finite: min and clip would hide that."""
        if not all(map(math.isfinite, scores)):
            return math.nan
        members = self.arguments.members
        shifted = [(score - model.mean) / model.std for score, model in zip(scores, members, strict=True)]
        if self.arguments.combine == "min":
            return min(shifted)
        total = sum(model.weight for model in members)
        return sum(value * model.weight for value, model in zip(shifted, members, strict=True)) / total


class RewardModels:
    """The reward models of one stage. A model that several functions name is loaded once."""

    def __init__(self, config: StageConfig, layout: Topology, tokenizer: Tokenizer, find_checkpoint: FindCheckpoint):
        """Load nothing yet."""
        self._config, self._layout, self._tokenizer, self._find_checkpoint = config, layout, tokenizer, find_checkpoint
        self._scorers: dict[tuple[str | None, str | None, str], SequenceScorer] = {}
        self._functions: dict[str, RewardModel] = {}

    def load(self, settings: RewardConfig) -> dict[int, RewardModel]:
        """Load the reward models among `reward.functions`; return them by their indices. Collective."""
        loaded = {}
        for index, arguments in list_models_on_ranks(settings).items():
            key = repr(arguments)
            if key not in self._functions:
                scorers = [self._scorer(model, arguments.placement) for model in arguments.members]
                self._functions[key] = RewardModel(arguments, scorers)
            loaded[index] = self._functions[key]
        return loaded

    @property
    def keeps_statistics(self) -> bool:
        """Return whether a function normalizes by running statistics, which checkpoints have to keep."""
        return any(function.arguments.normalize == "running" for function in self._functions.values())

    @contextmanager
    def freeze_statistics(self) -> Iterator[None]:
        """Keep scores out of the running statistics, within the block of a `with` statement."""
        for function in self._functions.values():
            function.is_frozen = True
        try:
            yield
        finally:
            for function in self._functions.values():
                function.is_frozen = False

    def state_dict(self) -> dict[str, Any]:
        """Return the running statistics, in the order of the functions."""
        return {"statistics": [function.statistics.state_dict() for function in self._functions.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from running statistics; raise ConfigError if the number of functions has changed."""
        if len(state["statistics"]) != len(self._functions):
            raise ConfigError(f"it has {len(state['statistics'])} reward models, the stage has {len(self._functions)}")
        for function, values in zip(self._functions.values(), state["statistics"], strict=True):
            function.statistics.load_state_dict(values)

    def close(self) -> None:
        """Release all models."""
        for scorer in self._scorers.values():
            scorer.close()

    def _scorer(self, source: ScoringModel, placement: str) -> SequenceScorer:
        key = source.init_from, source.hf, placement
        if key not in self._scorers:
            self._scorers[key] = SequenceScorer(self._load_model(source), self._tokenizer, placement)
        return self._scorers[key]

    def _load_model(self, source: ScoringModel) -> MegatronPolicy:
        if source.hf is not None:
            weights = open_hugging_face(Path(source.hf), "score")
            policy = self._build_policy(weights.model, weights.vocab_size)
            weights.load_into(policy.model)
            return policy
        assert source.init_from is not None  # one of the two is set
        name = source.init_from.removeprefix(OF_STAGES)
        path = Path(source.init_from) if name == source.init_from else self._find_checkpoint(name)
        manifest = read_manifest(path)
        policy = self._build_policy(
            read_model_section(path, manifest), manifest.get("vocab_size", self._tokenizer.vocab_size)
        )
        policy.load_checkpoint(path, weights_only=True, verify=name == source.init_from)
        return policy

    def _build_policy(self, model: ModelConfig, vocab_size: int) -> MegatronPolicy:
        config = self._config
        longest = max(model.max_sequence_length, config.model.max_sequence_length)
        return MegatronPolicy(
            replace(model, backend=config.model.backend, max_sequence_length=longest), self._layout,
            vocab_size=vocab_size, precision=config.precision, head="score", initialise=False,
            global_batch_size=config.train.global_batch_size, batching=Batching.from_config(config.train),
        )  # fmt: skip


def check_reward_models(stage: StageConfig, tokenizer: Tokenizer) -> None:
    """Check the reward models of a stage before anything is built, except those that another stage trains.

    A model must exist, have a score head, use the policy's tokenizer, and fit the parallel layout.
    """
    for index, arguments in list_models_on_ranks(stage.reward).items():
        if stage.rollout.is_asynchronous:
            raise ConfigError(
                f"reward.functions[{index}]: its models run on the training ranks, but rollout.async_enabled scores "
                "trajectories during training; serve the model and set url"
            )
        for model in arguments.members:
            where = f"reward.functions[{index}].kwargs.{'hf' if model.init_from is None else 'init_from'}"
            try:
                shape = _check_model(model, tokenizer)
                if shape is not None:
                    degrees.validate_model(shape, stage.parallel)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error


def _check_model(source: ScoringModel, tokenizer: Tokenizer) -> ModelConfig | None:
    """Check a model's head and tokenizer; return its shape, or None if another stage trains the model."""
    if source.hf is not None:
        weights = open_hugging_face(Path(source.hf), "score")
        weights.refuse_other_tokens(tokenizer)
        return weights.model
    assert source.init_from is not None  # one of the two is set
    if source.init_from.startswith(OF_STAGES):
        return None
    path = Path(source.init_from)
    manifest = read_manifest(path)
    shape = read_model_section(path, manifest)
    check_head(path, manifest, "score", weights_only=False)
    check_checkpoint(path, shape, tokenizer.digest)
    if manifest.get("vocab_size", tokenizer.vocab_size) < tokenizer.vocab_size:
        raise ConfigError(
            f"checkpoint {path} has a vocabulary of {manifest['vocab_size']} tokens, but the policy's tokenizer has "
            f"{tokenizer.vocab_size}; choose a reward model with the policy's tokenizer"
        )
    return shape
