"""The phases of a step on one rank, with the real policy, critic, optimizer and engine, on fake or real GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.batching.config import Batching
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.checkpoint.optimizer_state import list_parts
from rl_megatron.checkpoint.training_state import TrainingState
from rl_megatron.config.engines import releases_memory
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.embedded import EmbeddedReplica
from rl_megatron.generation.interfaces import Request, Sampling
from rl_megatron.generation.requests import PartialCompletion
from rl_megatron.losses import as_loss
from rl_megatron.losses.contract import LossFunction
from rl_megatron.losses.registry import configured_loss
from rl_megatron.model.build import Head, unwrap
from rl_megatron.plan.measured import (
    Measured,
    combine_decoding,
    combine_sequential,
    extrapolate_microbatches,
    repeat,
    subtract,
)
from rl_megatron.plan.phases import PhaseName
from rl_megatron.plan.workload import MicrobatchSizes, Workload
from rl_megatron.topology.topology import Topology
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.reference import ReferenceModel
from rl_megatron.training.runner import FusedHead
from rl_megatron.training.training_memory import offloadable_states
from rl_megatron.weight_sync.exporter import AdapterExporter, BaseExporter, WeightExporter
from rl_megatron.weight_sync.sender import WeightSender

_PER_SEQUENCE = ("sample_mask", "rewards", "temperature")
_TOP_K = 64  # teacher logits per token, if a loss reads any
_MEGABYTE = 1 << 20


class PhaseCounter(Protocol):
    """The counter of a phase: `Ledger` on fake GPUs. On a real device, another class may measure the same phases."""

    def phase(self, name: PhaseName) -> AbstractContextManager[list[Measured]]:
        """Count the block of a `with` statement as a phase, and append its use to the yielded list at the end."""
        ...

    def label(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Count the memory of existing tensors as `category` from now on."""
        ...


