"""Only one run at a time writes to an output directory."""

import subprocess
import sys

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.runs.lock import OutputLock

HOLD = """
import sys
from pathlib import Path
from rl_megatron.runs.lock import OutputLock
lock = OutputLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_in_use_is_refused_until_its_run_is_gone(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    lock = OutputLock(tmp_path)
    with pytest.raises(ConfigError, match=rf"is in use by another run \(process {other.pid} on "):
        lock.acquire()
    other.kill()
    other.communicate()
    lock.acquire()
    lock.release()
    assert not list(tmp_path.iterdir()), "the lock's file was left behind"


def test_a_lock_is_taken_again_in_a_directory_that_replaced_the_locked_one(tmp_path):
    directory = tmp_path / "run"
    lock = OutputLock(directory)
    lock.acquire()
    assert not directory.exists(), "a run that is refused later would leave the directory behind"
    directory.mkdir()
    lock.acquire()
    directory.rename(tmp_path / "moved")
    directory.mkdir()
    lock.acquire()
    assert (directory / ".lock").is_file()
    lock.release()
    assert not list(directory.iterdir())
