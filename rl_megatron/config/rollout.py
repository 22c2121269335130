"""The settings of trajectories: what makes them, their limits, and the files that they are written to."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rl_megatron.config.environments import GATEWAY, AgentConfig, EnvironmentConfig, ToolsConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.extras import require_extra
from rl_megatron.config.loading.settings import NonNegative, NonNegativeFloat, Number, Positive, PositiveFloat, section

CONVERSATION = "conversation"  # the worker of turns that an environment or tools answer
VERIFIERS = "verifiers"  # the worker for environments of the library verifiers


@section
class TurnSampling:
    """The sampling of one turn. A key that is null has the value of the section `generation`."""

    max_new_tokens: Positive | None = None  # maximum tokens of the turn
    temperature: NonNegativeFloat | None = None  # divides the logits; 0: greedy. Greedy evaluations ignore it.
    # sample from the likeliest tokens, up to this total probability
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: NonNegative | None = None  # sample from the k likeliest tokens; 0: off
    # Further strings that end the turn. The turn includes the string.
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()


def _as_list(value: object) -> object:
    """Return `value`, or an empty tuple for null."""
    return () if value is None else value


@section
class TrajectoryConfig:
    """Rollout workers, which make the trajectories of a step, and the files of trajectories.

    The files are rollouts/STAGE/step-NNNNNN.parquet in output_dir, with one sequence in each row.
    """

    # What makes the trajectories of a prompt: completion (one completion), conversation (turns that an environment or
    # tools answer), agent (the program of rollout.agent), verifiers (an environment of the library verifiers), or
    # file.py:name or package.module:name, an async function or a class of your own.
    worker: str = "completion"
    worker_kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of the worker, by name
    max_turns: Positive = 8  # maximum turns of the policy with worker=conversation; longer trajectories are truncated
    # How turns of worker=conversation are sampled: entry i is for turn i, and the last one for all later turns. null:
    # the section generation applies to all turns.
    turn_sampling: Annotated[tuple[TurnSampling, ...], BeforeValidator(_as_list)] = ()
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)  # what answers the policy's turns
    tools: ToolsConfig = field(default_factory=ToolsConfig)  # functions that the policy may call
    agent: AgentConfig = field(default_factory=AgentConfig)  # agents that are programs of their own, and the gateway
    # Maximum tokens of a trajectory's history, including those of prompts and environments. null:
    # model.max_sequence_length.
    max_tokens: Positive | None = None
    max_sampled_tokens: Positive | None = None  # maximum tokens that the policy samples in a trajectory; null: no limit
    # What to do if the chat template renders earlier messages differently in a later turn, for example without their
    # thinking. branch: a new segment begins with the new rendering, and both segments are learned from. keep: the
    # trajectory continues after its existing tokens. error: the trajectory fails.
    on_rewrite: Literal["branch", "keep", "error"] = "branch"
    concurrency: Positive = 4096  # trajectories that run at the same time
    retries: NonNegative = 0  # how often a failed trajectory is retried
    # Time limit of an attempt, not counting waits for the rollout engine. null: no limit.
    timeout_seconds: PositiveFloat | None = None
    # What to do when a trajectory fails every attempt. error: the run ends. mask_group, or mask: nothing is learned
    # from its group. mask_sample: only this trajectory is left out, if enough others of its group succeeded. Metrics
    # count such trajectories.
    on_failure: Literal["error", "mask", "mask_group", "mask_sample"] = "error"
    # Make trajectories while the policy trains, with weights of earlier steps. false: every step waits for its own
    # trajectories.
    async_enabled: bool = False
    # Maximum age, in steps, of a trajectory's oldest token when the policy learns from it; 0: trajectories of the same
    # step only, as without async_enabled.
    max_trajectory_age_steps: NonNegative = 1
    # With async_enabled, completions that run when new weights arrive continue with them. false: the weight sync waits
    # until the engine has finished all requests.
    in_flight_weight_updates: bool = True
    # Recompute the KV cache of running completions with the new weights. It must be true: every engine does so.
    recompute_kv_cache_after_weight_updates: bool = True
    # With async_enabled, the number of groups that are started for a step, as a multiple of algorithm.prompts_per_step.
    # Above 1, a step learns from the groups that finish first, which favours short ones.
    over_sampling: Annotated[float, Field(ge=1.0, le=8.0), Number] = 1.0
    # With over_sampling, keep the trajectories that a step did not wait for: they continue with new weights, for later
    # steps. false: they are dropped.
    partial: bool = True
    # How the loss corrects for trajectories of older weights. recomputed: tokens are weighted by π_prev/π_generation
    # (sets loss.use_importance_sampling_correction); the trainer computes π_prev before it learns. engine: π_prev is
    # what the engine reported, so that the ratio of the loss is π/π_generation. off: not at all. auto: recomputed if
    # trajectories can be old, otherwise off.
    importance_correction: Literal["auto", "recomputed", "engine", "off"] = "auto"
    save_every: NonNegative = 0  # write trajectories every n-th step; 0: never. async_enabled: at every step
    # Number of prompts of each round of sampling whose trajectories are written; null: all, which a replay needs.
    save_prompts: Positive | None = None
    # Learn from the trajectories in a directory rollouts/STAGE of another run, instead of making and scoring them.
    # null: no.
    replay: str | None = None
    # Host memory of a rank for the sequences that it learns from, in GB. Further sequences are kept in files until they
    # are needed. null: no limit.
    max_host_memory_gb: NonNegativeFloat | None = None
    disk_directory: str | None = None  # where these files are kept; null: the system's directory for temporary files

    @property
    def max_host_bytes(self) -> float | None:
        """Return `max_host_memory_gb` in bytes."""
        return None if self.max_host_memory_gb is None else self.max_host_memory_gb * 1e9

    @property
    def is_asynchronous(self) -> bool:
        """Return whether trajectories are made while the policy trains."""
        return self.async_enabled and (self.max_trajectory_age_steps > 0 or self.over_sampling > 1)

    @property
    def may_be_old(self) -> bool:
        """Return whether the policy may learn from tokens that older weights sampled."""
        return self.async_enabled and self.max_trajectory_age_steps > 0

    @property
    def correction(self) -> str:
        """Return how old trajectories are corrected for: recomputed, engine or off."""
        if self.importance_correction != "auto":
            return self.importance_correction
        return "recomputed" if self.may_be_old else "off"

    def check(self, where: str, stops_at_strings: bool) -> None:
        """Check that every key has an effect; `stops_at_strings`: whether the engine supports stop strings."""
        environment, default = self.environment, EnvironmentConfig()
        if environment.name is None:
            changed = [name for name, value in vars(default).items() if getattr(environment, name) != value]
            if changed:
                raise ConfigError(
                    f"{where}.environment.{changed[0]} has no effect without an environment; set "
                    f"{where}.environment.name, or leave it out"
                )
        if not self.tools.functions and self.tools != ToolsConfig():
            raise ConfigError(
                f"{where}.tools has no effect without functions; set {where}.tools.functions, or leave the section out"
            )
        if self.worker in (CONVERSATION, VERIFIERS) and self.worker_kwargs:
            raise ConfigError(
                f"{where}.worker_kwargs has no effect on worker={self.worker}; leave it out, and see "
                f"{where}.environment.kwargs for the arguments of an environment"
            )
        if self.worker != CONVERSATION:
            self._refuse_keys_of_conversations(where)
        if self.worker == VERIFIERS:
            if environment.name is None:
                raise ConfigError(
                    f"{where}.worker={VERIFIERS} needs {where}.environment.name, the name of an environment of the "
                    "library verifiers; set it"
                )
            require_extra(f"{where}.worker={VERIFIERS}", *GATEWAY)
        if self.save_every:
            key = f"{where}.save_every"
            require_extra(f"{key}={self.save_every}", "data", "pyarrow", otherwise=f"set {key}=0, which writes nothing")
        if any(turn.stop for turn in self.turn_sampling) and not stops_at_strings:
            raise ConfigError(
                f"{where}.turn_sampling has stop, but the engine of generation.engine does not support stop strings; "
                "choose another engine, or leave stop out"
            )

    def _refuse_keys_of_conversations(self, where: str) -> None:
        default = TrajectoryConfig()
        keys = {
            "environment.name": self.environment.name is not None and self.worker != VERIFIERS,
            "tools.functions": bool(self.tools.functions),
        }
        keys |= {name: getattr(self, name) != getattr(default, name) for name in ("max_turns", "turn_sampling")}
        for key, is_set in keys.items():
            if is_set:
                raise ConfigError(
                    f"{where}.{key} has no effect on {where}.worker={self.worker}; set {where}.worker={CONVERSATION}, "
                    "or leave it out"
                )
