"""Interpreters of processes of users' code: one that cannot be used is refused before it is started."""

import sys

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.extras import check_interpreter

KEY = "rollout.environment.python"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "is not an interpreter that can be run; make an environment with `python3 -m venv DIRECTORY`"),
        ("echo 3 9", "is Python 3.9, but 3.11 or newer is needed"),
        ("true", "is not a Python interpreter"),
        ("echo hello world", "is not a Python interpreter"),
        ("echo 3 11; exit 4", "is not a Python interpreter"),
    ],
)
def test_what_is_no_interpreter_is_refused(tmp_path, said, message):
    path = tmp_path / "python"
    if said is not None:
        path.write_text(f"#!/bin/sh\n{said}\n")
        path.chmod(0o755)
    with pytest.raises(ConfigError, match=message) as refused:
        check_interpreter(str(path), KEY)
    assert str(refused.value).startswith(f"{KEY}={path} ")


def test_an_interpreter_is_accepted():
    check_interpreter(None, KEY)
    check_interpreter(sys.executable, KEY)
