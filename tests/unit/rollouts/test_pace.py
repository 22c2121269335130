"""A bound on ages that does not suit the engine's speed is said once, and a division of devices keeps both busy."""

import pytest

from rl_megatron.config.generation import GenerationConfig
from rl_megatron.config.loading.load import load_config
from rl_megatron.rollouts.pace import AsyncPace, DeviceBalance, Division, count_engine_devices, count_training_nodes

NAMES = ("trainer_idle", "engine_idle", "dropped_groups_too_old")


@pytest.fixture
def said(logged):
    """`said(steps)`: what is said at each step that has the metrics `NAMES`; a step may lack the first ones."""

    def report(steps, max_age=1, per_step=4):
        age = f"rollout.max_trajectory_age_steps={max_age}"
        options = ["algorithm=grpo", "train.steps=99", "generation.engine=transformers", "rollout.async_enabled=true"]
        pace, found = AsyncPace("grpo", load_config([*options, age]).first, per_step, num_ranks=1), []
        for number, step in enumerate(steps, 1):
            logged.clear()
            pace.note(number, dict(zip(NAMES[-len(step) :], step, strict=True)))
            found.append([message.removeprefix("stage grpo: ") for message in logged])
        return found

    return report


def test_training_that_waits_for_a_busy_engine_is_told_to_use_more_engines(said):
    *before, (warning,) = said([(0.75, 0.0, 0)] * 5)
    assert before == [[]] * 4
    assert warning == (
        "rollout.max_trajectory_age_steps=1: training waited for trajectories for 75% of the last 5 steps, because "
        "a step's trajectories take 4.0 times as long as its training. The engine was busy, so a higher bound does not "
        "help: use more engines, or shorter completions"
    )


def test_an_engine_that_the_bound_holds_back_is_told_to_raise_it(said):
    (warning,) = said([(0.6, 0.4, 0)] * 5)[-1]
    assert "no request for 40% of that time" in warning and warning.endswith("raise the bound")


def test_groups_that_are_always_dropped_are_said(said):
    (warning,) = said([(0.0, 0.0, 2)] * 5, max_age=2)[-1]
    assert "max_trajectory_age_steps=2: 10 of 30 groups" in warning and "rollout.over_sampling=1" in warning


@pytest.mark.parametrize("step", [(0.5, 0.0, 0), (0.1, 0.9, 0), (0.0, 0.0, 1)])
def test_a_bound_that_suits_the_engine_is_not_said(said, step):
    assert said([step] * 20) == [[]] * 20


def test_a_warning_is_said_once_and_a_step_without_time_before_it_does_not_count(said):
    found = said([(0.0, 9), *[(0.9, 0.0, 9)] * 9])
    assert [len(messages) for messages in found] == [0, 0, 0, 0, 0, 2, 0, 0, 0, 0]


def test_the_last_step_says_how_busy_both_were(logged):
    stage = load_config(["algorithm=grpo", "train.steps=2"]).first
    pace = AsyncPace("grpo", stage, 4, num_ranks=1)
    for step in (1, 2):
        pace.note(step, {"trainer_idle": 0.5, "engine_idle": 0.0, **pace.devices})
    assert logged == [
        "stage grpo: training was busy for 50% of the time on 1 device(s), and the rollout engine for 100% on 1"
    ]


def metrics(trainer_devices, engine_devices, trainer_idle, engine_idle):
    return {
        "trainer_devices": float(trainer_devices), "engine_devices": float(engine_devices),
        "trainer_idle": trainer_idle, "engine_idle": engine_idle,
    }  # fmt: skip


def measured(trainer_devices, engine_devices, trainer_idle, engine_idle):
    steps = [metrics(trainer_devices, engine_devices, idle, engine_idle) for idle in (0.0, trainer_idle, 1.0)]
    return DeviceBalance.from_steps([{"engine_idle": 0.9}, *steps])  # the first step has no time before it


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
    assert DeviceBalance().report() is None and DeviceBalance().find_best([Division(1, 1)]) is None


def test_steps_of_an_earlier_division_do_not_count():
    lines = [metrics(4, 4, 0.0, 0.9)] * 9 + [metrics(6, 2, 0.5, 0.0)] * 3
    assert DeviceBalance.from_steps(lines).summarise() == (Division(6, 2), 0.5, 1.0)


def test_the_measured_division_stays_if_no_other_is_five_percent_faster():
    balance = measured(80, 20, trainer_idle=0.03, engine_idle=0.0)
    assert balance.find_best([Division(79, 21), Division(80, 20)]) == Division(80, 20)
    assert balance.find_best([Division(79, 21)]) == Division(79, 21), "it is not possible any more"
    assert measured(80, 20, 0.10, 0.0).find_best([Division(78, 22), Division(80, 20)]) == Division(78, 22)


@pytest.mark.parametrize(
    ("servers", "devices"),
    [({}, 2 * 3 * 2), ({"server_nodes": ("a:8000",)}, 3 * 2), ({"server_urls": ("http://a:1",)}, 2)],
    ids=["each training node starts servers", "a node with servers", "a server of another kind"],
)
def test_devices_of_servers_are_counted_on_all_nodes(servers, devices, monkeypatch):
    vllm = type(GenerationConfig().vllm)(num_servers=3, tensor_parallel_size=2, **servers)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert count_engine_devices(GenerationConfig(engine="vllm", vllm=vllm), count_training_nodes(8)) == devices
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert count_training_nodes(8) == 1
