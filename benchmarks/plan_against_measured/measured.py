"""What a rank of a case really allocates on the CPU, from torch's profiler."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.plan_against_measured.cases import PROMPT_TOKENS, VOCAB_SIZE, Case
from benchmarks.plan_against_measured.gpu_choices import gpu_choices
from benchmarks.plan_against_measured.memory import OfPhase, OfRank, Static
from rl_megatron.batching.config import Batching
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.model import ModelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses.registry import configured_loss
from rl_megatron.topology.topology import start_topology
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.reference import ReferenceModel
from rl_megatron.training.runner import FusedHead

_MARK = 1_234_567  # bytes of the first tensor that marks where a phase begins or ends, each one byte more
_MISSED_AT_MOST = 1 << 19  # bytes: a rank makes some small tensors that the profiler cannot see released


class MissedReleases(RuntimeError):
    """The error if the profiler's events do not add up to the memory that is there."""


def measure(case: Case) -> OfRank:
    """Return what this rank of the case allocates. The process is one of the case's ranks, with its process group.

    Raises:
        MissedReleases: Releases of memory went unseen.
    """
    config = load_config(case.configuration).first
    topology = start_topology(config.parallel, device="cpu", seed=config.train.seed)
    loss = configured_loss(config.loss)
    _clear_caches()  # a plan counts the tables that a process makes once, whatever this one has run before
    gc.collect()
    earlier, phases = _live_storages(), _Phases()
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with gpu_choices(config.model.sliding_window is not None), recorded:
        policy = MegatronPolicy(
            config.model, topology, vocab_size=VOCAB_SIZE, precision=config.precision, seed=config.train.seed,
            optimizer=config.optimizer, total_steps=config.train.steps, global_batch_size=case.sequences,
            batching=Batching.from_config(config.train), fused_head=FusedHead() if config.train.fused_head else None,
        )  # fmt: skip
        if "reference" in case.phases:
            policy.freeze_reference()
        static = _static(policy)
        batch = _rollout(case, config.model)
        if "refit" in case.phases:
            with phases.run("refit"):
                _send_weights(policy, round(config.generation.refit_bucket_mb * 2**20))
        if "logprobs" in case.phases:
            with phases.run("logprobs"):
                batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
        if "reference" in case.phases:
            with phases.run("reference"):
                found = policy.get_reference_policy_logprobs(batch)
                batch["reference_policy_logprobs"] = found["reference_logprobs"]
        with phases.run("train"):
            policy.train(batch, loss, gbs=case.sequences, on_policy=True)
        gc.collect()
        at_end = _live_storages()
    profiler: Any = recorded.profiler
    events = list(profiler.kineto_results.events())
    changes = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda change: change[0],
    )
    held = sum(size for pointer, size in at_end.items() if pointer not in earlier)
    missed = sum(size for _, size in changes) - held
    if abs(missed) > _MISSED_AT_MOST:
        raise MissedReleases(f"{case.name}: {missed} of {held} bytes")
    return OfRank(static, phases.found([size for _, size in changes]))


def _send_weights(policy: MegatronPolicy, bucket_bytes: int) -> None:
    """Fill the buckets of a weight sync and sum them over the ranks, two buckets at a time."""
    policy.offload_before_refit()
    exporter = policy.weights.get_exporter(bucket_bytes)
    buffers = [exporter.allocate_buffer() for _ in exporter.plan.buckets[:2]]
    for index in range(len(exporter.plan.buckets)):
        dist.all_reduce(exporter.fill(index, buffers[index % len(buffers)]))


class _Phases:
    """The phases that a rank runs. Tensors of sizes that nothing else has mark their begin and end.

    The marks are memory events too. The times of other events come from another clock, and may be milliseconds off.
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Mark a phase of this name."""
        gc.collect()
        first = _MARK + 2 * len(self._names)
        self._names.append(name)
        torch.empty(first, dtype=torch.uint8)
        yield
        torch.empty(first + 1, dtype=torch.uint8)

    def found(self, changes: Sequence[int]) -> dict[str, OfPhase]:
        """Return the running sum of the changes of memory before, within and after each phase."""
        found = {}
        for number, name in enumerate(self._names):
            begin, end = (changes.index(_MARK + 2 * number + i) for i in range(2))
            before = live = peak = sum(changes[:begin])
            for change in changes[begin + 2 : end]:  # the mark is released at once
                live += change
                peak = max(peak, live)
            found[name] = OfPhase(before, peak, live)
        return found


def _rollout(case: Case, model: ModelConfig) -> BatchedDataDict:
    """Return a batch of sequences of equal lengths, with everything that the losses read.

    Its tokens use the experts of every layer evenly, as a plan assumes.
    """
    shape = (case.sequences, case.length)
    of_response = torch.zeros(shape)
    of_response[:, PROMPT_TOKENS:] = 1.0
    batch = BatchedDataDict(
        input_ids=torch.randint(0, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(0)),
        input_lengths=torch.full(shape[:1], case.length),
        token_mask=of_response,
        sample_mask=torch.ones(shape[0]),
        temperature=torch.ones(shape[0]),
        advantages=of_response.clone(),
        generation_logprobs=torch.full(shape, -8.0),
    )
    if model.num_experts is not None:
        k, layers = model.experts_per_token, model.num_layers
        first = (torch.arange(case.sequences * case.length) * k).view(*shape, 1, 1)
        experts = first + torch.arange(layers)[:, None] + torch.arange(k)
        batch["routed_experts"] = (experts % model.num_experts).to(torch.int16)
    return batch


def _static(policy: MegatronPolicy) -> Static:
    """Return the bytes of the storages that the policy holds, each counted once."""
    models = [policy.model, *([policy.reference.model] if isinstance(policy.reference, ReferenceModel) else [])]
    parameters: list[Any] = [
        parameter for model in models for chunk in model.model_chunks for parameter in chunk.parameters()
    ]
    gradients = [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]
    optimizer: Any = policy.optimizer
    states: list[Tensor] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        states += [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
        for state in part.optimizer.state.values():
            states += [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
    weights = _storages(parameters)
    others = {pointer: size for pointer, size in _storages(states).items() if pointer not in weights}
    return Static(sum(weights.values()), sum(_storages(gradients).values()), sum(others.values()))


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the size of each storage by its address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _live_storages() -> dict[int, int]:
    return _storages(thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))


def _clear_caches() -> None:
    """Clear the caches of the package, which may hold tensors. (The plan's own way is not imported here.)"""
    for name, module in list(sys.modules.items()):
        if name.startswith("rl_megatron."):
            for function in list(vars(module).values()):
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()
