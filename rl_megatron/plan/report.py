"""Show a plan: tables in a terminal, JSON for programs, and a picture of memory over a step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from rl_megatron.config.errors import ConfigError
from rl_megatron.plan.devices import GIB, Cluster
from rl_megatron.plan.estimate import StepEstimate
from rl_megatron.plan.phases import Bytes, PhaseUse, RankUse
from rl_megatron.plan.search import Candidate, Search
from rl_megatron.plan.servers import Servers
from rl_megatron.plan.workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CATEGORIES = tuple(field.name for field in fields(Bytes))
_TITLES = {"kv_cache": "KV cache"}
_MOST_PLACES, _FEWEST_SYNCS = 5, 10  # the most locations of host syncs that are printed, and the fewest syncs of each


@dataclass(frozen=True)
class Report:
    """A plan of one layout.

    Attributes:
        uses: What one rank of each planned pipeline stage uses.
        source: How `uses` were computed, for the reader.
        servers: The rollout engine's processes, or None if the policy itself generates or nothing is sampled.
    """

    name: str
    workload: Workload
    cluster: Cluster
    uses: tuple[RankUse, ...]
    estimate: StepEstimate
    source: str
    servers: Servers | None = None

    @property
    def peak_bytes(self) -> int:
        """Return the highest peak of all phases and ranks."""
        return max(use.peak_phase.peak_bytes for use in self.uses)

    @property
    def free_share(self) -> float:
        """Return the share of a GPU's memory that is free at the peak; negative if the peak exceeds the memory."""
        return 1 - self.peak_bytes / (self.cluster.gpu.memory_gib * GIB)

    @property
    def fits(self) -> bool:
        """Return whether the peak leaves the margin free."""
        return self.peak_bytes <= self.cluster.usable_bytes

    @property
    def host_bytes_per_node(self) -> int:
        """Return a node's host memory, if each of its ranks needs the highest peak of any planned rank and phase."""
        return self.cluster.gpus_per_node * max(phase.host_bytes for use in self.uses for phase in use.phases)

    def as_json(self) -> dict[str, Any]:
        """Return the plan for programs, in bytes and seconds."""
        return {
            "stage": self.name,
            "source": self.source,
            "world_size": self.workload.world_size,
            "parallel": asdict(self.workload.stage.parallel) | {"data": self.workload.data},
            "prompt_tokens": self.workload.prompt_tokens,
            "response_tokens": self.workload.response_tokens,
            "vocab_size": self.workload.vocab_size,
            "microbatches": [
                {"sequences": size, "count": count} for size, count in self.workload.microbatches_of_step.counts
            ],
            "idle_data_ranks": self.workload.idle_ranks,
            "cluster": asdict(self.cluster),
            "peak_bytes": self.peak_bytes,
            "free_share": self.free_share,
            "fits": self.fits,
            "host_bytes_per_node": self.host_bytes_per_node,
            "ranks": [_rank_as_json(use) for use in self.uses],
            "estimate": _estimate_as_json(self.estimate),
            "generation_in_processes": None if self.servers is None else asdict(self.servers),
        }


def print_report(report: Report, console: Console) -> None:
    """Print the tables of a plan."""
    for line in _describe_plan(report.name, report.workload, report.cluster):
        console.print(line)
    console.print(_build_memory_table(report))
    verdict = "fits" if report.fits else "does not fit"
    console.print(
        f"Memory: {verdict}. The peak of {report.peak_bytes / GIB:.2f} GiB {_describe_peak(report)}; the margin "
        f"is {report.cluster.memory_margin:.0%}. Host memory of a node: {report.host_bytes_per_node / GIB:.1f} GiB."
    )
    if not report.fits:
        console.print("The option --search ranks the layouts that fit.")
    console.print(_build_time_table(report.uses, report.estimate))
    console.print(_describe_time(report.estimate, report.servers))
    if report.servers is not None:
        console.print(report.servers.note)
    syncs = {
        (phase.name, location): count
        for use in report.uses
        for phase in use.phases
        if phase.name in report.estimate.phases
        for location, count in phase.syncs
        if count >= _FEWEST_SYNCS
    }
    for (phase, location), count in sorted(syncs.items(), key=lambda item: -item[1])[:_MOST_PLACES]:
        console.print(f"In {phase}, the host waits for the GPU {count} times at {location}.")
    console.print(report.source)


