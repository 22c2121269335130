"""What is planned: a stage of a run, the ranks it runs on, and its sequences and microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rl_megatron.batching.config import BatchingKind
from rl_megatron.batching.packing import round_up
from rl_megatron.config.algorithm_kinds import PairsConfig, PolicyGradientConfig, RolloutConfig
from rl_megatron.config.engines import ENGINE_DECLARATIONS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.model.sharded_shape import Head
from rl_megatron.topology.degrees import sequence_multiple, validate, validate_model, zigzag_slices


@dataclass(frozen=True)
class MicrobatchSizes:
    """The microbatches of one global batch on the data-parallel rank that has the most sequences.

    Attributes:
        counts: (sequences of a microbatch, how many such microbatches there are), the largest first. Padding sequences
            count only with `padded` batching. Microbatches that only fill an interleaved pipeline count, too.
    """

    counts: tuple[tuple[int, int], ...]

    @classmethod
    def from_sequences(
        cls, sequences: int, data: int, most: int, kind: BatchingKind, *, group_size: int = 1, multiple: int = 1
    ) -> MicrobatchSizes:
        """Cut a global batch of equally long sequences into microbatches, as rl_megatron/batching does.

        Args:
            sequences: The sequences of the global batch, over all ranks.
            data: The data-parallel ranks.
            most: The most sequences of a microbatch.
            kind: `train.batching`.
            group_size: The sequences that have to share a microbatch.
            multiple: The number of microbatches is rounded up to a multiple of this: the number of an interleaved
                pipeline's stages, otherwise 1.
        """
        groups = -(-sequences // (data * group_size))  # of a rank; only `padded` counts padding sequences
        most = min(most, groups * group_size)
        number = -(-groups * group_size // most)
        if kind == "padded":
            counts = Counter({most: number})
        elif kind == "dynamic":
            counts = Counter({most: groups * group_size // most})
            counts[groups * group_size % most] += 1
        else:  # packs of equal cost
            fewer, with_more = divmod(groups, number)
            counts = Counter({(fewer + 1) * group_size: with_more, fewer * group_size: number - with_more})
        present = {size: count for size, count in counts.items() if size and count}
        present[min(present)] += -number % multiple  # the smallest is repeated
        return cls(tuple(sorted(present.items(), reverse=True)))

    @property
    def number(self) -> int:
        """Return how many microbatches there are."""
        return sum(count for _, count in self.counts)

    @property
    def largest(self) -> int:
        """Return the sequences of the largest microbatch."""
        return self.counts[0][0]

    @property
    def smallest(self) -> int:
        """Return the sequences of the smallest microbatch."""
        return self.counts[-1][0]

    @property
    def sequences(self) -> int:
        """Return the sequences of all microbatches."""
        return sum(size * count for size, count in self.counts)


def get_group_size(stage: StageConfig) -> int:
    """Return the number of sequences that have to share a microbatch: 2 for preference pairs."""
    return 2 if isinstance(stage.algorithm, PairsConfig) else 1


@dataclass(frozen=True)
class Critic:
    """The critic of a stage, a second model with a score head, its own optimizer and its own loss."""

    optimizer: OptimizerConfig
    loss: Mapping[str, object]


@dataclass(frozen=True)
class Workload:
    """A stage on a number of ranks. Every sequence has the same number of tokens.

    Attributes:
        prompt_tokens: The tokens of a prompt, which are not trained on.
        response_tokens: The tokens of a response, or of any other text that is trained on.
        recomputes_logprobs: Whether the policy computes the logprobs of a rollout before training on it.
        head: The policy's head: "score" for a reward model.
    """

    stage: StageConfig
    world_size: int
    vocab_size: int
    prompt_tokens: int
    response_tokens: int
    uses_reference: bool = False
    recomputes_logprobs: bool = False
    critic: Critic | None = None
    head: Head = "lm"

    def __post_init__(self) -> None:
        validate(self.stage.parallel, self.world_size)
        validate_model(self.stage.model, self.stage.parallel)
        longest = self.stage.model.max_sequence_length
        if self.sequence_tokens > longest:
            raise ConfigError(
                f"plan.prompt_tokens={self.prompt_tokens} + plan.response_tokens={self.response_tokens} = "
                f"{self.sequence_tokens} exceeds model.max_sequence_length={longest}; lower the one or raise the other"
            )

    @property
    def data(self) -> int:
        """Return the data-parallel degree."""
        return validate(self.stage.parallel, self.world_size)

    @property
    def sequence_tokens(self) -> int:
        """Return the tokens of a sequence, prompt and response together."""
        return self.prompt_tokens + self.response_tokens

    @property
    def padded_tokens(self) -> int:
        """Return the padded length of a sequence in a microbatch, a multiple of `sequence_multiple`."""
        return round_up(self.sequence_tokens, sequence_multiple(self.stage.parallel))

    @property
    def generates(self) -> bool:
        """Return whether the stage samples the completions that it learns from."""
        return isinstance(self.stage.algorithm, RolloutConfig)

    @property
    def generates_itself(self) -> bool:
        """Return whether the policy generates with its own weights."""
        return self.generates and not self.syncs_weights

    @property
    def syncs_weights(self) -> bool:
        """Return whether weights are sent to rollout engines in other processes."""
        return self.generates and ENGINE_DECLARATIONS[self.stage.generation.engine].runs_in_processes

    @property
    def sequences_per_step(self) -> int:
        """Return the sequences that a training step learns from, over all ranks."""
        algorithm = self.stage.algorithm
        if isinstance(algorithm, RolloutConfig):
            return algorithm.prompts_per_step * algorithm.samples_per_prompt
        return self.stage.train.global_batch_size

    @property
    def samples_per_prompt(self) -> int:
        """Return how many completions of each prompt are sampled."""
        algorithm = self.stage.algorithm
        return algorithm.samples_per_prompt if isinstance(algorithm, RolloutConfig) else 1

    @property
    def group_size(self) -> int:
        """Return the number of sequences that have to share a microbatch."""
        return get_group_size(self.stage)

    @property
    def most_per_microbatch(self) -> int:
        """Return the most sequences that one microbatch on one data-parallel rank may have."""
        train, parallel = self.stage.train, self.stage.parallel
        if train.batching == "padded":
            return train.micro_batch_size
        length = self.padded_tokens
        if train.batching == "packed":  # only the whole pack is padded for sequence parallelism
            length = round_up(self.sequence_tokens, zigzag_slices(parallel.context))
        budget = train.micro_batch_tokens // sequence_multiple(parallel) * sequence_multiple(parallel)
        fits = budget // length // self.group_size * self.group_size
        if not fits:
            raise ConfigError(
                f"train.micro_batch_tokens={train.micro_batch_tokens} is less than {self.group_size} sequence(s) of "
                f"{length} tokens (plan.prompt_tokens={self.prompt_tokens}, plan.response_tokens="
                f"{self.response_tokens}); raise it, or plan shorter sequences"
            )
        return fits

    def microbatches(self, sequences: int, group_size: int | None = None) -> MicrobatchSizes:
        """Return a batch's microbatches on the rank with the most sequences. `group_size` defaults to the stage's."""
        return MicrobatchSizes.from_sequences(
            sequences, self.data, self.most_per_microbatch, self.stage.train.batching,
            group_size=group_size or self.group_size, multiple=self.filled_multiple,
        )  # fmt: skip

    @property
    def filled_multiple(self) -> int:
        """Return the divisor of a step's number of microbatches, which is reached by repeating the smallest one."""
        parallel = self.stage.parallel
        return parallel.pipeline if parallel.virtual_pipeline > 1 else 1

    @property
    def microbatches_of_step(self) -> MicrobatchSizes:
        """Return the microbatches of an optimizer step."""
        return self.microbatches(self.optimizer_batches[0][0])

    @property
    def microbatches_of_rollout(self) -> MicrobatchSizes:
        """Return the microbatches of a forward pass over all sequences of a training step."""
        return self.microbatches(self.sequences_per_step, group_size=1)

    @property
    def optimizer_batches(self) -> list[tuple[int, int]]:
        """Return (sequences of a global batch, how many optimizer steps have such a batch) for a training step."""
        algorithm, size = self.stage.algorithm, min(self.stage.train.global_batch_size, self.sequences_per_step)
        if not isinstance(algorithm, PolicyGradientConfig):
            return [(size, 1)]
        whole, rest = divmod(self.sequences_per_step, size)
        passes = algorithm.updates_per_rollout
        return [(size, whole * passes), *[(rest, passes)] * (rest > 0)]

    @property
    def idle_ranks(self) -> int:
        """Return how many data-parallel ranks get no sequence of a global batch."""
        return max(0, self.data - self.optimizer_batches[0][0] // self.group_size)

    @property
    def optimizer_steps(self) -> int:
        """Return the optimizer steps of one training step."""
        return sum(steps for _, steps in self.optimizer_batches)
