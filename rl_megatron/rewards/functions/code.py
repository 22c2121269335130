"""The reward function `code`: it runs the record's tests on the program in the completion.

The program runs in a child process with limits on time, memory, files, processes and the network. They are not a
sandbox: if programs may be malicious, run this reward function in a container.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.rewards.registry import register_reward
from rl_megatron.workers.confinement import Limits, make_directory, run_confined

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_PROGRAM = "program.py"
_LONGEST_ANSWER = 100  # bytes

# The child runs the program, sends an empty line, and then gets one test at a time, with a random number. If the test
# raises nothing, the child answers with this number. A program cannot forge answers by writing to the socket before its
# tests, because it does not know their numbers. A process that the program forked does not run the tests.
_CHILD = """
import json, os, socket, sys
descriptor, name = sys.argv[1:]
lines = socket.socket(fileno=int(descriptor)).makefile("rwb", 0)
pid, leave, read = os.getpid(), os._exit, json.loads
del sys.argv[1:]
space = {"__name__": "__main__"}
with open(name, "rb") as program:
    exec(compile(program.read(), "program", "exec"), space)
answer = b""
while os.getpid() == pid:
    lines.write(answer + b"\\n")
    number, test = read(lines.readline() or leave(0))
    try:
        exec(compile(test, "test", "exec"), space)
        answer = number.encode()
    except BaseException:
        answer = b""
leave(0)
"""


@register_reward("code")
@dataclass(frozen=True)
class Code:
    """The share of the record's tests that the program in the completion passes; with `all_or_nothing`, 1 or 0.

    The program is the last block in a code fence or, without such a block, the whole completion. The field `tests` of
    the record is a list of Python statements, such as `assert add(1, 2) == 3`, which run after the program. Or it is a
    mapping {inputs: […], outputs: […]}: the program is run once for each input, reads it from standard input, and must
    print the corresponding output.

    Args:
        seconds: The most CPU time, and the most wall-clock time, of one run of the program.
        memory_mb: Memory of the child process, in MiB.
        all_or_nothing: Whether a program has to pass all tests.
    """

    seconds: float = 10.0
    memory_mb: int = 512
    all_or_nothing: bool = True

    def __call__(self, completion: str, tests: Sequence[str] | Mapping[str, Sequence[str]] | str) -> dict[str, float]:
        """Return the score of a completion, and the share of the tests that passed.

        Raises:
            ValueError: `tests` has neither of these forms, or is empty.
        """
        blocks = _FENCED.findall(completion)
        program = blocks[-1] if blocks else completion
        tests = _read_json(tests) if isinstance(tests, str) else tests
        if isinstance(tests, Mapping) and tests.keys() >= {"inputs", "outputs"}:
            pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
            results = [self._prints(program, str(text), str(expected)) for text, expected in pairs]
        elif isinstance(tests, Sequence) and all(isinstance(test, str) for test in tests):
            passed = self._count_passed(program, tests)
            results = [True] * passed + [False] * (len(tests) - passed)
        else:
            raise ValueError(f"tests must be statements or {{inputs, outputs}}, not {str(tests)[:80]!r}")
        if not results:
            raise ValueError("the record has no tests")
        share = sum(results) / len(results)
        return {"score": float(share == 1) if self.all_or_nothing else share, "passed": share}

    @property
    def _limits(self) -> Limits:
        return Limits(self.seconds, self.memory_mb)

    def _count_passed(self, program: str, tests: Sequence[str]) -> int:
        """Return how many of the statements raise nothing after the program has run."""
        ours, theirs = socket.socketpair()
        with ours, theirs, make_directory() as directory, tempfile.TemporaryFile() as text:
            _write(program, directory)
            text.write(_CHILD.encode())
            text.seek(0)
            arguments, nothing = [str(theirs.fileno()), _PROGRAM], subprocess.DEVNULL
            with run_confined(
                text.fileno(), arguments, directory, self._limits,
                stdin=nothing, stdout=nothing, stderr=nothing, descriptors=[theirs.fileno()],
            ):  # fmt: skip
                theirs.close()
                return _ask(ours, tests, time.monotonic() + self.seconds)

    def _prints(self, program: str, stdin_text: str, expected: str) -> bool:
        """Return whether the program prints what is expected, apart from white space at the ends of lines."""
        with (
            make_directory() as directory, tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout,
            open(_write(program, directory), "rb") as code,
        ):  # fmt: skip
            stdin.write(stdin_text.encode(errors="surrogatepass"))
            stdin.seek(0)
            with run_confined(
                code.fileno(), (), directory, self._limits,
                stdin=stdin.fileno(), stdout=stdout.fileno(), stderr=subprocess.DEVNULL,
            ) as child:  # fmt: skip
                try:
                    child.wait(self.seconds)
                except subprocess.TimeoutExpired:
                    return False
            stdout.seek(0)
            printed = stdout.read().decode(errors="replace")
        return child.returncode == 0 and _split_lines(printed) == _split_lines(expected)


def _ask(connection: socket.socket, tests: Sequence[str], until: float) -> int:
    """Return how many tests the child process passes before `until`, a time of `time.monotonic`."""
    passed, number = 0, ""
    try:
        _read_answer(connection, until)
        for test in tests:
            number = secrets.token_hex(16)
            connection.sendall(json.dumps([number, test]).encode() + b"\n")
            passed += _read_answer(connection, until) == number
    except OSError:  # the child has ended, or takes too long
        pass
    return passed


def _read_answer(connection: socket.socket, until: float) -> str:
    """Return the child's next line; raise OSError if it has ended, takes too long, or sends something else."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(_LONGEST_ANSWER)
        line += part
        if not part or len(line) > _LONGEST_ANSWER:
            raise ConnectionError
    return line[:-1].decode(errors="replace")


def _write(program: str, directory: str) -> Path:
    """Write a program to a file. One that is not valid Unicode is written, too, but fails when it is run."""
    path = Path(directory) / _PROGRAM
    path.write_bytes(program.encode(errors="surrogatepass"))
    return path


def _read_json(tests: str) -> Any:
    """Parse a string as a JSON list or mapping; if it is neither, return it as the only statement."""
    try:
        value = json.loads(tests)
    except ValueError:
        return [tests]
    return value if isinstance(value, list | dict) else [tests]


def _split_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
