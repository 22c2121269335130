"""`rl-megatron doctor` finds GPUs, drivers and ranks that do not fit each other, with a fake nvidia-smi."""

import pytest

from rl_megatron.doctor.devices import check_devices, read_gpus
from tests.unit.doctor.planted import installed, nvidia_smi, program

H100 = "NVIDIA H100 80GB HBM3, 4, 81559, 580.65.06"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a function that writes the machine's `nvidia-smi`."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return lambda *gpus, **keywords: nvidia_smi(tmp_path / "bin", *gpus, **keywords)


def test_gpus_that_fit_torch_are_listed(tmp_path, smi):
    smi(H100, H100)
    (finding,) = check_devices(read_gpus(), installed(tmp_path, cuda="13.0"), environment={"LOCAL_WORLD_SIZE": "2"})
    assert finding.state == "ok"
    assert finding.message == "2 × NVIDIA H100 80GB HBM3, driver 580.65.06, for CUDA up to 13.0"


def test_an_older_driver_of_the_same_major_version_is_enough(tmp_path, smi):
    smi(H100, cuda="12.4")
    assert check_devices(read_gpus(), installed(tmp_path, cuda="12.8"), environment={})[0].state == "ok"


def test_a_driver_that_is_too_old_for_torch_is_a_problem(tmp_path, smi):
    smi(H100, cuda="12.4")
    (finding,) = check_devices(read_gpus(), installed(tmp_path, cuda="13.0"), environment={})
    assert finding.state == "problem" and "up to 12.4" in finding.message and "update the driver" in finding.remedy


def test_a_cpu_build_of_torch_beside_gpus_is_a_problem(tmp_path, smi):
    smi(H100)
    (finding,) = check_devices(read_gpus(), installed(tmp_path), environment={})
    assert finding.state == "problem" and "build for the CPU" in finding.message


@pytest.mark.parametrize(
    "environment", [{"LOCAL_WORLD_SIZE": "3"}, {"NPROC_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "1"}]
)
def test_more_ranks_than_gpus_are_a_problem(tmp_path, smi, environment):
    smi(H100, H100)
    (finding,) = check_devices(read_gpus(), installed(tmp_path, cuda="13.0"), environment=environment)
    assert finding.state == "problem" and "ranks on this node" in finding.message and "NPROC_PER_NODE" in finding.remedy


def test_memory_in_use_is_a_warning(tmp_path, smi):
    smi(H100, H100.replace(", 4,", ", 40000,"))
    (finding,) = check_devices(read_gpus(), installed(tmp_path, cuda="13.0"), environment={})
    assert finding.state == "warning" and "GPU 1 (49%)" in finding.message


def test_a_driver_that_does_not_answer_is_a_problem(tmp_path, smi):
    message = "Failed to initialize NVML: Driver/library version mismatch"
    program(tmp_path / "bin" / "nvidia-smi", f"echo '{message}'; exit 18")
    (finding,) = check_devices(read_gpus(), installed(tmp_path), environment={})
    assert finding.state == "problem" and "Driver/library version mismatch" in finding.message


def test_without_a_gpu_only_the_key_device_makes_a_problem(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = installed(tmp_path)
    assert check_devices(read_gpus(), environment)[0].state == "ok"
    assert check_devices(read_gpus(), environment, "cpu")[0].state == "ok"
    (finding,) = check_devices(read_gpus(), environment, "cuda")
    assert finding.state == "problem" and "device=cuda" in finding.message
