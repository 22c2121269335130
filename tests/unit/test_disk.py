"""What is written on a full disk: whole or not at all, and later if it can wait."""

import errno
import io
import logging
import os
import subprocess
import sys
import tempfile

import pytest

from rl_megatron import disk
from tests.full_disk import files_of_at_most

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("write", [disk.append, disk.replace_file], ids=["append", "replace"])
def test_what_does_not_fit_leaves_the_file_as_it_was(write, tmp_path):
    path = tmp_path / "file"
    path.write_text("before\n")
    with files_of_at_most(20), pytest.raises(OSError, match="File too large") as caught:
        write(path, b"x" * 100)
    assert disk.is_full(caught.value)
    assert path.read_text() == "before\n" and os.listdir(tmp_path) == ["file"]
    write(path, b"after\n")
    assert path.read_text() == ("before\nafter\n" if write is disk.append else "after\n")


def test_a_full_disk_is_found_among_the_causes_of_an_error():
    assert not disk.is_full(ValueError("no")) and not disk.is_full(OSError(errno.ENOENT, "no"))
    error = RuntimeError("unexpected pos 64 vs 0")
    error.__cause__ = FULL
    assert disk.is_full(error) and disk.find_system_error(error) is FULL


def test_the_free_space_is_said_of_places_that_do_not_exist_yet(tmp_path):
    said = disk.describe(FULL, tmp_path / "not" / "yet")
    assert said.startswith("OSError: [Errno 28] No space left on device; ") and "bytes free of" in said


class Disk:
    """A disk that is full for some time. It keeps what was written in its order."""

    def __init__(self):
        self.error, self.written = None, []

    def write(self, what):
        if self.error is not None:
            raise self.error
        self.written.append(what)


def test_writes_wait_for_space_in_their_order_and_are_said_once(tmp_path, caplog):
    target, writes = Disk(), disk.WaitingWrites(tmp_path)
    with caplog.at_level(logging.WARNING, logger="rl_megatron"):
        writes.write("a", lambda: target.write(1))
        target.error = FULL
        for number in (2, 3):
            writes.write("a", lambda number=number: target.write(number))
        with pytest.raises(OSError, match="No space left"):
            writes.finish()
        writes.write("b", lambda: target.written.append("another place does not wait"))
        assert target.written == [1, "another place does not wait"]
        target.error = None
        writes.write("a", lambda: target.write(4))
    assert target.written == [1, "another place does not wait", 2, 3, 4]
    warned, again = (record.getMessage() for record in caplog.records)
    assert "cannot be written (OSError: [Errno 28]" in warned and "training continues" in warned
    assert again.endswith("are written again")
    writes.finish()
    assert len(target.written) == 5, "a line was written twice"


def test_another_failure_than_a_full_disk_does_not_wait(tmp_path):
    target, writes = Disk(), disk.WaitingWrites(tmp_path)
    for error in (FileNotFoundError(errno.ENOENT, "no such directory"), RuntimeError("a sink of a user")):
        target.error = error
        with pytest.raises(type(error)):
            writes.write("a", lambda: target.write(1))
    writes.finish()


def test_temporary_directories_of_ended_processes_are_removed(tmp_path):
    program = (
        "import sys, tempfile; from rl_megatron import disk; "
        "tempfile.mkdtemp(prefix=disk.make_temporary_prefix('agent', sys.argv[1]), dir=sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    (left,) = tmp_path.iterdir()
    other = tmp_path / left.name.replace("agent", "program")
    other.mkdir()
    own = tempfile.mkdtemp(prefix=disk.make_temporary_prefix("agent", tmp_path), dir=tmp_path)
    assert {str(path) for path in tmp_path.iterdir()} == {own, str(other)}, "of this kind, only that of this process"


def test_lines_that_a_full_disk_does_not_take_are_lost_and_later_ones_are_not(tmp_path, monkeypatch):
    path = tmp_path / "out.txt"
    with path.open("w") as file:
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, file)
        disk.keep_printing()
        print("first")
        with files_of_at_most(6):
            print("lost")
        print("last")
        assert isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is not file
    assert path.read_text() == "first\nlast\n"
