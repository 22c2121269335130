"""The tool `python`: what a program prints, and what its limits keep it from."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from rl_megatron.rollouts.tools.interpreter import python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="some limits are Linux's")


def run(code, seconds=4.0, memory=256, most=2000):
    return python(code, seconds, memory, most)


def test_a_program_prints_and_its_errors_have_a_traceback():
    assert run("import json\nprint(json.dumps([1, 'ü']))\nprint('€')") == '[1, "\\u00fc"]\n€\n'
    assert run("def f():\n    1 / 0\nf()").endswith(
        'File "program", line 2, in f\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero\n'
    )
    assert run("x = (") == "  File \"program\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n"
    assert run("import sys; print('a'); sys.exit(3)") == "a\n(the program exited with status 3)"
    assert run("\ud83d").startswith('  File "program", line 1')


def test_a_program_has_no_secrets_and_an_empty_directory(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "swordfish")
    printed = run(
        "import os\nprint(sorted(os.environ), os.listdir())\n"
        "try:\n    print(open(f'/proc/{os.getppid()}/environ').read())\nexcept OSError as error:\n    print(error)"
    )
    assert "swordfish" not in printed and "TOKEN" not in printed and "[]" in printed


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("x = bytearray(10**9)", "MemoryError"),
        ("import mmap; mmap.mmap(-1, 10**9)", "Cannot allocate memory"),
        ("open('large', 'wb').write(bytes(20 << 20))", "File too large"),
        ("import os\nwhile True: os.fork()", "Operation not permitted"),
        ("import subprocess; subprocess.run(['true'])", "Operation not permitted"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "Operation not permitted"),
    ],
)
def test_a_program_that_goes_too_far_gets_an_error(program, error):
    assert error in run(program)


def test_a_program_may_read_flags_and_lower_its_own_limits():
    program = (
        "import fcntl, os, resource as r\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 64))\nprint(fcntl.fcntl(0, fcntl.F_GETFL) >= 0)"
    )
    assert run(program) == "True\n"


def test_a_program_cannot_change_the_files_of_others(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    for act in (f"open('{kept}', 'w')", f"os.remove('{kept}')", f"os.truncate('{kept}', 0)", f"os.mkdir('{kept}2')"):
        assert "Permission denied" in run(f"import os\n{act}"), act
    assert kept.read_text() == "mine" and os.listdir(tmp_path) == ["kept"]
    assert run("import os; os.mkdir('a'); open('b', 'w').close(); os.rename('b', 'a/b'); print(os.listdir('a'))") == (
        "['b']\n"
    )


@pytest.mark.parametrize("loop", ["while True: pass", "import os\nos.close(1); os.close(2)\nwhile True: pass"])
def test_a_program_that_does_not_end_is_ended(loop):
    began = time.monotonic()
    printed = run(f"print('begun', flush=True)\n{loop}", seconds=0.8)
    assert printed == "begun\n(the program was ended after 0.4 seconds)" and time.monotonic() - began < 3


def test_long_output_is_cut_and_its_end_is_still_told():
    printed = run("while True: print('y' * 99)", seconds=0.8, most=300)
    assert len(printed) <= 300 and "(the output is cut after 200 characters)" in printed
    # On a busy machine, the limit of CPU time may come before the end of the time.
    assert re.search(r"\(the program was ended (after 0.4 seconds|by SIG\w+)\)$", printed)


def test_many_threads_do_not_fit_in_the_memory():
    one = "threading.Thread(target=time.sleep, args=[9], daemon=True).start()"
    many = f"import threading, time\nfor _ in range(999): {one}"
    assert "can't start new thread" in run(many)


def test_nothing_of_a_program_is_left():
    before = set(Path(os.environ.get("TMPDIR", "/tmp")).iterdir())
    printed = run("import os\nopen('file', 'w').write('x')\nprint(os.getcwd())")
    assert not Path(printed.strip()).exists() and Path(printed.strip()) not in before
