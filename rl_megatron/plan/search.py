"""Rank, by closed forms, the layouts with which a workload fits a cluster, and report why others were rejected."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from rl_megatron.batching.config import Batching
from rl_megatron.batching.packing import round_up
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.model.sharded_shape import ShardedShape
from rl_megatron.plan import closed_forms
from rl_megatron.plan.closed_use import estimate_use
from rl_megatron.plan.devices import Cluster
from rl_megatron.plan.estimate import StepEstimate, estimate_step
from rl_megatron.plan.servers import Servers
from rl_megatron.plan.settings import Batches, Settings
from rl_megatron.plan.workload import MicrobatchSizes, Workload, get_group_size
from rl_megatron.topology.degrees import ConfiguredLayout, sequence_multiple, validate, validate_model

_TENSOR = (1, 2, 4, 8, 16)
_CONTEXT = (1, 2, 4, 8, 16, 32)
_VIRTUAL = (1, 2, 4, 8)
_EXPERT = tuple(2**i for i in range(9))
_SEQUENCES = (1, 2, 4, 8, 16)
_RECOMPUTE = ("none", "selective", "full")
_BATCHING = ("packed", "dynamic", "padded")
_SHORTEST_SLICE = 128  # the fewest tokens of a sequence on a context-parallel rank
_FEWEST_DECODED = 8

REASONS = {
    "node": "parallel.tensor exceeds the GPUs of a node",
    "sequence": "parallel.sequence=false keeps whole activations between layers, but communicates no less",
    "slices": f"parallel.context leaves a rank less than {_SHORTEST_SLICE} tokens of a sequence",
    "idle": "more data-parallel ranks than sequences in a global batch",
    "batching": "train.batching is not packed, so that a step computes padding",
    "selective": "model.recompute=selective saves no memory, because attention kernels keep no scores",
    "microbatch": "a microbatch holds more sequences than a rank has",
    "state": "parameters, gradients and optimizer state exceed the memory",
    "activations": "with activations and logits, training exceeds the memory",
    "forward": "the reference policy's logprobs or a weight sync exceed the memory",
    "generation": "with the keys and values of 8 sequences, generation exceeds the memory",
    "no recomputation": "model.recompute=full is not needed: training fits without it",
    "no offload": "train.reference=offload is not needed: all phases fit without it",
    "slower": "the same layout is faster with other microbatches or another head",
}


@dataclass(frozen=True)
class Candidate:
    """A layout that fits the memory, with its settings, the time of a step and the highest peak of its stages."""

    settings: Settings
    estimate: StepEstimate
    peak_bytes: int

    def stage(self, base: StageConfig) -> StageConfig:
        """Return the stage `base` with the choices of the search."""
        settings = self.settings
        train = replace(
            base.train, batching="packed", micro_batch_tokens=settings.microbatch.tokens,
            fused_head=settings.fused_head, reference=settings.reference or "resident",
        )  # fmt: skip
        generation = base.generation
        if settings.completions:
            generation = replace(generation, batch_size=settings.decoded_together)
        shape = settings.shape
        return replace(base, model=shape.model, parallel=shape.parallel, train=train, generation=generation)

    def overrides(self, stage: str | None) -> dict[str, str]:
        """Return the chosen keys as overrides for `rl-megatron train`. `stage` is None if the run has one stage."""
        settings, parallel = self.settings, self.settings.shape.parallel
        prefix = "" if stage is None else f"stages.{stage}."
        usual = ParallelConfig()
        chosen: dict[str, Any] = {
            f"parallel.{field.name}": getattr(parallel, field.name)
            for field in fields(ParallelConfig)
            if getattr(parallel, field.name) != getattr(usual, field.name)
        }
        chosen |= {
            "model.recompute": settings.shape.model.recompute,
            f"{prefix}train.batching": "packed",
            f"{prefix}train.micro_batch_tokens": settings.microbatch.tokens,
            f"{prefix}train.fused_head": settings.fused_head,
        }
        if settings.reference is not None:
            chosen[f"{prefix}train.reference"] = settings.reference
        if settings.completions:
            chosen[f"{prefix}generation.batch_size"] = settings.decoded_together
        return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in chosen.items()}


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        ranked: The candidates that fit, fastest first.
        rejected: The number of rejected combinations, by reason.
        considered: The number of all combinations.
        servers: The rollout engine's processes, or None if the policy itself generates.
    """

    ranked: tuple[Candidate, ...]
    rejected: dict[str, int]
    considered: int
    servers: Servers | None = None


def search(workload: Workload, cluster: Cluster, mean_response_tokens: int | None = None) -> Search:
    """Find the layouts that fit a cluster, fastest first. `workload` is that of a stage made by `without_layout`.

    By default, all responses have the maximum length.
    """
    return _Searcher(workload, cluster, mean_response_tokens).run()


