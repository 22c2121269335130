"""Engines whose servers are fake ones, on threads of this process or in processes of their own."""

import sys
from pathlib import Path

from rl_megatron.config.generation import GenerationConfig
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.servers.engine import ServerEngine, ServerKind
from rl_megatron.generation.vllm.dialect import VllmDialect
from tests.unit.generation.servers.stub_policy import StubPolicy, StubSync

SAMPLING = Sampling(max_new_tokens=4, stop_ids=(20,))
PROMPTS = [[3, 4, 5], [18], [1, 2]]


class FakeDialect(VllmDialect):
    """Starts the fake server instead of vLLM."""

    def __init__(self, settings, *options):
        super().__init__(settings, 64, "processed_logprobs")
        self.options = options

    def command(self, launch):
        module = "tests.unit.generation.servers.fake_server"
        return [sys.executable, "-m", module, str(launch.port), *self.options], {}


def make(directory, settings, *options, policy=None, sync_log=None, sleeps=False, **generation):
    kind = ServerKind(
        FakeDialect(settings, *options), settings,
        lambda servers: StubSync(servers, [] if sync_log is None else sync_log), 64, sleeps=sleeps,
    )  # fmt: skip
    config = GenerationConfig(engine="vllm", **{"engine_timeout_minutes": 1.0} | generation)
    return ServerEngine(policy or StubPolicy(), config, kind, Path(directory), 1.0)
