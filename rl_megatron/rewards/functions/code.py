"""The reward function `code`: the program in the completion passes the tests of the record.

The program runs in a child process with limits on time, memory and files. The limits stop accidents, such as endless
loops; they are no protection from a program that means harm. Run rewards of untrusted code in a container.
"""

from __future__ import annotations

import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rl_megatron.rewards.registry import register_reward

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MEBIBYTE = 1 << 20
_LARGEST_FILE = 16 * _MEBIBYTE

# The child reads {"program", "tests", "token"} from its standard input before the program runs. It writes the token and
# the number of tests that passed to the descriptor that it gets as its argument. Because of the token, a program that
# exits, or writes a number there, passes no test.
_CHILD = """
import io, json, os, sys
given = json.loads(sys.stdin.read())
sys.stdin = io.StringIO()
report, write, leave = int(sys.argv[1]), os.write, os._exit
space = {"__name__": "__main__"}
passed = 0
try:
    exec(compile(given["program"], "program", "exec"), space)
    for test in given["tests"]:
        try:
            exec(compile(test, "test", "exec"), space)
            passed += 1
        except Exception:
            pass
finally:
    write(report, (given["token"] + str(passed)).encode())
    leave(0)
"""


@register_reward("code")
@dataclass(frozen=True)
class Code:
    """The share of the record's tests that the program in the completion passes; with `all_or_nothing`, 1 or 0.

    The program is the last block in a code fence, or the whole completion if there is none. The field `tests` of the
    record is a list of Python statements, such as `assert add(1, 2) == 3`, which run after the program. Or it is a
    mapping {inputs: […], outputs: […]}: the program is run once for each input, which it reads from its standard input,
    and has to print the output.

    Args:
        seconds: How long one run of the program may take, in CPU time and by the clock.
        memory_mb: Memory of the child process, in MiB.
        all_or_nothing: Whether a program has to pass all tests.
    """

    seconds: float = 10.0
    memory_mb: int = 512
    all_or_nothing: bool = True

    def __call__(self, completion: str, tests: Sequence[str] | Mapping[str, Sequence[str]] | str) -> dict[str, float]:
        """Return the score of a completion, and the share of the tests that passed.

        Raises:
            ValueError: The tests are none of the above, or there are none.
        """
        blocks = _FENCED.findall(completion)
        program = blocks[-1] if blocks else completion
        tests = json.loads(tests) if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")) else tests
        if isinstance(tests, str):
            tests = [tests]
        if isinstance(tests, Mapping) and tests.keys() >= {"inputs", "outputs"}:
            pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
            results = [self._prints(program, given, wanted) for given, wanted in pairs]
        elif isinstance(tests, Sequence) and all(isinstance(test, str) for test in tests):
            passed = self._num_passed(program, tests)
            results = [True] * passed + [False] * (len(tests) - passed)
        else:
            raise ValueError(f"tests must be statements or {{inputs, outputs}}, not {str(tests)[:80]!r}")
        if not results:
            raise ValueError("the record has no tests")
        share = sum(results) / len(results)
        return {"score": float(share == 1) if self.all_or_nothing else share, "passed": share}

    def _num_passed(self, program: str, tests: Sequence[str]) -> int:
        """Return how many of the statements raise nothing after the program has run."""
        token = secrets.token_hex(16)
        given = json.dumps({"program": program, "tests": list(tests), "token": token})
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as report:
            try:
                self._run([sys.executable, "-I", "-c", _CHILD, str(writing)], given, (writing,))
            finally:
                os.close(writing)
            os.set_blocking(reading, False)  # a child of the program may keep the pipe open
            said = (report.read(4096) or b"").decode(errors="replace")
        _, found, number = said.partition(token)
        return int(number) if found and number.isdigit() else 0

    def _prints(self, program: str, given: str, wanted: str) -> bool:
        """Return whether the program prints what it has to, apart from white space at the ends of lines."""
        printed = self._run([sys.executable, "-I", "-c", program], str(given))
        return printed is not None and _lines(printed) == _lines(str(wanted))

    def _run(self, command: list[str], text: str, descriptors: tuple[int, ...] = ()) -> str | None:
        """Return what a child process prints, or None if it fails or takes too long."""
        with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL, cwd=directory,
                env={"PATH": os.defpath, "HOME": directory, "OMP_NUM_THREADS": "1"},
                start_new_session=True, pass_fds=descriptors, preexec_fn=self._limit,
            )  # fmt: skip
            try:
                child.communicate(text.encode(), timeout=self.seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)  # also the children of the program
                child.wait()
            output.seek(0)
            return output.read().decode(errors="replace") if child.returncode == 0 else None

    def _limit(self) -> None:
        """Set the limits of the child process."""
        cpu = max(1, int(self.seconds + 0.999))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        resource.setrlimit(resource.RLIMIT_DATA, (self.memory_mb * _MEBIBYTE, self.memory_mb * _MEBIBYTE))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