def without_layout(stage: StageConfig) -> StageConfig:
    """Return the stage with simple values of the keys to be searched, because its own may not fit the cluster."""
    train = replace(
        stage.train, batching="padded", micro_batch_size=get_group_size(stage), fused_head=False, reference="resident"
    )
    model = replace(stage.model, recompute="none")
    return replace(stage, parallel=ParallelConfig(), train=train, model=model)


class _Searcher:
    def __init__(self, workload: Workload, cluster: Cluster, mean_response_tokens: int | None):
        self._workload, self._cluster = workload, cluster
        model = workload.stage.model
        self._models = {recompute: replace(model, recompute=recompute) for recompute in _RECOMPUTE}
        self._template = replace(
            Settings.from_workload(workload, mean_response_tokens),
            pads=False,
            servers=Servers.from_workload(workload, cluster),
        )
        self._placements = ("resident", "offload") if workload.uses_reference else (None,)
        self._per_step = min(workload.stage.train.global_batch_size, workload.sequences_per_step)
        self._rejected: Counter[str] = Counter()
        self._candidates: list[Candidate] = []
        # For each layout, all combinations of recomputation, fused head, sequences per microbatch, batching and
        # placement.
        self._combinations = len(_RECOMPUTE) * 2 * len(_SEQUENCES) * len(_BATCHING) * len(self._placements)

    def run(self) -> Search:
        layouts = 0
        for parallel in self._layouts():
            layouts += 1
            first = len(self._candidates)
            self._try_layout(parallel)
            fitting = self._candidates[first:]
            self._candidates[first:] = sorted(fitting, key=_seconds)[:1]
            self._reject(REASONS["slower"], len(fitting) - 1)
        self._candidates.sort(key=_seconds)
        considered, servers = layouts * self._combinations, self._template.servers
        return Search(tuple(self._candidates), dict(self._rejected.most_common()), considered, servers)

    def _reject(self, reason: str, count: int) -> None:
        if count > 0:
            self._rejected[reason] += count

    def _layouts(self) -> Iterator[ParallelConfig]:
        """Yield all layouts, even those that do not fit the model or the cluster."""
        world, model = self._cluster.world_size, self._models["none"]
        experts = [e for e in _EXPERT if e <= (model.num_experts or 1)]
        stages = [p for p in range(1, min(model.num_layers, world) + 1) if world % p == 0]
        for tensor in (t for t in _TENSOR if t <= world):
            for sequence in (False, True)[: 1 + (tensor > 1)]:
                for pipeline in stages:
                    for last, virtual in _list_stage_depths(model.num_layers, pipeline):
                        for context in (c for c in _CONTEXT if tensor * pipeline * c <= world):
                            for expert in experts:
                                yield ParallelConfig(
                                    tensor=tensor, sequence=sequence, pipeline=pipeline, virtual_pipeline=virtual,
                                    context=context, expert=expert, last_stage_layers=last,
                                )  # fmt: skip

    def _try_layout(self, parallel: ParallelConfig) -> None:
        """Keep the combinations of a layout that fit, and count the others by the reason why they are rejected."""
        cluster, all_of_them = self._cluster, self._combinations
        if parallel.tensor > cluster.gpus_per_node:
            return self._reject(REASONS["node"], all_of_them)
        if parallel.tensor > 1 and not parallel.sequence:
            return self._reject(REASONS["sequence"], all_of_them)
        if self._workload.sequence_tokens < parallel.context * _SHORTEST_SLICE and parallel.context > 1:
            return self._reject(REASONS["slices"], all_of_them)
        try:
            data = validate(parallel, cluster.world_size)
            validate_model(self._models["none"], parallel)
        except ConfigError as error:
            return self._reject(extract_rule(error), all_of_them)
        if data > self._per_step // self._workload.group_size:
            return self._reject(REASONS["idle"], all_of_them)
        self._reject(REASONS["batching"], all_of_them - all_of_them // len(_BATCHING))
        packed = all_of_them // len(_BATCHING)
        self._reject(REASONS["selective"], packed // len(_RECOMPUTE))
        self._try_microbatches(parallel, data)
        return None

    def _try_microbatches(self, parallel: ParallelConfig, data: int) -> None:
        workload, combinations = self._workload, 2 * 2 * len(self._placements)
        group = workload.group_size
        rank_sequences = -(-self._per_step // data // group) * group
        layout = ConfiguredLayout(data, parallel.context, sequence_multiple(parallel))
        replicas, per_step = data * parallel.context, workload.sequences_per_step
        completions = -(-per_step // replicas) if workload.generates_itself else 0
        template = replace(
            self._template,
            completions=completions,
            prompts=min(completions, -(-per_step // workload.samples_per_prompt)),
            decoded_together=min(completions, workload.stage.generation.batch_size),
        )
        shapes = {
            recompute: ShardedShape(
                self._models[recompute],
                parallel,
                self._cluster.world_size,
                workload.vocab_size,
                workload.head,
                workload.stage.peft,
            )  # fmt: skip
            for recompute in ("none", "full")
        }
        multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
        for sequences in (group * size for size in _SEQUENCES):
            if sequences > rank_sequences:
                self._reject(REASONS["microbatch"], combinations)
                continue
            # Packs are balanced, so even the largest may have fewer sequences than the limit.
            most = MicrobatchSizes.from_sequences(self._per_step, data, sequences, "packed", group_size=group).largest
            batching = Batching("packed", most, most * round_up(workload.sequence_tokens, layout.sequence_multiple))
            sized = replace(template, batches=Batches.from_layout(workload, layout, batching, multiple))
            for fused_head in (False, True):
                self._try_memory(replace(sized, fused_head=fused_head), shapes)

    def _try_memory(self, settings: Settings, shapes: dict[str, ShardedShape]) -> None:
        """Keep the first combination of recomputation and placement that fits; later ones are slower."""
        tried = [(recompute, placement) for recompute in ("none", "full") for placement in self._placements]
        for index, (recompute, placement) in enumerate(tried):
            chosen = replace(settings, shape=shapes[recompute], reference=placement)
            reason = self._why_too_large(chosen)
            if reason is not None:
                self._reject(reason, 1)
                continue
            fitting = self._with_fewer_decoded(chosen)
            if isinstance(fitting, str):
                self._reject(fitting, 1)
                continue
            self._candidates.append(self._estimate(fitting))
            for later, _ in tried[index + 1 :]:
                slower = "no recomputation" if later != recompute else "no offload"
                self._reject(REASONS[slower], 1)
            return

    def _why_too_large(self, settings: Settings) -> str | None:
        """Return why training does not fit, or None if it fits. The check is much faster than that of all phases."""
        limit, shape = self._cluster.usable_bytes, settings.shape
        for stage in shape.stages_of_kinds():
            kept = settings.count_static_bytes(stage).total
            if kept > limit:
                return REASONS["state"]
            tokens = settings.microbatch.tokens
            working = closed_forms.activation_bytes(
                shape, stage, tokens=tokens, precision=settings.precision, microbatches=settings.microbatches
            )
            after = closed_forms.backward_bytes(shape, stage, tokens=tokens, precision=settings.precision)
            if stage == shape.parallel.pipeline - 1 and shape.head == "lm":
                logits = closed_forms.logits_bytes(
                    shape, tokens=tokens, precision=settings.precision, fused_head=settings.fused_head
                )
                after = max(after, logits)
            working += after
            if kept + working > limit:
                return REASONS["activations"]
        return None

    def _with_fewer_decoded(self, settings: Settings) -> Settings | str:
        """Reduce the sequences decoded together until all phases fit; return the settings, or why they do not fit."""
        while True:
            peaks = _peaks(settings)
            if max(peaks.values()) <= self._cluster.usable_bytes:
                return settings
            if max(peaks, key=peaks.__getitem__) != "generate":
                return REASONS["forward"]
            if settings.decoded_together <= _FEWEST_DECODED:
                return REASONS["generation"]
            settings = replace(settings, decoded_together=settings.decoded_together // 2)

    def _estimate(self, settings: Settings) -> Candidate:
        stages = settings.shape.stages_of_kinds()
        uses = [estimate_use(settings, stage) for stage in stages]
        peak_bytes = max(use.peak_phase.peak_bytes for use in uses)
        return Candidate(settings, estimate_step(uses, settings, self._cluster), peak_bytes)


def _list_stage_depths(num_layers: int, pipeline: int) -> Iterator[tuple[int | None, int]]:
    """Yield pairs: layers of the last stage (None if all stages have equally many), model chunks of a stage."""
    if pipeline == 1:
        yield None, 1
        return
    for virtual in _VIRTUAL:
        yield None, virtual
    last = num_layers - (pipeline - 1) * -(-num_layers // pipeline)
    if num_layers % pipeline and last > 0:
        yield last, 1


def _seconds(candidate: Candidate) -> float:
    return candidate.estimate.seconds


def _peaks(settings: Settings) -> dict[str, int]:
    """Return the peak of each phase, on the pipeline stage where it is highest."""
    peaks: Counter[str] = Counter()
    for stage in settings.shape.stages_of_kinds():
        peaks |= Counter({phase.name: phase.peak_bytes for phase in estimate_use(settings, stage).phases})
    return dict(peaks)


def extract_rule(error: ConfigError) -> str:
    """Return the broken rule without numbers, such as "parallel.tensor must divide model.hidden_size"."""
    clause = re.split(r"[;:]|, which", str(error))[0]
    return re.sub(r"=(\d+|true|false)|( = \d+)|(?<=world size) \d+|\b\d+ (?=ranks)", "", clause)
