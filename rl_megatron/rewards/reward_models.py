"""Reward models on the ranks of the policy: they score whole sequences in sharded batches, like a value model.

A model runs under the policy's parallel layout. Rank 0 has the sequences; each goes to the data-parallel rank that
scores it, and its score comes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_megatron import log
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.checkpoint.directory import check_checkpoint, check_head, read_manifest, saved_model
from rl_megatron.checkpoint.hf_load import open_hugging_face
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.reward_models import OF_STAGES, RewardModelArguments, ScoringModel, on_ranks
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.collate import Padding
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.rewards.running_statistics import RunningStatistics
from rl_megatron.topology import degrees
from rl_megatron.topology.topology import Topology
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.reference import HostWeights

CheckpointOf = Callable[[str], Path]
"""Returns the last checkpoint of a stage, by its name."""


class SequenceScorer:
    """One model with a score head. It owns the weights and their placement."""

    def __init__(self, policy: MegatronPolicy, tokenizer: Tokenizer, placement: str):
        """Keep the model, whose weights are loaded."""
        for model_chunk in policy.model.model_chunks:
            model_chunk.eval().requires_grad_(False)
        self._policy, self._padding = policy, Padding(tokenizer.pad_id, 1)
        device = policy.topology.device
        offloads = placement == "offload" and device.type == "cuda"
        self._host = HostWeights(policy.model.model_chunks, device) if offloads else None
        if placement == "offload" and not offloads:
            log.once("placement=offload of a reward model has no effect on a CPU, where host memory is the device's")

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each sequence on every rank, read after its last token. Collective.

        Args:
            sequences: The tokens of each, on rank 0; other ranks' are not used.
        """
        topology = self._policy.topology
        ranks = topology.ranks
        if not ranks.share(lambda: len(sequences)):
            return []
        own = self._padding.collate([list(each) for each in sequences]) if ranks.leads else None
        with self._host.on_device() if self._host is not None else nullcontext():
            batch = self._policy.distribute(Batch.gather_facts(own, topology))
            batch["scores"] = self._policy.score(batch)["scores"].cpu()
        at_home = batch.gather_at_homes(["scores"])
        return ranks.share(at_home["scores"].tolist)

    def close(self) -> None:
        """Release the model."""
        self._policy.shutdown()


@dataclass
class RewardModel:
    """The reward function `reward_model` on the policy's ranks: models, and what becomes of their scores.

    Attributes:
        arguments: Its arguments.
        scorers: Its models.
        statistics: The scores of training so far, for `normalize=running`.
        is_frozen: Whether scores do not change the statistics, as those of an evaluation.
    """

    arguments: RewardModelArguments
    scorers: Sequence[SequenceScorer]
    statistics: RunningStatistics = field(default_factory=RunningStatistics)
    is_frozen: bool = False

    def results(self, sequences: Sequence[Sequence[int]]) -> list[dict[str, float]]:
        """Return for each sequence the `score` and the metrics `raw` and, of an ensemble, `spread`. Collective."""
        of_models = [scorer.scores(sequences) for scorer in self.scorers]
        combined = [self._combined(scores) for scores in zip(*of_models, strict=True)]
        running = self.arguments.normalize == "running"
        if running and not self.is_frozen:
            self.statistics.add([value for value in combined if math.isfinite(value)])
        results = []
        for value, scores in zip(combined, zip(*of_models, strict=True), strict=True):
            score = self.statistics.normalized(value) if running else value
            clip = self.arguments.clip
            metrics = {"raw": sum(scores) / len(scores)}
            if len(scores) > 1:
                metrics["spread"] = max(scores) - min(scores)
            results.append({"score": score if clip is None else min(max(score, -clip), clip), **metrics})
        return results

    def _combined(self, scores: Sequence[float]) -> float:
        """Return the score of the models together, or NaN if a score is not finite: min and clip would hide that."""
        if not all(map(math.isfinite, scores)):
            return math.nan
        members = self.arguments.members
        shifted = [(score - each.mean) / each.std for score, each in zip(scores, members, strict=True)]
        if self.arguments.combine == "min":
            return min(shifted)
        total = sum(each.weight for each in members)
        return sum(value * each.weight for value, each in zip(shifted, members, strict=True)) / total


