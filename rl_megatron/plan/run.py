"""Run the phases of a step on one rank, on fake GPUs, with the policy, the optimizer and the engine of a real run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from rl_megatron.config.engines import ENGINE_DECLARATIONS
from rl_megatron.config.errors import ConfigError
from rl_megatron.model.sharded_shape import ShardedShape
from rl_megatron.plan.fake_cuda import FakeCuda
from rl_megatron.plan.fake_cuda.patches import patch_attribute
from rl_megatron.plan.ledger import Ledger, locate_error
from rl_megatron.plan.measured import Measured, extrapolate_depth
from rl_megatron.plan.phases import PhaseName, RankKind, RankUse
from rl_megatron.plan.rank_phases import RankPhases
from rl_megatron.plan.workload import Workload
from rl_megatron.topology.degrees import padded_vocab_size
from rl_megatron.topology.topology import Topology, leave, start_topology
from rl_megatron.topology.torch_optimizers import torch_optimizers

_FORWARD: tuple[PhaseName, ...] = ("generate", "logprobs", "reference", "values", "train_critic", "train")


@contextmanager
def run_as_rank(workload: Workload, rank: int, ledger: Ledger) -> Iterator[Topology]:
    """Start fake CUDA as one rank of the workload, for the block of a `with` statement."""
    stage = workload.stage
    with FakeCuda(rank, workload.world_size, ledger), ExitStack() as replaced:
        for owner, name, value in torch_optimizers():  # Transformer Engine's optimizers need a GPU
            replaced.enter_context(patch_attribute(owner, name, value))
        topology = start_topology(stage.parallel, device="cuda", seed=stage.train.seed)
        ledger.begin_topology(topology)
        padded = padded_vocab_size(stage.model.vocab_size or workload.vocab_size, stage.parallel.tensor)
        ledger.logits_width = padded // stage.parallel.tensor
        try:
            yield topology
        finally:
            leave()


def count_use(workload: Workload, rank: int, *, exact: bool = False) -> RankUse:
    """Run each phase of a step as `rank`, and return what the phases use. The process must not have started a device.

    With `exact`, all layers are run. Otherwise, deep stacks of equal layers are run at two smaller depths and
    extrapolated.

    Raises:
        ConfigError: A phase cannot be run, or this process has started another device.
    """
    phases = list_phases(workload)
    depths = None if exact else choose_depths(workload, find_stage(workload, rank))
    if depths is None:
        measured = run_phases(workload, rank, Ledger(), phases)
    else:
        measured = _count_at_two_depths(workload, rank, phases, depths)
    return RankUse(find_kind(workload, rank), rank, tuple(phase.use() for phase in measured))


def _count_at_two_depths(
    workload: Workload, rank: int, phases: Sequence[PhaseName], depths: tuple[Workload, Workload, float]
) -> list[Measured]:
    """Return what phases use. Phases without a forward pass take little time and are run with all layers."""
    shallow, deep, factor = depths
    others: list[PhaseName] = [name for name in phases if name not in _FORWARD]
    forward: list[PhaseName] = [name for name in phases if name in _FORWARD]
    earlier: list[PhaseName] = [name for name in phases if name == "refit"]  # it frees the gradients until training
    # Each phase has a run of its own: a weight sync frees gradients, and a save follows training, which allocates them.
    whole = [phase for name in others for phase in run_phases(workload, rank, Ledger(), [name])]
    shallow_phases, deep_phases = (
        run_phases(run, rank, Ledger(), earlier + forward)[1 + len(earlier) :] for run in (shallow, deep)
    )
    measured = {phase.name: phase for phase in whole}
    pairs = zip(shallow_phases, deep_phases, strict=True)
    measured |= {few.name: extrapolate_depth(few, many, factor) for few, many in pairs}
    ordered = [measured["build"]]
    for name in phases:
        # The memory that earlier phases have left is still allocated.
        ordered.append(measured[name] if name in _FORWARD else measured[name].start_at(ordered[-1].end_bytes))
    return ordered


def find_stage(workload: Workload, rank: int) -> int:
    """Return the pipeline stage of a rank. The ranks of a stage are consecutive."""
    return rank // (workload.world_size // workload.stage.parallel.pipeline)


def find_kind(workload: Workload, rank: int) -> RankKind:
    """Return the kind of a rank. A single pipeline stage counts as the last, which computes the loss."""
    stage = find_stage(workload, rank)
    if stage == workload.stage.parallel.pipeline - 1:
        return "last stage"
    return "middle stage" if stage else "first stage"


def run_phases(
    workload: Workload, rank: int, ledger: Ledger, phases: Iterable[PhaseName] | None = None
) -> list[Measured]:
    """Run "build" and other phases, by default all of a step, as `rank`, and return what each used.

    Raises:
        ConfigError: A phase raised an error, which is the cause; or this process has started another device.
    """
    wanted = set(list_phases(workload) if phases is None else phases)
    runs: list[tuple[PhaseName, Callable[[RankPhases], Measured]]] = [
        ("build", RankPhases.build),
        ("refit", RankPhases.refit),
        ("generate", RankPhases.generate),
        ("logprobs", RankPhases.logprobs),
        ("reference", RankPhases.reference),
        ("values", RankPhases.values),
        ("train_critic", RankPhases.train_critic),
        ("train", RankPhases.train),
        ("save", RankPhases.save),
    ]
    measured = []
    with run_as_rank(workload, rank, ledger) as topology:
        phases_of_rank = RankPhases(workload, topology, ledger)
        for name, run in runs:
            if name == "build" or name in wanted:
                with _describe_errors(name, workload, rank):
                    measured.append(run(phases_of_rank))
        phases_of_rank.close()
    return measured


@contextmanager
def _describe_errors(phase: PhaseName, workload: Workload, rank: int) -> Iterator[None]:
    """Convert an error within the block into a `ConfigError` that names the phase and the rank."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__} at {locate_error(error)}: "
        raise ConfigError(
            f"phase {phase} cannot be run on fake GPUs as rank {rank} ({find_kind(workload, rank)}): {kind}{error}; "
            "--closed-forms plans without running anything"
        ) from error


