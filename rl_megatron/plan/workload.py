"""What is planned: a stage of a run, the ranks it runs on, and its sequences and microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from rl_megatron.batching.config import Batching, BatchingKind
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.packing import round_up
from rl_megatron.batching.rank_plan import plan_lengths
from rl_megatron.batching.shared_prefixes import NEIGHBOUR, SHARED, SharedPrefixes
from rl_megatron.config.algorithm_kinds import PairsConfig, PolicyGradientConfig, RolloutConfig
from rl_megatron.config.engines import ENGINE_DECLARATIONS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model_shape import head_size
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.model.sharded_shape import Head
from rl_megatron.topology.degrees import (
    ConfiguredLayout,
    sequence_multiple,
    validate,
    validate_model,
    zigzag_slices,
)


@dataclass(frozen=True)
class MicrobatchSizes:
    """The microbatches of one global batch on the data-parallel rank that has the most sequences.

    Attributes:
        counts: (sequences of a microbatch, how many such microbatches there are), the largest first. Padding sequences
            count only with `padded` batching. Microbatches that only fill an interleaved pipeline count, too.
        trees: If sequences share their prompt's tokens, the number of sequences of each of its prompts, for each entry
            of `counts`.
    """

    counts: tuple[tuple[int, int], ...]
    trees: tuple[tuple[int, ...], ...] | None = None

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

    @classmethod
    def from_shared(cls, packs: Mapping[tuple[int, ...], int], multiple: int = 1) -> MicrobatchSizes:
        """Return the sizes of packs, given as (sequences of each prompt) → how many such packs there are."""
        present = dict(packs)
        present[min(present, key=sum)] += -sum(present.values()) % multiple
        trees = sorted(present, key=sum, reverse=True)
        return cls(tuple((sum(tree), present[tree]) for tree in trees), tuple(trees))

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


@lru_cache(maxsize=256)  # a search repeats the same call
def _share_prompts(
    sequences: int, per_prompt: int, prompt: int, length: int, batching: Batching, layout: ConfiguredLayout,
    group_size: int, cost: SequenceCost,
) -> Mapping[tuple[int, ...], int] | None:  # fmt: skip
    """Return the packs in which sequences share prompts, on the data-parallel rank that computes the most tokens.

    Args:
        sequences: The sequences of the batch, over all ranks.
        per_prompt: How many consecutive sequences have the same prompt.
        prompt: The tokens of a prompt.
        length: The tokens of a sequence.
        batching: How sequences form microbatches.
        layout: The layout.
        group_size: The sequences that have to share a microbatch.
        cost: The cost of a sequence.

    Returns:
        (sequences of each prompt in a pack) → the number of such packs; None if sharing does not pay.
    """
    is_later = torch.arange(sequences) % per_prompt != 0
    # The prompt's last token is not shared, because different tokens follow it.
    prefixes = SharedPrefixes({NEIGHBOUR: -is_later.int(), SHARED: is_later.int() * (prompt - 1)})
    prefixes = prefixes.round_down(zigzag_slices(layout.context))
    shared = replace(batching, share_prefixes=True)
    planned = plan_lengths([length] * sequences, length, shared, layout, layout.data, group_size, cost, prefixes)
    if not planned.shares_prefixes:
        return None
    fullest = max(range(layout.data), key=lambda shard: sum(planned.plan.slots[shard]))
    packs = Counter(
        tuple(Counter(number // per_prompt for number in pack if number < sequences).values())
        for pack in planned.plan.sequences[fullest]
    )
    return {pack: count for pack, count in packs.items() if pack}


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

    @property
    def shares_prompts(self) -> bool:
        """Return whether sequences of one prompt may share its tokens."""
        return self.stage.train.share_prefixes == "auto" and self.sequences_per_prompt > 1 and self.prompt_tokens > 1

    @property
    def attends_by_flash(self) -> bool:
        """Return whether a GPU's flash kernel supports the attention of the model."""
        model = self.stage.model
        size = head_size(model)
        return self.stage.precision != "fp32" and model.kv_lora_rank is None and size % 8 == 0 and size <= 256

    @property
    def sequences_per_prompt(self) -> int:
        """Return how many sequences begin with the same prompt."""
        return self.samples_per_prompt if self.generates else self.group_size

    @property
    def batching(self) -> Batching:
        """Return how the stage's sequences form microbatches."""
        train = self.stage.train
        return Batching(train.batching, self.most_per_microbatch, train.micro_batch_tokens)

    def microbatches(self, sequences: int, group_size: int | None = None) -> MicrobatchSizes:
        """Return a batch's microbatches on the rank with the most sequences. `group_size` defaults to the stage's."""
        layout = ConfiguredLayout.from_config(self.stage.parallel, self.world_size)
        return self.divide(sequences, layout, self.batching, group_size or self.group_size, self.filled_multiple)

    def divide(
        self, sequences: int, layout: ConfiguredLayout, batching: Batching, group_size: int, multiple: int
    ) -> MicrobatchSizes:
        """Return a batch's microbatches on the rank with the most sequences, in any layout.

        Args:
            sequences: The sequences of the batch.
            layout: The layout; that of the workload is ignored.
            batching: How sequences form microbatches, with at most `sequences` sequences each.
            group_size: The sequences that have to share a microbatch.
            multiple: The number of microbatches is rounded up to a multiple of this.
        """
        if self.shares_prompts:
            cost = SequenceCost.from_model(self.stage.model, self.vocab_size)
            packs = _share_prompts(
                sequences, self.sequences_per_prompt, self.prompt_tokens, self.sequence_tokens, batching, layout,
                group_size, cost,
            )  # fmt: skip
            if packs is not None:
                return MicrobatchSizes.from_shared(packs, multiple)
        return MicrobatchSizes.from_sequences(
            sequences, layout.data, batching.sequences, batching.kind, group_size=group_size, multiple=multiple
        )

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
