import pytest

from tests.end_to_end.launch import INTERRUPTED, metrics
from tests.vllm_servers import STEP_TOKENS, local_server, ready


@pytest.fixture(scope="session")
def whole(tmp_path_factory, forks):
    """Return the metrics of the run `INTERRUPTED` if nothing disturbs it."""
    directory = tmp_path_factory.mktemp("whole")
    done = forks.run_ranks(directory, *INTERRUPTED, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    return metrics(directory / "out")


@pytest.fixture(scope="session")
def faulty_servers(tmp_path_factory):
    """Yield two vLLM servers into which faults can be injected, and of which the first has two workers."""
    directory, faults = tmp_path_factory.mktemp("vllm"), ("--worker-extension-cls", "tests.vllm_faults.Faults")
    servers = [
        local_server(
            directory / str(workers),
            tensor_parallel_size=workers,
            max_num_batched_tokens=STEP_TOKENS,
            extra_args=faults,
        )
        for workers in (2, 1)
    ]
    yield servers
    for each in servers:
        each.end()


@pytest.fixture
def urls(faulty_servers) -> list[str]:
    """Return the addresses of the servers, which are started if they do not run."""
    return ready(faulty_servers)
