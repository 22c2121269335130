"""The numbers that closed forms and estimates need about a workload, and the shapes of its microbatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Literal, Self

from rl_megatron.batching.config import Batching
from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.config.errors import ConfigError
from rl_megatron.model.microbatch_shape import MicrobatchShape
from rl_megatron.model.sharded_shape import ShardedShape
from rl_megatron.plan import closed_forms
from rl_megatron.plan.phases import Bytes
from rl_megatron.plan.servers import Servers
from rl_megatron.plan.workload import Workload
from rl_megatron.topology.degrees import ConfiguredLayout, zigzag_slices


@dataclass(frozen=True)
class BatchShape:
    """The microbatches of a data-parallel rank in one or several batches.

    Attributes:
        parts: (shape of a microbatch, how many such microbatches there are), the largest first.
    """

    parts: tuple[tuple[MicrobatchShape, int], ...]

    @property
    def number(self) -> int:
        """Return how many microbatches there are."""
        return sum(count for _, count in self.parts)

    @property
    def largest(self) -> MicrobatchShape:
        """Return the microbatch with the most tokens."""
        return max((microbatch for microbatch, _ in self.parts), key=lambda microbatch: microbatch.tokens)

    @property
    def tokens(self) -> int:
        """Return the tokens of all microbatches, padding included."""
        return sum(microbatch.tokens * count for microbatch, count in self.parts)


@dataclass(frozen=True)
class Batches:
    """The batches of a training step, on the data-parallel rank that has the most sequences.

    Attributes:
        step: One optimizer step.
        training: All optimizer steps. The last one of each pass over the rollouts may have fewer sequences.
        rollout: A forward pass over all sequences, as for logprobs.
        learned_sequences: The number of sequences over all ranks, without padding; a sequence counts once for each
            update that trains on it.
    """

    step: BatchShape
    training: BatchShape
    rollout: BatchShape
    learned_sequences: int
    optimizer_steps: int

    @classmethod
    def from_workload(cls, workload: Workload) -> Self:
        """Plan the batches of a workload in its own layout."""
        layout = ConfiguredLayout.from_config(workload.stage.parallel, workload.world_size)
        return cls.from_layout(workload, layout, workload.batching, workload.filled_multiple)

    @classmethod
    def from_layout(cls, workload: Workload, layout: ConfiguredLayout, batching: Batching, multiple: int) -> Self:
        """Plan the batches of a workload in any layout.

        Args:
            workload: The workload; its own layout and batching are ignored.
            layout: The layout.
            batching: How sequences form microbatches, with at most `sequences` sequences each.
            multiple: The number of microbatches is rounded up to a multiple of this.
        """
        length, prompt = workload.sequence_tokens, workload.prompt_tokens
        multiple_of_length = zigzag_slices(layout.context)

        def make_shape(size: int, samples: Sequence[int] | None) -> MicrobatchShape:
            if samples is None:
                packed = batching.kind == "packed"
                return MicrobatchShape.from_lengths([length] * size, layout, is_packed=packed, prompt_tokens=prompt)
            common = (prompt - 1) // multiple_of_length * multiple_of_length
            shared = [common if number else 0 for count in samples for number in range(count)]
            tree = PrefixTree.build([length] * size, shared)
            return MicrobatchShape.from_tree(tree, layout, length, prompt, by_flash=workload.attends_by_flash)

        def shape(sequences: int, times: int, group_size: int) -> BatchShape:
            sizes = workload.divide(sequences, layout, batching, group_size, multiple)
            trees = sizes.trees or repeat(None)
            parts = zip(sizes.counts, trees, strict=False)
            return BatchShape(tuple((make_shape(size, samples), count * times) for (size, count), samples in parts))

        steps, group_size = workload.optimizer_batches, workload.group_size
        training = [part for sequences, times in steps for part in shape(sequences, times, group_size).parts]
        return cls(
            shape(steps[0][0], 1, group_size),
            BatchShape(tuple(training)),
            shape(workload.sequences_per_step, 1, 1),
            sum(sequences * times for sequences, times in steps),
            workload.optimizer_steps,
        )


@dataclass(frozen=True)
class Settings:
    """The numbers that closed forms and estimates need about a workload. The search changes some of them.

    Attributes:
        shape: The model in its layout, with its recomputation.
        precision: "bf16" or "fp32".
        distributed: `optimizer.distributed`.
        pads: Whether every sequence is padded to the longest of its batch.
        reference: Where the reference policy is kept, or None if the stage needs no reference policy.
        recomputes_logprobs: Whether the policy computes the logprobs of a rollout before training on it.
        critic_distributed: `distributed` of the critic's optimizer, or None without a critic.
        completions: Completions that each model replica generates in a step; 0 if the policy does not generate.
        prompts: The number of different prompts of these completions.
        decoded_together: The completions that are decoded together.
        response_tokens: The tokens of the longest response.
        bucket_bytes: The bytes of a bucket of a weight sync, or 0 if weights are not sent.
        sends_adapter: Whether a weight sync sends only the adapter.
        servers: The rollout engine's processes; None if there are none, or if no type of GPU is chosen.
    """

    shape: ShardedShape
    precision: str
    distributed: bool
    fused_head: bool
    batches: Batches
    pads: bool
    reference: Literal["resident", "offload"] | None
    recomputes_logprobs: bool
    critic_distributed: bool | None
    completions: int
    prompts: int
    decoded_together: int
    prompt_tokens: int
    response_tokens: int
    mean_response_tokens: int
    bucket_bytes: int
    sends_adapter: bool
    servers: Servers | None = None

    @classmethod
    def from_workload(cls, workload: Workload, mean_response_tokens: int | None = None) -> Self:
        """Return the settings of a workload. Without `mean_response_tokens`, all responses have the maximum length.

        Raises:
            ConfigError: The mean exceeds the longest response.
        """
        stage, longest = workload.stage, workload.response_tokens
        mean = longest if mean_response_tokens is None else mean_response_tokens
        if mean > longest:
            raise ConfigError(
                f"plan.mean_response_tokens={mean} exceeds the longest response, plan.response_tokens={longest}; lower "
                "the one or raise the other"
            )
        replicas = workload.data * stage.parallel.context
        completions = -(-workload.sequences_per_step // replicas) if workload.generates_itself else 0
        return cls(
            shape=ShardedShape(
                stage.model, stage.parallel, workload.world_size, workload.vocab_size, workload.head, stage.peft
            ),
            precision=stage.precision,
            distributed=stage.optimizer.distributed,
            fused_head=stage.train.fused_head,
            batches=Batches.from_workload(workload),
            pads=stage.train.batching == "padded",
            reference=stage.train.reference if workload.uses_reference else None,
            recomputes_logprobs=workload.recomputes_logprobs,
            critic_distributed=None if workload.critic is None else workload.critic.optimizer.distributed,
            completions=completions,
            prompts=min(completions, -(-workload.sequences_per_step // workload.samples_per_prompt)),
            decoded_together=min(completions, stage.generation.batch_size),
            prompt_tokens=workload.prompt_tokens,
            response_tokens=workload.response_tokens,
            mean_response_tokens=mean,
            bucket_bytes=round(stage.generation.refit_bucket_mb * 2**20) if workload.syncs_weights else 0,
            sends_adapter=stage.generation.refit == "adapter",
        )

    @property
    def microbatch(self) -> MicrobatchShape:
        """Return the largest microbatch of an optimizer step."""
        return self.batches.step.largest

    @property
    def microbatches(self) -> int:
        """Return the microbatches of an optimizer step."""
        return self.batches.step.number

    @property
    def models(self) -> list[tuple[ShardedShape, bool]]:
        """Return the shape of each trained model, the policy first, and whether its optimizer state is sharded."""
        policy = (self.shape, self.distributed)
        if self.critic_distributed is None:
            return [policy]
        return [policy, (replace(self.shape, head="score"), self.critic_distributed)]

    @property
    def copies_on_device(self) -> bool:
        """Return whether a reference policy has its own weights on the device. With adapters, it uses the policy's."""
        return self.reference == "resident" and self.shape.lora is None

    def count_static_bytes(self, stage: int) -> Bytes:
        """Return what a rank of a pipeline stage holds between phases: all weights, gradients and optimizer states."""
        model_bytes = [
            closed_forms.mean_training_bytes(shape, stage, precision=self.precision, distributed=distributed)
            for shape, distributed in self.models
        ]
        copies = [*model_bytes, *[model_bytes[0]] * self.copies_on_device]
        return Bytes(
            sum(model.parameters for model in copies),
            sum(model.gradients for model in model_bytes),
            sum(model.optimizer for model in model_bytes),
        )

    @property
    def useful_share(self) -> float:
        """Return the mean sequence length divided by the longest sequence length."""
        return (self.prompt_tokens + self.mean_response_tokens) / (self.prompt_tokens + self.response_tokens)

    @property
    def computed_share(self) -> float:
        """Return a step's computed tokens, divided by those of a step whose responses all have the maximum length."""
        return 1.0 if self.pads else self.useful_share

    def mean_number(self, batch: BatchShape, at_least: int = 1) -> int:
        """Return the number of a batch's microbatches if responses have the mean length, at least `at_least`."""
        return min(batch.number, max(at_least, math.ceil(self.computed_share * batch.number)))