def _describe_peak(report: Report) -> str:
    total = report.cluster.gpu.memory_gib
    if report.free_share < 0:
        return f"exceeds {total:g} GiB by {report.peak_bytes / GIB - total:.2f} GiB"
    return f"leaves {report.free_share:.0%} of {total:g} GiB"


def _describe_plan(name: str, workload: Workload, cluster: Cluster) -> Iterable[str]:
    stage, gpu = workload.stage, cluster.gpu
    parallel = stage.parallel
    degrees = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}
    degrees["data"] = workload.data
    layout = " × ".join(f"{key} {degree}" for key, degree in degrees.items())
    extras = [f"virtual pipeline {parallel.virtual_pipeline}"] * (parallel.virtual_pipeline > 1)
    extras += ["sequence parallel"] * parallel.sequence + [f"expert {parallel.expert}"] * (parallel.expert > 1)
    extras += [f"expert tensor {parallel.expert_tensor}"] * (parallel.expert_tensor > 1)
    yield f"Stage {name} on {cluster.nodes} node(s) of {cluster.gpus_per_node} {gpu.name} ({gpu.memory_gib:g} GiB each)"
    yield f"{workload.world_size} rank(s): {layout}" + (f" ({', '.join(extras)})" if extras else "")
    train = stage.train
    yield (
        f"{workload.prompt_tokens} prompt and {workload.response_tokens} response tokens; {stage.precision}; "
        f"vocabulary {stage.model.vocab_size or workload.vocab_size}; {_describe_microbatches(workload)} for "
        f"each of {workload.optimizer_steps} optimizer step(s); "
        f"recomputation {stage.model.recompute}; fused head {'on' if train.fused_head else 'off'}"
    )
    if workload.idle_ranks:
        yield (
            f"{workload.idle_ranks} of {workload.data} data-parallel ranks have no sequence of a global batch of "
            f"{workload.optimizer_batches[0][0]}, and are idle"
        )


def _describe_microbatches(workload: Workload) -> str:
    counts = workload.microbatches_of_step.counts
    return " and ".join(f"{count} microbatch(es) of {size} sequence(s)" for size, count in counts)


def _build_memory_table(report: Report) -> Table:
    shown = [name for name in _CATEGORIES if any(getattr(p.peak, name) for u in report.uses for p in u.phases)]
    table = Table(title="GiB on a rank at the peak of each phase", title_justify="left")
    table.add_column("rank")
    table.add_column("phase")
    for name in (*shown, "peak"):
        table.add_column(_TITLES.get(name, name), justify="right")
    for use in report.uses:
        for phase in use.phases:
            cells = [f"{getattr(phase.peak, name) / GIB:.2f}" for name in shown]
            too_large = phase.peak_bytes > report.cluster.usable_bytes
            peak = f"{phase.peak_bytes / GIB:.2f}" + " !" * too_large
            table.add_row(
                _describe_kind(use, report.uses),
                phase.name,
                *cells,
                peak,
                style="bold red" if too_large else None,
            )
    return table


def _describe_kind(use: RankUse, uses: Sequence[RankUse]) -> str:
    if len(uses) == 1:
        return "each"
    alike = sum(other.kind == use.kind for other in uses)
    return use.kind if alike == 1 else f"{use.kind}, rank {use.rank}"


