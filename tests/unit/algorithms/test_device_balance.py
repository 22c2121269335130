"""The division of devices that is reported keeps training and generation equally busy."""

import pytest

from rl_megatron.algorithms.device_balance import DeviceBalance, Division, engine_devices, num_training_nodes
from rl_megatron.config.generation import GenerationConfig


def metrics(trainer_devices, engine_devices, trainer_idle, engine_idle):
    return {
        "trainer_devices": float(trainer_devices), "engine_devices": float(engine_devices),
        "trainer_idle": trainer_idle, "engine_idle": engine_idle,
    }  # fmt: skip


def measured(trainer_devices, engine_devices, trainer_idle, engine_idle):
    steps = [metrics(trainer_devices, engine_devices, idle, engine_idle) for idle in (0.0, trainer_idle, 1.0)]
    return DeviceBalance.of([{"engine_idle": 0.9}, *steps])  # the first step has no time before it


def test_the_part_that_waits_gives_devices_away():
    report = measured(6, 2, trainer_idle=0.5, engine_idle=0.0).report()
    assert report.endswith("5 for training and 3 for the engine would be balanced")
    report = measured(4, 4, trainer_idle=0.0, engine_idle=0.75).report()
    assert report.endswith("6 for training and 2 for the engine would be balanced")


def test_balanced_devices_and_the_fewest_are_said_to_be():
    assert measured(4, 4, 0.1, 0.1).report().endswith("this division of the devices is balanced")
    assert measured(1, 1, 0.5, 0.0).report() == (
        "training was busy for 50% of the time on 1 device(s), and the rollout engine for 100% on 1"
    )
    assert DeviceBalance().report() is None and DeviceBalance().best([Division(1, 1)]) is None


def test_steps_of_an_earlier_division_do_not_count():
    lines = [metrics(4, 4, 0.0, 0.9)] * 9 + [metrics(6, 2, 0.5, 0.0)] * 3
    assert DeviceBalance.of(lines).measured() == (Division(6, 2), 0.5, 1.0)


def test_the_measured_division_stays_if_no_other_is_five_percent_faster():
    balance = measured(80, 20, trainer_idle=0.03, engine_idle=0.0)
    assert balance.best([Division(79, 21), Division(80, 20)]) == Division(80, 20)
    assert balance.best([Division(79, 21)]) == Division(79, 21), "it is not possible any more"
    assert measured(80, 20, 0.10, 0.0).best([Division(78, 22), Division(80, 20)]) == Division(78, 22)


@pytest.mark.parametrize(
    ("servers", "devices"),
    [({}, 2 * 3 * 2), ({"server_nodes": ("a:8000",)}, 3 * 2), ({"server_urls": ("http://a:1",)}, 2)],
    ids=["each training node starts servers", "a node with servers", "a server of another kind"],
)
def test_devices_of_servers_are_counted_on_all_nodes(servers, devices, monkeypatch):
    vllm = type(GenerationConfig().vllm)(num_servers=3, tensor_parallel_size=2, **servers)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert engine_devices(GenerationConfig(engine="vllm", vllm=vllm), num_training_nodes(8)) == devices
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert num_training_nodes(8) == 1
