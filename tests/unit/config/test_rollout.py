"""The section `rollout`: keys that would do nothing are refused, and its import strings get absolute paths."""

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config

GRPO = ("algorithm=grpo", "data=arithmetic")
CONVERSATION = (*GRPO, "rollout.worker=conversation")
VERIFIERS = (*GRPO, "rollout.worker=verifiers", "rollout.environment.name=reverse-text")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*CONVERSATION, "rollout.turn_sampling=[{top_k: 1}, {temperature: 0}]"),
            "rollout.turn_sampling[1].temperature=0 is greedy sampling, but grpo treats the tokens",
        ),
        (
            (*GRPO, "rollout.environment.name=a.b:C"),
            "environment.name has no effect on rollout.worker=completion",
        ),
        ((*GRPO, "rollout.max_turns=3"), "rollout.max_turns has no effect on rollout.worker=completion"),
        ((*GRPO, "rollout.turn_sampling=[{top_k: 1}]"), "rollout.turn_sampling has no effect"),
        ((*CONVERSATION, "rollout.environment.kwargs.x=3"), "environment.kwargs has no effect without an environment"),
        ((*CONVERSATION, "rollout.worker_kwargs.x=3"), "rollout.worker_kwargs has no effect on worker=conversation"),
        ((*CONVERSATION, "rollout.max_rollout_turns=3"), "did you mean 'rollout.max_turns'"),
        ((*CONVERSATION, "rollout.turn_sampling=[{stop: ['']}]"), "rollout.turn_sampling"),
        ((*CONVERSATION, "rollout.environment.name=no.py:C"), "rollout.environment.name: there is no file"),
        ((*CONVERSATION, "rollout.environment.python=p"), "environment.python has no effect without an environment"),
        ((*GRPO, "rollout.worker=verifiers"), "rollout.worker=verifiers needs rollout.environment.name"),
        ((*VERIFIERS, "rollout.worker_kwargs.x=3"), "rollout.worker_kwargs has no effect on worker=verifiers"),
        ((*VERIFIERS, "rollout.max_turns=3"), "rollout.max_turns has no effect on rollout.worker=verifiers"),
        ((*VERIFIERS, "rollout.tools.functions=[python]"), "tools.functions has no effect on rollout.worker=verifiers"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused(overrides, message):
    with pytest.raises(ConfigError) as refused:
        load_config(list(overrides))
    assert message in str(refused.value)


def test_the_settings_of_an_environment_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text("")
    kwargs = "rollout.environment.kwargs={a: {b: 1}}"
    config = load_config([*CONVERSATION, "rollout.environment.name=game.py:Game", kwargs, "rollout.turn_sampling=null"])
    rollout = config.first.rollout
    assert rollout.environment.name == f"{tmp_path}/game.py:Game" and rollout.environment.kwargs == {"a": {"b": 1}}
    assert rollout.turn_sampling == () and rollout.max_turns == 8
