"""Register rollout engines by name. `generation.engine` chooses one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

from rl_megatron.config.engines import ENGINE_DECLARATIONS, EngineDeclaration
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.schema import StageConfig
from rl_megatron.generation.interfaces import RolloutEngine
from rl_megatron.generation.servers.node import ServerLauncher
from rl_megatron.training.megatron_policy import MegatronPolicy

BuildEngine = Callable[[MegatronPolicy, StageConfig], RolloutEngine]
BuildWithFiles = Callable[[MegatronPolicy, StageConfig, Path], RolloutEngine]
CheckEngine = Callable[[StageConfig, int], None]


def _accept(stage: StageConfig, vocab_size: int) -> None:
    """Accept any stage."""


@dataclass(frozen=True)
class EngineKind:
    """A kind of rollout engine.

    Attributes:
        build: Builds the engine for a stage's policy. The third argument is the run's directory.
        check: Raises ConfigError, before the first step, if the engine cannot serve a stage. Its arguments are the
            stage and the number of tokens of the stage's tokenizer.
        launcher: Checks that a node without ranks can start a stage's servers, and returns their `ServerLauncher`. Its
            arguments are those of `check`. None for an engine without servers.
    """

    build: BuildWithFiles
    check: CheckEngine = _accept
    launcher: Callable[[StageConfig, int], ServerLauncher] | None = None


_OWN_ENGINES = "rl_megatron.generation.engines"  # config/engines.py declares the engines that it registers
ENGINES: Registry[EngineKind] = Registry("rollout engine")


def register_engine(
    name: str,
    *,
    runs_in_processes: bool = False,
    stops_at_strings: bool = False,
    records_routing: bool = False,
    check: CheckEngine = _accept,
) -> Callable[[BuildEngine], BuildEngine]:
    """Return a decorator that registers a function which builds a rollout engine from a policy and its stage.

    Args:
        name: The value of `generation.engine` that chooses the engine.
        runs_in_processes: Whether it runs in separate processes, so that `generation.num_engines`, `generation.refit`
            and similar keys have an effect.
        stops_at_strings: Whether it ends completions at `Sampling.stop_strings`, the texts of
            `generation.stop_strings`.
        records_routing: Whether its completions have `routed_experts` if `generation.router_replay` is on.
        check: See `EngineKind`.

    Raises:
        ValueError: Another engine has this name already.
    """

    def add(build: BuildEngine) -> BuildEngine:
        if name in ENGINE_DECLARATIONS and build.__module__ != _OWN_ENGINES:
            raise ValueError(f"rollout engine {name!r} is one of the package's own; choose another name")

        @wraps(build)
        def build_without_files(policy: MegatronPolicy, stage: StageConfig, output_dir: Path) -> RolloutEngine:
            return build(policy, stage)

        ENGINES.register(name)(EngineKind(build_without_files, check))
        if name not in ENGINE_DECLARATIONS:
            ENGINE_DECLARATIONS.register(name)(EngineDeclaration(runs_in_processes, stops_at_strings, records_routing))
        return build

    return add