class RewardModels:
    """The reward models of one stage. A model that several functions name is loaded once."""

    def __init__(self, config: StageConfig, layout: Topology, tokenizer: Tokenizer, checkpoint_of: CheckpointOf):
        """Load nothing yet."""
        self._config, self._layout, self._tokenizer, self._checkpoint_of = config, layout, tokenizer, checkpoint_of
        self._scorers: dict[tuple[str | None, str | None, str], SequenceScorer] = {}
        self._functions: dict[str, RewardModel] = {}

    def of(self, settings: RewardConfig) -> dict[int, RewardModel]:
        """Return the reward models of some functions by their places in the list, with their weights. Collective."""
        found = {}
        for index, arguments in on_ranks(settings).items():
            key = repr(arguments)
            if key not in self._functions:
                scorers = [self._scorer(model, arguments.placement) for model in arguments.members]
                self._functions[key] = RewardModel(arguments, scorers)
            found[index] = self._functions[key]
        return found

    @property
    def keeps_statistics(self) -> bool:
        """Return whether a function normalizes by running statistics, which checkpoints have to keep."""
        return any(each.arguments.normalize == "running" for each in self._functions.values())

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let scores leave the running statistics as they are, within the block of a `with` statement."""
        for function in self._functions.values():
            function.is_frozen = True
        try:
            yield
        finally:
            for function in self._functions.values():
                function.is_frozen = False

    def state_dict(self) -> dict[str, Any]:
        """Return the running statistics, in the order of the functions."""
        return {"statistics": [each.statistics.state_dict() for each in self._functions.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from running statistics.

        Raises:
            ConfigError: They are those of other functions.
        """
        if len(state["statistics"]) != len(self._functions):
            raise ConfigError(f"it has {len(state['statistics'])} reward models, and the stage {len(self._functions)}")
        for function, values in zip(self._functions.values(), state["statistics"], strict=True):
            function.statistics.load_state_dict(values)

    def close(self) -> None:
        """Release all models."""
        for scorer in self._scorers.values():
            scorer.close()

    def _scorer(self, source: ScoringModel, placement: str) -> SequenceScorer:
        key = source.init_from, source.hf, placement
        if key not in self._scorers:
            self._scorers[key] = SequenceScorer(self._loaded(source), self._tokenizer, placement)
        return self._scorers[key]

    def _loaded(self, source: ScoringModel) -> MegatronPolicy:
        if source.hf is not None:
            weights = open_hugging_face(Path(source.hf), "score")
            policy = self._built(weights.model, weights.vocab_size)
            weights.load_into(policy.model)
            return policy
        assert source.init_from is not None  # one of the two is set
        name = source.init_from.removeprefix(OF_STAGES)
        path = Path(source.init_from) if name == source.init_from else self._checkpoint_of(name)
        manifest = read_manifest(path)
        policy = self._built(saved_model(path, manifest), manifest.get("vocab_size", self._tokenizer.vocab_size))
        policy.load_checkpoint(path, weights_only=True, verify=name == source.init_from)
        return policy

    def _built(self, model: ModelConfig, vocab_size: int) -> MegatronPolicy:
        config = self._config
        longest = max(model.max_sequence_length, config.model.max_sequence_length)
        return MegatronPolicy(
            replace(model, backend=config.model.backend, max_sequence_length=longest), self._layout,
            vocab_size=vocab_size, precision=config.precision, head="score", initialise=False,
            global_batch_size=config.train.global_batch_size, batching=Batching.from_config(config.train),
        )  # fmt: skip


def check_reward_models(stage: StageConfig, tokenizer: Tokenizer) -> None:
    """Check the reward models of a stage before anything is built, apart from those that another stage makes.

    Raises:
        ConfigError: There is no such model, it has no score head, its tokens are others than the policy's, or it does
            not fit the layout. The message names the key.
    """
    for index, arguments in on_ranks(stage.reward).items():
        if stage.rollout.is_asynchronous:
            raise ConfigError(
                f"reward.functions[{index}]: its models run on the ranks that train, and rollout.async_enabled scores "
                "trajectories meanwhile; serve the model and set url"
            )
        for model in arguments.members:
            where = f"reward.functions[{index}].kwargs.{'hf' if model.init_from is None else 'init_from'}"
            try:
                shape = _checked(model, tokenizer)
                if shape is not None:
                    degrees.validate_model(shape, stage.parallel)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error


def _checked(source: ScoringModel, tokenizer: Tokenizer) -> ModelConfig | None:
    """Return the shape of a model whose head and tokens are right, or None if a stage will make it."""
    if source.hf is not None:
        weights = open_hugging_face(Path(source.hf), "score")
        weights.refuse_other_tokens(tokenizer)
        return weights.model
    assert source.init_from is not None  # one of the two is set
    if source.init_from.startswith(OF_STAGES):
        return None
    path = Path(source.init_from)
    manifest = read_manifest(path)
    shape = saved_model(path, manifest)
    check_head(path, manifest, "score", weights_only=False)
    check_checkpoint(path, shape, tokenizer.digest)
    if manifest.get("vocab_size", tokenizer.vocab_size) < tokenizer.vocab_size:
        raise ConfigError(
            f"checkpoint {path} has a vocabulary of {manifest['vocab_size']} tokens, and the policy's tokenizer has "
            f"{tokenizer.vocab_size}; choose a reward model with the policy's tokenizer"
        )
    return shape