@dataclass
class RankPhases:
    """A policy, its critic if it has one, and the phases of a step. `build` must be called first."""

    workload: Workload
    topology: Topology
    ledger: PhaseCounter
    _models: list[MegatronPolicy] = field(default_factory=list)  # the policy, and then the critic

    @property
    def policy(self) -> MegatronPolicy:
        return self._models[0]

    @property
    def critic(self) -> MegatronPolicy:
        return self._models[1]

    def build(self) -> Measured:
        """Build the policy, the critic and the reference policy."""
        work = self.workload
        with self.ledger.phase("build") as result:
            self._models.append(self._build_model(work.stage.optimizer, work.head))
            self._label(self.policy)
            if work.critic is not None:
                self._models.append(self._build_model(work.critic.optimizer, "score"))
                self._label(self.critic)
            if work.uses_reference:
                self.policy.freeze_reference()
                self._label(self.policy)
        return result[0]

    def _build_model(self, optimizer: OptimizerConfig, head: Head) -> MegatronPolicy:
        stage = self.workload.stage
        return MegatronPolicy(
            replace(stage.model, backend="portable"), self.topology, vocab_size=self.workload.vocab_size,
            precision=stage.precision,
            seed=stage.train.seed, optimizer=optimizer, total_steps=stage.train.steps,
            global_batch_size=stage.train.global_batch_size, batching=Batching.from_config(stage.train), head=head,
            fused_head=FusedHead() if stage.train.fused_head else None, reference_placement=stage.train.reference,
            peft=stage.peft,
        )  # fmt: skip

    def _label(self, policy: MegatronPolicy) -> None:
        """Count the memory of a policy or critic under its categories."""
        label = self.ledger.label
        reference = policy.reference
        models = [policy.model, *([reference.model] if isinstance(reference, ReferenceModel) else [])]
        modules = [unwrap(model_chunk) for model in models for model_chunk in model.model_chunks]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        label((buffer for module in modules for buffer in module.buffers()), "buffers")
        label(parameters, "parameters")
        label((getattr(parameter, "main_grad", None) for parameter in parameters), "gradients")
        weights = {parameter.untyped_storage()._cdata for parameter in parameters}
        for part in list_parts(policy.optimizer) if policy.optimizer is not None else ():
            updated = [x for group in part.optimizer.param_groups for x in group["params"]]
            states = [
                # The counts of steps, one number for each parameter, are left out.
                x
                for state in part.optimizer.state.values()
                for x in state.values()
                if isinstance(x, Tensor) and x.dim()
            ]
            label((x for x in updated + states if x.untyped_storage()._cdata not in weights), "optimizer")

    def logprobs(self) -> Measured:
        """Compute logprobs of all sequences of a step."""
        return self._run_forward("logprobs", self.policy.get_logprobs)

    def reference(self) -> Measured:
        """Compute the reference policy's logprobs of all sequences of a step."""
        return self._run_forward("reference", self.policy.get_reference_policy_logprobs)

    def values(self) -> Measured:
        """Compute the critic's values of all sequences of a step."""
        return self._run_forward("values", self.critic.get_values)

    def _run_forward(self, name: PhaseName, compute: Callable[[BatchedDataDict], object]) -> Measured:
        def run(sequences: int) -> Measured:
            batch = self._build_batch(sequences, ("input_ids", "input_lengths", "temperature"))
            with self.ledger.phase(name) as result:
                compute(batch)
            return result[0]

        work = self.workload
        return self._run_microbatches(run, work.sequences_per_step, work.microbatches_of_rollout)

    def train(self) -> Measured:
        """Run the policy's optimizer steps of one training step."""
        return self._run_training("train", self.policy, configured_loss(self.workload.stage.loss))

    def train_critic(self) -> Measured:
        """Run the critic's optimizer steps of one training step."""
        assert self.workload.critic is not None  # the phase is run only with a critic
        return self._run_training("train_critic", self.critic, configured_loss(self.workload.critic.loss))

    def _run_training(self, name: PhaseName, model: MegatronPolicy, loss: LossFunction) -> Measured:
        keys = ("input_ids", "input_lengths", "temperature", *as_loss(loss).required_keys)

        def run(sequences: int) -> Measured:
            batch = self._build_batch(sequences, keys)
            with self.ledger.phase(name) as result:
                model.train(batch, loss, gbs=batch.size, on_policy=True)
            return result[0]

        work = self.workload
        batch_uses = [
            repeat(self._run_microbatches(run, sequences, work.microbatches(sequences)), steps)
            for sequences, steps in work.optimizer_batches
        ]
        return combine_sequential(batch_uses)

    def _run_microbatches(
        self, run: Callable[[int], Measured], sequences: int, microbatches: MicrobatchSizes
    ) -> Measured:
        """Return what a global batch uses. If it has many microbatches, smaller batches are run and extrapolated.

        `run` is called with the number of sequences of a global batch. `microbatches` are this rank's microbatches of
        the batch.
        """
        data, depth = self.topology.data, self.topology.pipeline
        enough, most = 2 * depth + depth * (self.topology.virtual_pipeline > 1), microbatches.largest
        if microbatches.number <= enough + depth:
            return run(sequences)
        few, more = run(data * enough * most), run(data * (enough + depth) * most)
        result = extrapolate_microbatches(few, more, (microbatches.number - enough) / depth)
        if microbatches.smallest == most:
            return result
        lacking = most - microbatches.smallest  # sequences that one microbatch of `less` lacks
        less = run(data * ((enough + depth) * most - lacking))
        lacking_of_all = microbatches.number * most - microbatches.sequences
        return subtract(result, more, less, lacking_of_all / lacking)

    def _build_batch(self, count: int, keys: Iterable[str]) -> BatchedDataDict:
        """Return a global batch of `count` sequences of the same length."""
        work = self.workload
        length = work.sequence_tokens
        response_mask = torch.zeros(count, length)
        response_mask[:, work.prompt_tokens :] = 1.0
        ids = torch.zeros(count, length, dtype=torch.long)
        if work.shares_prompts and work.prompt_tokens < length:
            ids[:, work.prompt_tokens] = torch.arange(count) % work.sequences_per_prompt
        batch = BatchedDataDict(
            input_ids=ids,
            input_lengths=torch.full((count,), length),
            token_mask=response_mask,
            sample_mask=torch.ones(count),
        )
        if work.shares_prompts:
            batch[PREFIX_SET] = torch.arange(count) // work.sequences_per_prompt
        for key in keys:
            if key in batch:
                continue
            if key in _PER_SEQUENCE:
                batch[key] = torch.ones(count)
            elif key.startswith("teacher_topk"):
                dtype = torch.long if key.endswith("indices") else torch.float32
                batch[key] = torch.zeros(count, length, _TOP_K, dtype=dtype)
            else:
                batch[key] = response_mask.clone()
        return batch

    def generate(self) -> Measured:
        """Generate the completions of this rank's prompts with the embedded engine.

        Only the first and the last token of each completion are generated. The use of the others is interpolated.
        """
        work, policy, generation = self.workload, self.policy, self.workload.stage.generation
        replicas = self.topology.groups.dp_cp.size()
        total = -(-work.sequences_per_step // replicas)
        slots = min(total, generation.batch_size)
        sampling = Sampling(work.response_tokens, generation.temperature, generation.top_k, generation.top_p)
        policy.finish_training()

        def decoder_with(done: int) -> Decoder:
            decoder = Decoder(EmbeddedReplica(policy, generation.router_replay), slots)
            # The samples of a prompt are spread over the ranks. Equal prompts are read once.
            numbers = [index * replicas // work.samples_per_prompt for index in range(slots)]
            prompts = [(number, *[0] * (work.prompt_tokens - 1)) for number in numbers]
            requests = [Request(f"{index}", prompt, sampling, index) for index, prompt in enumerate(prompts)]
            decoder.add([PartialCompletion(request, [0] * done, [0.0] * done) for request in requests])
            return decoder

        def read(decoder: Decoder) -> None:
            while decoder.waiting:
                decoder.advance()

        with self.ledger.phase("generate") as prompt:
            decoder = decoder_with(0)
            with decoder.active():
                read(decoder)
        with self.ledger.phase("generate") as first, decoder.active():
            decoder.advance()
        if work.response_tokens == 1:
            return combine_decoding(prompt[0], first[0], first[0], 1, total / slots)
        del decoder
        decoder = decoder_with(work.response_tokens - 1)
        with decoder.active():
            read(decoder)
        with self.ledger.phase("generate") as last, decoder.active():
            decoder.advance()
        return combine_decoding(prompt[0], first[0], last[0], work.response_tokens, total / slots)

    def refit(self) -> Measured:
        """Fill the buckets of a weight sync, and sum them over the ranks."""
        policy, offloads = self.policy, releases_memory(self.workload.stage.generation)
        if offloads:  # the servers are about to take memory
            policy.offload_after_refit()
        with self.ledger.phase("refit") as result:
            policy.offload_before_refit()
            generation = self.workload.stage.generation
            max_bytes = round(generation.refit_bucket_mb * _MEGABYTE)
            sender = policy.weights
            if generation.refit == "adapter":
                for _ in _fill_buckets(WeightSender(policy.model, BaseExporter).get_exporter(max_bytes), num_buffers=1):
                    pass  # engines get the base when they start
                sender = WeightSender(policy.model, AdapterExporter)
            for filled in _fill_buckets(sender.get_exporter(max_bytes)):
                dist.all_reduce(filled)
        if offloads and policy.optimizer is not None:  # as training does; the copies on the host stay allocated
            policy.memory.restore_optimizer()
            self._label(policy)
            copies = sum(s.tensor.nbytes for s in offloadable_states(policy.optimizer, policy.model.model_chunks))
            return replace(result[0], host_bytes=max(result[0].host_bytes, copies))
        return result[0]

    def save(self) -> Measured:
        """Copy the training state of all models to the host, as checkpoints do."""
        for model in self._models:
            model.memory.allocate_gradients()  # a checkpoint follows training, which needs gradients
        with self.ledger.phase("save") as result:
            copies = []
            for model in self._models:
                model.memory.restore_optimizer()
                model.finish_training()
                selection = "all" if model.model.lora is None else "adapters"
                state = TrainingState(model.model, model.optimizer, model.scheduler, selection).build_sharded()
                copies += [tensor.detach().cpu() for tensor in _written_tensors(state)]
            del copies
        return result[0]

    def close(self) -> None:
        """Free the models."""
        while self._models:
            self._models.pop().shutdown()


def _fill_buckets(exporter: WeightExporter, num_buffers: int = 2) -> Iterator[Tensor]:
    """Yield the filled buckets of an exporter, which use `num_buffers` buffers in turn."""
    buckets = exporter.plan.buckets
    buffers = [exporter.allocate_buffer() for _ in buckets[:num_buffers]]
    for index, _ in enumerate(buckets):
        yield exporter.fill(index, buffers[index % num_buffers])


def _written_tensors(state: object) -> Iterator[Tensor]:
    """Yield the tensors of a sharded state that this rank writes: those of which it has the first replica."""
    if isinstance(state, dict):
        for value in state.values():
            yield from _written_tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _written_tensors(value)
    elif hasattr(state, "replica_id"):
        sharded: Any = state  # a sharded tensor of megatron-core, or a factory of several
        replica = sharded.replica_id
        if not any(replica if isinstance(replica, tuple) else (replica,)):
            yield sharded.data
