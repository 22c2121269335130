"""The switches of deterministic computation are set, and a contradicting environment is refused."""

import pytest
import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.topology.determinism import VARIABLES, compute_deterministically


@pytest.fixture(autouse=True)
def put_back():
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, benchmark


def test_every_switch_is_set():
    environment: dict[str, str] = {}
    torch.set_num_threads(2)
    compute_deterministically(environment)
    assert environment == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }  # fmt: skip
    assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == 1
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


def test_a_value_that_repeats_results_is_kept():
    environment = {"NCCL_ALGO": "Tree"}
    compute_deterministically(environment)
    assert environment["NCCL_ALGO"] == "Tree"


@pytest.mark.parametrize("name", VARIABLES)
def test_another_value_is_refused_before_anything_is_set(name):
    with pytest.raises(ConfigError, match=rf"the environment has {name}=other, .*unset it"):
        compute_deterministically({name: "other"})
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_process_that_uses_cuda_already_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"set CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts"):
        compute_deterministically({})
    compute_deterministically({name: value for name, (value, _) in VARIABLES.items()})
