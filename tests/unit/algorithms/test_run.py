"""A stage that fails completes the checkpoint under way, whatever ended it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_megatron.algorithms import run
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.load import load_config
from rl_megatron.rewards.scorer import RewardFailed


@pytest.mark.parametrize("error", [ConfigError, RewardFailed])
def test_an_error_in_a_step_completes_the_checkpoint_under_way(monkeypatch, error):
    done = []

    def fail(stage, settings):
        raise error("a later record is bad")

    def closing(name):
        return SimpleNamespace(**{name: lambda: done.append(name), "scored_by": lambda scorer: None})

    algorithm = SimpleNamespace(head="lm", critic=None, progress_metric="loss", run=fail)
    stage = SimpleNamespace(checkpointer=closing("complete"))
    fakes = {"SyncedEngine": closing("shutdown"), "Scorer": closing("close"), "build_evaluation": closing("x")}
    fakes |= {"_model": None, "build_engine": None, "_logprob_check": None, "Stage": stage, "algorithm_of": algorithm}
    for name, made in fakes.items():
        monkeypatch.setattr(run, name, lambda *args, made=made: made)
    logger = SimpleNamespace(note=None)
    with pytest.raises(error, match="a later record is bad"):
        run._run_stage(load_config(["algorithm=sft"]), "sft", None, None, logger, Path("x"), None, "", "")
    assert done == ["complete", "shutdown", "close"]
