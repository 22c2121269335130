"""The division of devices that is reported keeps training and generation equally busy."""

from rl_megatron.algorithms.device_balance import DeviceBalance


def report(trainer_devices, engine_devices, trainer_idle, engine_idle):
    balance = DeviceBalance(trainer_devices, engine_devices)
    balance.note({"engine_idle": 0.9})  # the first step has no time before it
    for idle in (0.0, trainer_idle, 1.0):
        balance.note({"trainer_idle": idle, "engine_idle": engine_idle})
    return balance.report() or ""


def test_the_part_that_waits_gives_devices_away():
    assert report(6, 2, trainer_idle=0.5, engine_idle=0.0).endswith(
        "5 for training and 3 for the engine would be balanced"
    )
    assert report(4, 4, trainer_idle=0.0, engine_idle=0.75).endswith(
        "6 for training and 2 for the engine would be balanced"
    )


def test_balanced_devices_and_the_fewest_are_said_to_be():
    assert report(4, 4, trainer_idle=0.1, engine_idle=0.1).endswith("this division of the devices is balanced")
    assert report(1, 1, 0.5, 0.0) == (
        "training was busy for 50% of the time on 1 device(s), and the rollout engine for 100% on 1"
    )
    assert DeviceBalance(1, 1).report() is None
