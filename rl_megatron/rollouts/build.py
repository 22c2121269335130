"""Build the runner of a stage's rollout worker, and check the worker."""

from __future__ import annotations

import sys
from functools import partial

from rl_megatron.config.engines import ENGINE_DECLARATIONS
from rl_megatron.config.environments import AGENT
from rl_megatron.config.extras import check_interpreter
from rl_megatron.config.rollout import CONVERSATION, VERIFIERS, TrajectoryConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.rollouts import agent as _agent  # noqa: F401  # it registers the worker
from rl_megatron.rollouts.conversation import Conversation
from rl_megatron.rollouts.environments import Environments, check_environment
from rl_megatron.rollouts.gateway.server import Gateway
from rl_megatron.rollouts.gateway.tool_calls import check_tool_format
from rl_megatron.rollouts.hosts import ProcessHosts
from rl_megatron.rollouts.runner import RolloutRules, RolloutRunner
from rl_megatron.rollouts.tools.toolbox import build_tools, check_tools
from rl_megatron.rollouts.trajectory import TokenLimits
from rl_megatron.rollouts.verifiers_worker import VerifiersWorker, check_verifiers
from rl_megatron.rollouts.worker import RolloutWorker, load_worker
from rl_megatron.topology.topology import Topology


def _load_named_worker(settings: TrajectoryConfig) -> RolloutWorker:
    """Return the worker that `rollout.worker` names."""
    kwargs = settings.worker_kwargs | ({"settings": settings.agent} if settings.worker == AGENT else {})
    return load_worker(settings.worker, kwargs)


def build_runner(stage: StageConfig, tokenizer: Tokenizer, topology: Topology) -> RolloutRunner:
    """Return the runner of the stage's rollout worker, which owns the processes that the worker needs."""
    settings = stage.rollout
    ranks = topology.ranks
    owned: list[Environments | ProcessHosts | VerifiersWorker] = []
    if settings.worker == CONVERSATION:
        environments, tools = None, None
        if settings.environment.name is not None:
            environments = Environments(settings.environment)
            owned.append(environments)
        loaded = build_tools(settings.tools)
        if loaded is not None:
            hosts = loaded.build_hosts()
            owned.append(hosts)
            tools = partial(loaded.open_box, hosts)
        worker = Conversation(environments, tools, settings.max_turns, settings.turn_sampling).rollout
    elif settings.worker == VERIFIERS:
        verifiers = VerifiersWorker(settings.environment)
        owned.append(verifiers)
        worker = verifiers.rollout
    else:
        worker = _load_named_worker(settings)
    gateway = Gateway(settings.agent, ENGINE_DECLARATIONS[stage.generation.engine].stops_at_strings)
    timeout = 60 * stage.train.collective_timeout_minutes
    rules = build_rollout_rules(settings, stage.model.max_sequence_length)
    return RolloutRunner(worker, rules, tokenizer, ranks, timeout, owned, gateway)


def build_rollout_rules(settings: TrajectoryConfig, longest: int) -> RolloutRules:
    """Return the limits of tasks, and how failures are handled. `longest` is the model's maximum sequence length."""
    limits = TokenLimits(settings.max_tokens or longest, settings.max_sampled_tokens or sys.maxsize)
    # At most `agent.max_processes` trajectories of agents run at a time: the engine gets requests only once all running
    # trajectories wait for it, and one that waits for a process would delay the others.
    most = settings.agent.max_processes if settings.worker == AGENT else settings.concurrency
    return RolloutRules(
        limits, settings.on_rewrite, min(settings.concurrency, most), settings.retries, settings.timeout_seconds,
        fails_run=settings.on_failure == "error",
    )  # fmt: skip


def check_worker(stage: StageConfig, tokenizer: Tokenizer, loads: bool) -> None:
    """Check the rollout worker of a stage that scores completions.

    If `loads`, also load the environment in a separate process.
    """
    if not stage.scores_completions:
        return
    if stage.rollout.worker != VERIFIERS:
        _load_named_worker(stage.rollout)
    check_tools(stage, tokenizer)
    check_tool_format(stage.rollout.agent.tool_format)
    if loads:
        check_interpreter(stage.rollout.environment.python, "rollout.environment.python")
        check = check_verifiers if stage.rollout.worker == VERIFIERS else check_environment
        check(stage.rollout.environment)
