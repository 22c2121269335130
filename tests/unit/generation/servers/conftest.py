"""An engine on fake servers."""

import pytest

from rl_megatron.config.generation import VllmConfig
from tests.fake_vllm import FakeVllm
from tests.unit.generation.servers.engines_of_fakes import make


@pytest.fixture
def engines(tmp_path):
    """Yield a function that builds engines, on fake servers of this process (`fakes`) or on launched ones."""
    built, started = [], []

    def build(*options, fakes=0, sync_log=None, settings=None, sleeps=False, **generation):
        settings = settings or {}
        if fakes:
            started.extend(FakeVllm() for _ in range(fakes))
            settings = {"server_urls": tuple(fake.url for fake in started)} | settings
        settings = VllmConfig(**{"startup_timeout_seconds": 30.0} | settings)
        built.append(make(tmp_path, settings, *options, sync_log=sync_log, sleeps=sleeps, **generation))
        return (built[-1], *started) if fakes else built[-1]

    yield build
    for engine in built:
        engine.close()
    for fake in started:
        fake.close()