def _build_time_table(uses: Sequence[RankUse], estimate: StepEstimate) -> Table:
    table = Table(title="Estimates for a step, on the slowest pipeline stage (not measured)", title_justify="left")
    table.add_column("phase")
    for name in (
        "TFLOP",
        "GB moved",
        "GB in collectives",
        "compute s",
        "memory s",
        "launch s",
        "network s",
        "waiting s",
        "total s",
    ):
        table.add_column(name, justify="right")
    for name, seconds in estimate.phases.items():
        phase = estimate.uses[name]
        parts = (seconds.compute, seconds.memory, seconds.launch, seconds.communication, seconds.waiting, seconds.total)
        amounts = (phase.flops / 1e12, phase.memory_bytes / 1e9, _count_collective_bytes(phase) / 1e9)
        table.add_row(name, *(f"{amount:,.1f}" for amount in amounts), *(f"{part:.3g}" for part in parts))
    return table


def _count_collective_bytes(phase: PhaseUse) -> int:
    return sum(collective.bytes * collective.count for collective in phase.collectives)


def _describe_time(estimate: StepEstimate, servers: Servers | None) -> str:
    step = "a step" if servers is None else "a step without generation"
    return (
        f"Estimate: {estimate.seconds:.3g} s for {step}, {estimate.tokens_per_second:,.0f} tokens/s of the whole step "
        "over all GPUs, prompts included; "
        f"training at {estimate.mfu:.0%} of the GPUs' FLOPs (MFU)."
    )


def print_search(
    result: Search,
    console: Console,
    commands: Mapping[int, str],
    verified: Mapping[int, int],
    usable_bytes: float,
    top: int,
) -> None:
    """Print the `top` best layouts of a search, why others were rejected, and a command line.

    `commands` and `verified` (peak bytes of candidates that were run) have positions in the ranking as keys.
    """
    table = Table(title=f"The {min(top, len(result.ranked))} fastest layouts (estimates)", title_justify="left")
    for name in ("#", "layout", "settings", "peak GiB", "run GiB", "step s", "train s", "MFU"):
        table.add_column(name, justify="left" if name in ("layout", "settings") else "right")
    for position, candidate in enumerate(result.ranked[:top], 1):
        estimate, run = candidate.estimate, verified.get(position)
        was_run = "" if run is None else f"{run / GIB:.1f}" + " !" * (run > usable_bytes)
        table.add_row(
            str(position), _describe_degrees(candidate), _describe_choices(candidate),
            f"{candidate.peak_bytes / GIB:.1f}", was_run, f"{estimate.seconds:.3g}",
            f"{estimate.phases['train'].total:.3g}", f"{estimate.mfu:.0%}",
        )  # fmt: skip
    console.print(table)
    rejected = Table(title="Why others were rejected", title_justify="left")
    rejected.add_column("combinations", justify="right")
    rejected.add_column("reason")
    for reason, count in result.rejected.items():
        rejected.add_row(f"{count:,}", reason)
    console.print(rejected)
    console.print(
        f"{result.considered:,} combinations: {len(result.ranked):,} layouts fit and are ranked, "
        f"{sum(result.rejected.values()):,} combinations are rejected. Peaks are by closed forms; times are estimates."
    )
    if result.servers is not None:
        console.print(f"{result.servers.note} Step times exclude generation.")
    for position, run in verified.items():
        verdict = "and fits" if run <= usable_bytes else "which does not fit"
        console.print(f"Layout {position} was run on fake GPUs: its peak is {run / GIB:.2f} GiB, {verdict}.")
    for position, command in commands.items():
        console.print(f"The command line of layout {position}, on each node:")
        console.print(command, soft_wrap=True)


def _describe_degrees(candidate: Candidate) -> str:
    shape = candidate.settings.shape
    parallel = shape.parallel
    shown = {
        "tensor": parallel.tensor, "pipeline": parallel.pipeline, "virtual": parallel.virtual_pipeline,
        "last stage": parallel.last_stage_layers, "context": parallel.context, "expert": parallel.expert,
        "expert tensor": parallel.expert_tensor, "data": shape.data,
    }  # fmt: skip
    return ", ".join(f"{name} {degree}" for name, degree in shown.items() if degree not in (None, 1)) or "one rank"


