"""The pool of ranks that the other tests use."""

import importlib
import sys
from pathlib import Path

import pytest

from tests.fresh_process import FreshProcess
from tests.worker_pool import RankFailed


def record_call(path: str, value: int) -> list[int]:
    with Path(path).open("a") as file:
        file.write(f"{value}\n")
    return [value]


def test_a_reference_is_computed_once_and_every_caller_gets_a_copy(ranks, tmp_path):
    path = str(tmp_path / "calls")
    ranks.reference(record_call, path, 1).append(5)
    assert ranks.reference(record_call, path, 1) == [1]
    assert ranks.reference(record_call, path, 2) == [2]
    assert Path(path).read_text() == "1\n2\n"


def fail(message: str) -> None:
    raise ValueError(message)


def test_a_failed_rank_is_named_and_the_next_job_has_new_ranks(ranks, tmp_path):
    with pytest.raises(RankFailed, match=r"(?s)rank [01] of 2:.*ValueError: no such luck"):
        ranks.run(2, fail, "no such luck")
    assert ranks.run(2, record_call, str(tmp_path / "calls"), 3) == [[3], [3]]


def import_a_run() -> list[str]:
    """Return which modules are imported for the code of a run, in a process of the tests."""
    imported = set(sys.modules)
    importlib.import_module("rl_megatron.runs.run")
    return sorted(sys.modules.keys() - imported)


def test_a_fork_has_imported_what_a_run_needs():
    process = FreshProcess()
    try:
        assert process.run(import_a_run) == []
    finally:
        process.close()
