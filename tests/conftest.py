import gc
import logging
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DISABLE_MLFLOW_INTEGRATION", "TRUE")  # with which TRL imports it, for three seconds

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported; worker processes inherit it

from rl_megatron import log
from tests import costs, shape_checks
from tests.end_to_end.launch import Forks
from tests.fresh_process import FreshProcess
from tests.worker_pool import WorkerPool

gc.disable()  # while nothing but modules and tests is made, until the end of the collection
shape_checks.install()  # before anything imports the modules that it checks

# Most tests in these directories need several processes. They belong to the change tier, unless a mark says otherwise.
DEAR_DIRECTORIES = tuple(f"{Path(__file__).parent / name}{os.sep}" for name in ("parallel", "end_to_end"))


NIGHTLY = costs.NightlyTests()


def is_dear(path: Path) -> bool:
    """Return whether a file is in one of the dear directories."""
    return str(path).startswith(DEAR_DIRECTORIES)


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
def is_nightly(request):
    """Return whether the nightly tier runs, in which some tests have more cases."""
    return request.config.getoption("--tier") == "nightly"


@pytest.fixture
def logged(monkeypatch):
    """Yield the list of the messages that rl_megatron logs during the test, from INFO up.

    pytest's caplog sees a message twice, or never, depending on whether an earlier test called `log.setup`.
    """
    handler = Messages()
    monkeypatch.setattr(log.LOGGER, "handlers", [handler])
    monkeypatch.setattr(log.LOGGER, "propagate", False)
    monkeypatch.setattr(log.once, "messages", set())
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
        "--tier",
        choices=costs.TIERS,
        default="change",
        help="run this tier and the cheaper ones; nightly also has more random batches, kills and steps",
    )
    parser.addoption("--shard", metavar="I/N", help="run every Nth file of tests, from the Ith on")


COLLECTED = pytest.StashKey[list[pytest.Item]]()


@pytest.fixture
def collected(request):
    """Return the tests that pytest found, also those of dearer tiers and of other shards, which it does not run."""
    return request.config.stash[COLLECTED]


def pytest_ignore_collect(collection_path, config):
    """Leave out files that have no test of the tier, because importing all files takes as long as hundreds of tests."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    tier, file = config.getoption("--tier"), collection_path.relative_to(config.rootpath).as_posix()
    if tier != "nightly" and NIGHTLY.takes_all_of(file):
        return True
    if tier != "fast":
        return None
    source = collection_path.read_text()
    is_late = is_dear(collection_path) and "mark.fast" not in source
    return "\npytestmark = pytest.mark.change\n" in source or is_late or None


def pytest_collection_modifyitems(config, items):
    """Leave out what is of a dearer tier or of another shard."""
    config.stash[COLLECTED] = list(items)
    tiers = costs.TIERS[: costs.TIERS.index(config.getoption("--tier")) + 1]
    first, step = map(int, (config.getoption("--shard") or "1/1").split("/"))
    files = set(sorted({item.path for item in items})[first - 1 :: step])
    left_out = {item for item in items if costs.tier_of(item) not in tiers or item.path not in files}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    # The dear ones first: two workers then end with cheap ones, at nearly the same time.
    items.sort(key=lambda item: not is_dear(item.path))


def pytest_collection_finish():
    gc.freeze()  # Garbage collections then skip the modules and tests, a million objects that are never freed.
    gc.enable()


def pytest_itemcollected(item):
    """Mark what nightly.toml lists `nightly`, and what is in a dear directory `change`, unless it is marked `fast`."""
    if item.nodeid in NIGHTLY:
        item.add_marker(pytest.mark.nightly)
    if is_dear(item.path) and item.get_closest_marker("fast") is None:
        item.add_marker(pytest.mark.change)
