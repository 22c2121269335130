import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(world_size, function, *args)`: the function on that many gloo ranks, results in rank order."""
    pool = WorkerPool()
    yield pool
    pool.close()


def pytest_addoption(parser):
    parser.addoption("--whole-grid", action="store_true", help="hold every layout of the grid against one process")