def _describe_choices(candidate: Candidate) -> str:
    settings = candidate.settings
    chosen = [f"{settings.microbatch.tokens} tokens × {settings.microbatches}"]
    chosen += [f"recompute {settings.shape.model.recompute}"] * (settings.shape.model.recompute != "none")
    chosen += ["fused head"] * settings.fused_head + ["reference offloaded"] * (settings.reference == "offload")
    chosen += [f"decodes {settings.decoded_together}"] * bool(settings.completions)
    return ", ".join(chosen)


def search_as_json(
    result: Search, commands: Mapping[int, str], verified: Mapping[int, int], stage: str | None, top: int
) -> dict[str, object]:
    """Return the result of a search for programs."""
    return {
        "considered": result.considered,
        "fitting": len(result.ranked),
        "rejected": result.rejected,
        "generation_in_processes": None if result.servers is None else asdict(result.servers),
        "ranked": [
            {
                "overrides": candidate.overrides(stage),
                "peak_bytes": candidate.peak_bytes,
                "run_peak_bytes": verified.get(position),
                "estimate": _estimate_as_json(candidate.estimate),
                "command": commands.get(position),
            }
            for position, candidate in enumerate(result.ranked[:top], 1)
        ],
    }


def print_json(value: Mapping[str, object]) -> None:
    """Print JSON to stdout."""
    print(json.dumps(value, indent=2))


def draw(report: Report, file: Path) -> None:
    """Write a picture of the memory over the phases of a step, one panel for each kind of rank.

    Every phase has a bar of its peak by category. A phase that was run also shows the live bytes over its operators.

    Raises:
        ConfigError: The file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        len(report.uses), 1, figsize=(10, 3.2 * len(report.uses)), squeeze=False, layout="constrained"
    )
    for axes, use in zip(panels[:, 0], report.uses, strict=True):
        _draw_rank(axes, use, report.cluster)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    try:
        figure.savefig(file, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--picture {file} cannot be written: {error.strerror}") from error
    finally:
        plt.close(figure)


def _draw_rank(axes: Axes, use: RankUse, cluster: Cluster) -> None:
    colours = {name: f"C{index}" for index, name in enumerate(_CATEGORIES)}
    for position, phase in enumerate(use.phases):
        if len(phase.timeline) > 1:
            operators, live = zip(*phase.timeline, strict=True)
            last = max(operators) or 1
            axes.fill_between(
                [position - 0.45 + 0.9 * operator / last for operator in operators], [size / GIB for size in live],
                color="0.75", step="post", label="live bytes over operators" if position == 0 else None,
            )  # fmt: skip
        width, left = (0.9, position) if len(phase.timeline) < 2 else (0.08, position - 0.45)
        bottom = 0.0
        for name in _CATEGORIES:
            height = getattr(phase.peak, name) / GIB
            label = _TITLES.get(name, name) if position == 0 else None
            axes.bar(left, height, width, bottom=bottom, color=colours[name], label=label)
            bottom += height
    axes.axhline(cluster.gpu.memory_gib, color="black", linewidth=1, label=f"memory of {cluster.gpu.name}")
    axes.axhline(cluster.usable_bytes / GIB, color="black", linewidth=1, linestyle=":", label="without the margin")
    axes.set_ylim(0, 1.3 * use.peak_phase.peak_bytes / GIB)
    axes.set_xticks(range(len(use.phases)), [phase.name for phase in use.phases])
    axes.set_ylabel("GiB")
    axes.set_title(f"rank of the {use.kind}, of {cluster.gpu.memory_gib:g} GiB", loc="left", fontsize=9)


def _rank_as_json(use: RankUse) -> dict[str, object]:
    result = asdict(use)
    for phase, phase_use in zip(result["phases"], use.phases, strict=True):
        phase["peak_bytes"] = phase_use.peak_bytes
    return result


def _estimate_as_json(estimate: StepEstimate) -> dict[str, object]:
    result = asdict(estimate)
    for name, seconds in estimate.phases.items():
        result["phases"][name]["total"] = seconds.total
    return result
