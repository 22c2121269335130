import gc
import logging
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported; worker processes inherit it

from rl_megatron import log
from tests import shape_checks
from tests.end_to_end.launch import Forks
from tests.fresh_process import FreshProcess
from tests.worker_pool import WorkerPool

shape_checks.install()  # before anything imports the modules that it checks

# Most tests in these directories need several processes. All are slow, except those that are marked `quick`.
SLOW_DIRECTORIES = [Path(__file__).parent / name for name in ("parallel", "end_to_end")]


@pytest.fixture(scope="session")
def ranks():
    """Yield the pool of ranks: `ranks.run(world_size, function, *args)` returns the results in rank order."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def fresh_process():
    """Yield a process without a device: `fresh_process.run(function, *args)` returns the result."""
    process = FreshProcess()
    yield process
    process.close()


@pytest.fixture(scope="session")
def forks():
    """Return what starts `rl-megatron` in forks of a process that has done the imports."""
    return Forks()


class Messages(logging.Handler):
    """A log handler that keeps the messages it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def logged(monkeypatch):
    """Yield the list of the messages that rl_megatron logs during the test, from INFO up.

    pytest's caplog sees a message twice, or never, depending on whether an earlier test called `log.setup`.
    """
    handler = Messages()
    monkeypatch.setattr(log.LOGGER, "handlers", [handler])
    monkeypatch.setattr(log.LOGGER, "propagate", False)
    monkeypatch.setattr(log, "_said", set())
    level = log.LOGGER.level
    log.LOGGER.setLevel(logging.INFO)
    yield handler.messages
    log.LOGGER.setLevel(level)


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    """Return a backend of the logprobs on a CPU, with Triton's interpreter; tests/gpu tests the compiled kernels."""
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("Triton's interpreter is for machines without a GPU")
    return request.param


def pytest_addoption(parser):
    parser.addoption(
        "--whole-grid",
        action="store_true",
        help="run all cases, also those that are marked `whole_grid`, every layout of the grid and 1,000 random packs",
    )


def pytest_collection_modifyitems(config, items):
    """Leave out what is marked `whole_grid`, unless the option is given."""
    if not config.getoption("--whole-grid"):
        left_out = [item for item in items if item.get_closest_marker("whole_grid")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole_grid")]


def pytest_collection_finish():
    gc.freeze()  # Garbage collections then skip the modules and tests, a million objects that are never freed.


def pytest_itemcollected(item):
    """Mark every test of a slow directory `slow`, unless it is marked `quick`."""
    in_slow_directory = any(item.path.is_relative_to(directory) for directory in SLOW_DIRECTORIES)
    if in_slow_directory and item.get_closest_marker("quick") is None:
        item.add_marker(pytest.mark.slow)