def list_phases(workload: Workload) -> tuple[PhaseName, ...]:
    """Return the phases that a step of a workload has, except "build"."""
    stage = workload.stage
    in_processes = workload.generates and ENGINE_DECLARATIONS[stage.generation.engine].runs_in_processes
    present: dict[PhaseName, bool] = {
        "refit": in_processes,
        "generate": workload.generates and not in_processes,
        "logprobs": workload.recomputes_logprobs,
        "reference": workload.uses_reference,
        "values": workload.critic is not None,
        "train_critic": workload.critic is not None,
        "train": True,
        "save": True,
    }
    return tuple(name for name, is_present in present.items() if is_present)


_SHALLOW = 2  # how many equal layers, or periods of layers, a model chunk has in the shallower of the two runs


def choose_depths(workload: Workload, stage: int) -> tuple[Workload, Workload, float] | None:
    """Choose two workloads with fewer layers, and f so that use = shallow + f · (deep − shallow) on a pipeline stage.

    Layers may differ in two ways. If the first few are dense and the others have experts, the runs have all dense
    layers and fewer of the others. If every n-th layer attends to all tokens and the others have a window or the gated
    delta rule, the runs have whole periods of n layers. The result is None if the layers differ in another way, or are
    few.
    """
    model, parallel = workload.stage.model, workload.stage.parallel
    shape = ShardedShape(model, parallel, workload.world_size, workload.vocab_size, workload.head)
    model_chunks = shape.layers(stage)
    depth = len(model_chunks[0])
    if any(len(layers) != depth for layers in model_chunks):
        return None
    window_period = model.global_attention_every if model.sliding_window is not None else None
    period = window_period or model.full_attention_every or 1
    dense_layers = model.first_dense_layers if model.num_experts is not None else 0
    if dense_layers and (parallel.virtual_pipeline > 1 or dense_layers > len(shape.layers(0)[0])):
        return None
    stage_dense = dense_layers if stage == 0 else 0  # dense layers of this stage
    varied = depth - stage_dense
    shallow = _SHALLOW * period
    if varied % period or (period > 1 and any(layers.start % period for layers in model_chunks)):
        return None
    if varied <= 2 * shallow + 1 or (dense_layers and not stage_dense and dense_layers > shallow):
        return None
    runs = [_set_depth(workload, stage_dense + count) for count in (shallow, 2 * shallow)]
    return runs[0], runs[1], (varied - shallow) / shallow


def _set_depth(workload: Workload, depth: int) -> Workload:
    """Return the workload with `depth` layers in every model chunk."""
    stage = workload.stage
    parallel = replace(stage.parallel, first_stage_layers=None, last_stage_layers=None)
    model = replace(stage.model, num_layers=depth * parallel.pipeline * parallel.virtual_pipeline)
    return replace(workload, stage=replace(stage, model=model, parallel=parallel))
