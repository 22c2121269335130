"""A stage that fails completes the checkpoint under way, and every collective of a run has its timeout."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.observability.liveness import Position
from rl_megatron.rewards.scorer import RewardFailed
from rl_megatron.runs import run, stage_runner
from rl_megatron.runs.roll_back import RollBack
from rl_megatron.runs.stopping import Stopping
from rl_megatron.timing import PhaseTimer
from rl_megatron.topology.ranks import Ranks


@pytest.mark.parametrize("error", [ConfigError, RewardFailed])
def test_an_error_in_a_step_completes_the_checkpoint_under_way(monkeypatch, error):
    done = []

    def fail(loop, policy, data, algorithm):
        raise error("a later record is bad")

    def closing(part):
        return SimpleNamespace(close=lambda: done.append(part), made_by=lambda rollouts: None)

    algorithm = SimpleNamespace(head="lm", critic=None, progress_metric="loss", run=fail)
    config = load_config(["algorithm=sft"])
    stage = SimpleNamespace(
        profiler=None,
        checkpointer=SimpleNamespace(complete=lambda: done.append("complete"), exporter=closing("export")),
        config=config.first, keep=lambda name, part: None, policy=None, critic=None, tokenizer=None,
        timer=PhaseTimer(), evaluations=closing("sets"), closing=[],
    )  # fmt: skip
    fakes = {"SyncedEngine": closing("engine"), "Scorer": closing("scorer"), "build_evaluation": closing("evaluation")}
    fakes |= {"MegatronPolicy": None, "build_engine": None, "make_sampling": None, "LogprobCheck": None}
    fakes |= {"Stage": stage, "get_algorithm": algorithm, "build_runner": closing("rollout worker")}
    fakes |= {"StepMeter": SimpleNamespace(timer=stage.timer), "StepProfiler": None, "build_dataset_loader": None}
    for name, made in fakes.items():
        monkeypatch.setattr(stage_runner, name, lambda *args, made=made, **options: made)
    logger, layout = (
        SimpleNamespace(note=None, output_dir=Path("x")),
        SimpleNamespace(rank=0, ranks=Ranks(), is_cuda=False),
    )
    tokenizer = SimpleNamespace(vocab_size=8)
    with pytest.raises(error, match="a later record is bad"):
        stages = stage_runner.StageRunner(config, layout, tokenizer, logger, "", Stopping(), Position())
        stages.run("sft", Path("x"), None, "", RollBack())
    assert done == ["complete", "export", "engine", "sets", "rollout worker", "scorer"]


@pytest.mark.parametrize(("error", "status"), [(ConfigError("a bad key"), 2), (RewardFailed("no judge"), 1)])
def test_the_exit_status_says_whether_the_input_was_bad(monkeypatch, error, status):
    def fail(config):
        raise error

    monkeypatch.setattr(run, "run_stages", fail)
    monkeypatch.setattr(run, "leave_together", lambda: None)
    assert run.run(load_config([])) == status


def test_every_collective_of_a_run_has_the_timeout_of_the_run(monkeypatch):
    class Built(Exception):
        pass

    def build(parallel, device, seed, timeout_minutes, store):
        raise Built(device, timeout_minutes)

    monkeypatch.setattr(run, "join", lambda device, timeout_minutes: (timeout_minutes, None))
    monkeypatch.setattr(run, "build", build)
    monkeypatch.setattr(run, "check_configuration", lambda config, device: None)
    with pytest.raises(Built, match="3.5, 3.5"):
        run.run_stages(load_config(["train.collective_timeout_minutes=3.5"]))
