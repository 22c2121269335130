"""Programs of a model under limits: what they are kept from, and that nothing of them is left."""

import ctypes
import json
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_megatron import log
from rl_megatron.workers import program_limits
from rl_megatron.workers.child_process import build_child_environment, describe_end
from rl_megatron.workers.confinement import (
    Limits,
    find_missing_limits,
    log_missing_limits,
    make_directory,
    run_confined,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="some limits are Linux's")
# "not allowed …" is what Python says to a higher limit.
ESCAPES = Path(__file__).with_name("escapes.py")
REFUSED = {"EPERM", "EACCES", "ENOSYS", "EXDEV", "EFBIG", "EMFILE", "not allowed to raise maximum limit"}
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


def run(text, *arguments, seconds=10.0):
    """Return the status of a program, and what it prints."""
    with make_directory() as directory, tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as printed:
        program.write(text.encode())
        program.seek(0)
        nothing, output = subprocess.DEVNULL, printed.fileno()
        with run_confined(
            program.fileno(), arguments, directory, Limits(seconds, 256), stdin=nothing, stdout=output, stderr=output
        ) as child:
            status = child.wait(seconds)
        printed.seek(0)
        return status, printed.read().decode()


@pytest.fixture
def without_a_filter(monkeypatch, tmp_path):
    """Let programs run on a machine whose system calls are not known."""
    text = (
        Path(program_limits.__file__).read_text().replace('"x86_64"', '"another"').replace('"aarch64"', '"yet another"')
    )
    (tmp_path / "program_limits.py").write_text(text)
    python = tmp_path / "python"  # it runs the changed file in the place of the real one
    python.write_text(f"""#!/bin/sh
for word; do
    shift
    case $word in */program_limits.py) word={tmp_path}/program_limits.py ;; esac
    set -- "$@" "$word"
done
exec "{sys.executable}" "$@"
""")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(log.once, "messages", set())


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the attempts have x86_64's numbers")
def test_no_attempt_to_escape_works(tmp_path):
    if missing := find_missing_limits():
        pytest.skip(missing[0])
    others = tmp_path / "others"
    others.write_text("theirs")
    before = others.stat()
    status, printed = run(ESCAPES.read_text(), str(os.getpid()), str(others))
    assert status == 0, printed
    results = json.loads(printed)
    assert len(results) > 120 and {name: end for name, end in results.items() if end not in REFUSED} == {}
    after = others.stat()
    assert others.read_text() == "theirs" and os.listdir(tmp_path) == ["others"]
    assert (after.st_mode, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_mode,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_system_calls_are_those_of_the_kernel(machine):
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"there is no {header}")
    lines = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", header.read_text())
    numbers = {name: int(number) for name, number in lines}
    numbers.setdefault("newfstatat", numbers.get("fstatat", 0))
    calls = program_limits.list_allowed_calls(machine) | program_limits.list_conditional_calls(machine)
    assert {name: numbers[name] for name in calls} == calls and len(calls) > 130


@pytest.mark.parametrize(
    ("version", "handled", "missing"),
    [
        (1, [0x1FF2], ["namespace", "landlock"]),
        (2, [0x3FF2], ["namespace", "landlock"]),
        (3, [0x7FF2], ["namespace"]),
        (5, [0x7FF2, 3], ["namespace"]),
        (6, [0x7FF2, 3, 3], ["namespace"]),
    ],
)
def test_landlock_is_asked_for_what_this_version_of_it_can_refuse(version, handled, missing, monkeypatch):
    """The numbers are those of linux/landlock.h. It takes no rules with a bit that it does not know."""
    asked = []

    def syscall(number, attributes=None, *rest):
        if number != 444:
            return 0
        if attributes is None:
            return version
        asked.extend(struct.unpack(f"{len(attributes) // 8}Q", attributes))
        return os.open(os.devnull, os.O_RDONLY)

    library = SimpleNamespace(syscall=syscall, prctl=lambda *arguments: 0, unshare=lambda flags: -1)
    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **options: library)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    assert program_limits.limit(1, 1 << 30, os.getppid()) == missing and asked == handled


def test_what_the_system_does_not_have_is_logged_once_and_found_before(without_a_filter, caplog):
    for _ in range(2):
        assert run("import os\nif os.fork():\n    os.wait(); print('parent')") == (0, "parent\n")
    (record,) = caplog.records
    (remark,) = find_missing_limits()
    assert record.message == f"{remark}; see docs/security.md" and "can start and end processes" in remark


def test_what_a_run_has_logged_is_not_repeated_by_the_processes_that_it_starts(without_a_filter, logged, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    program, remark = "import os\nif os.fork():\n    os.wait()", f"{find_missing_limits()[0]}; see docs/security.md"
    log_missing_limits()
    assert logged == [remark]
    monkeypatch.setattr(log.once, "messages", set())  # as in another process
    monkeypatch.setattr(os, "environ", build_child_environment())
    assert run(program) == (0, "") and logged == [remark]


@pytest.mark.change
def test_no_process_outlives_the_program_that_started_it(without_a_filter, tmp_path):
    child = f"import time; time.sleep(1.5); open({str(tmp_path / 'lives')!r}, 'w')"
    ended = subprocess.Popen(["sleep", "0.5"])
    program = f"import subprocess as s, sys; s.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    assert run(program) == (0, "")
    assert ended.poll() is None, "other children of this process live on"
    time.sleep(2.5)
    assert not (tmp_path / "lives").exists() and ended.wait() == 0


def test_threads_share_the_memory_of_a_program():
    program = "import threading, time\nfor _ in range(50): threading.Thread(target=time.sleep, args=[0.1]).start()"
    assert run(program) == (0, "")


@pytest.mark.parametrize(
    "program",
    [
        "for _ in range(1500):\n    os.mkdir('a'); os.chdir('a')",
        "os.mkdir('a', 0o300); os.mkdir('a/b', 0o300); open('a/b/c', 'w')",
        "os.symlink('/', 'a')",
    ],
    ids=["deep", "unreadable", "a link"],
)
def test_the_directory_of_a_program_is_removed(program, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, printed = run(f"import os\nprint(os.getcwd())\n{program}")
    assert printed.startswith(str(tmp_path)) and list(tmp_path.iterdir()) == []


def test_a_death_by_a_real_time_signal_has_a_number():
    status, _ = run(
        "import ctypes, struct, time\n"
        "libc, timer = ctypes.CDLL(None), ctypes.c_int()\n"
        "libc.timer_create(1, struct.pack('QiiQ', 0, 40, 0, 0) + bytes(64), ctypes.byref(timer))\n"
        "libc.timer_settime(timer, 0, struct.pack('4q', 0, 0, 0, 1000), None)\ntime.sleep(5)"
    )
    assert describe_end(status) == "was killed by signal 40" and describe_end(-9) == "was killed by SIGKILL"
    assert describe_end(3) == "exited with status 3"
