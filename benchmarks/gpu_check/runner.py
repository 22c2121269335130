"""Run parts within time limits, alone or several at a time, and keep what they have found so far in two files."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TextIO

from benchmarks.gpu_check import forks
from benchmarks.gpu_check.part import run_part
from benchmarks.gpu_check.parts import PARTS, Part
from benchmarks.gpu_check.record import Record, write_json
from benchmarks.gpu_check.report import FAILURES, RESULTS, read_results, write_report
from benchmarks.gpu_check.setting import Setting

REPOSITORY = Path(__file__).resolve().parents[2]
TOTAL_SECONDS = 1500  # without --seconds
THREADS_TOGETHER = "2"  # of each part that runs at the same time as others
KEPT_FILES = ("tests.xml", "top_kernels.txt")  # of parts; the output directory gets them, all of one name as one file
_FAILURE_LINES, _ERROR_LINES = 40, 12
SECONDS_BETWEEN_WRITES, _SECONDS_BETWEEN_LOOKS = 5.0, 0.1


@dataclass(frozen=True)
class Call:
    """What one call of the command asks for.

    Attributes:
        device: "cuda" or "cpu".
        tiny: Whether shapes are tiny.
        output: The directory of results: a few files, and no directories.
        work: The directory of the parts' logs and files.
        bundle: The directory of expected values, or None.
        ends: When all parts are ended, in seconds of `time.monotonic`.
        card: The name of the device, which results state.
        about: What the results state of the software.
        is_forked: Whether parts are forks of this process.
    """

    device: str
    tiny: bool
    output: Path
    work: Path
    bundle: Path | None = None
    ends: float = field(default_factory=lambda: time.monotonic() + TOTAL_SECONDS)
    card: str = "CPU"
    about: dict[str, Any] = field(default_factory=dict)
    is_forked: bool = True


class Stopped(BaseException):
    """This process was asked to end."""


@dataclass
class Running:
    """A part that runs, and how much of its log was printed."""

    part: Part
    process: forks.Process
    log: TextIO
    began: float
    limit: float
    started: str
    prefix: str
    unfinished_line: str = ""

    def print_log(self) -> None:
        """Print the lines that the part has written since the last call."""
        *lines, self.unfinished_line = (self.unfinished_line + self.log.read()).split("\n")
        for line in lines:
            print(line if line.startswith("FAILS") else f"{self.prefix}{line}", flush=True)


def run_parts(names: Sequence[str], call: Call) -> bool:
    """Run parts, and return whether all passed. The output directory has results and a report at any time.

    Raises:
        Stopped: This process was asked to end. Its parts have been ended, and the files are up to date.
    """
    runner = _Runner(names, call)
    with _stopped_by(signal.SIGTERM), runner:
        for alone, group in itertools.groupby(
            (PARTS[name] for name in PARTS if name in names), lambda part: part.alone
        ):
            for together in [[part] for part in group] if alone else [list(group)]:
                runner.run(together)
    return all(runner.results["parts"][name]["status"] in ("passed", "skipped") for name in names)


class _Runner:
    """The parts that run now, and the results. At its end, parts that still run are ended."""

    def __init__(self, names: Sequence[str], call: Call):
        self._call, self._running, self._written = call, list[Running](), 0.0
        call.work.mkdir(parents=True, exist_ok=True)
        self._work = Path(tempfile.mkdtemp(prefix=datetime.now(UTC).strftime("%Y%m%d-%H%M%S-"), dir=call.work))
        self.results = read_results(call.output) | {"about": call.about}
        for name in names:
            self.results["parts"][name] = self._about(name) | _not_begun("the command was ended before")
        call.output.mkdir(parents=True, exist_ok=True)
        for name in (FAILURES, *KEPT_FILES):
            (call.output / name).unlink(missing_ok=True)

    def __enter__(self) -> _Runner:
        self._write()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` and a user may both send it
        running, self._running = self._running, []
        for each in running:
            seconds = time.monotonic() - each.began
            self._keep(each, "stopped", f"the command was ended when the part had run for {seconds:.0f} s")
        self._write()
        forks.end(*(each.process for each in running))

    def run(self, parts: list[Part]) -> None:
        """Run parts at the same time."""
        left = self._call.ends - time.monotonic()
        for part in parts:
            print(f"\n== {part.name}: {part.meaning}", flush=True)
            if left < part.least_seconds:
                why = f"{max(left, 0):.0f} s of the time of all parts were left; run it alone"
                self.results["parts"][part.name] |= _not_begun(why)
                print(f"== {part.name}: not begun", flush=True)
            else:
                self._running.append(self._start(part, left, is_alone=len(parts) == 1))
        self._write()
        while self._running:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            for each in list(self._running):
                self._look_at(each)
            if time.monotonic() - self._written > SECONDS_BETWEEN_WRITES:
                self._write()

    def _start(self, part: Part, left: float, *, is_alone: bool) -> Running:
        call, log = self._call, self._work / f"{part.name}.log"
        of_part = part.bundle_seconds if call.bundle is not None and call.device == "cuda" else part.seconds
        limit, began = min(of_part, left), time.monotonic()
        log.touch()
        tiny, variables = call.tiny or call.device == "cpu", {} if is_alone else {"OMP_NUM_THREADS": THREADS_TOGETHER}
        setting = Setting(call.device, tiny, self._work / part.name, call.bundle, began + limit)
        result = self._result(part)
        if call.is_forked:
            process: forks.Process = forks.start(lambda: run_part(part.name, setting, result), log, variables)
        else:
            process = _start_command(part.name, setting, result, log, variables, limit)
        prefix, started = "" if is_alone else f"{part.name} | ", datetime.now(UTC).isoformat(timespec="seconds")
        return Running(part, process, log.open(errors="replace"), began, limit, started, prefix)

    def _look_at(self, each: Running) -> None:
        each.print_log()
        status = each.process.poll()
        if status is not None:
            each.print_log()
            self._finish(each, status)
        elif time.monotonic() - each.began > each.limit:
            self._finish(each, None)

    def _finish(self, each: Running, status: int | None) -> None:
        """Keep the result of a part that ended with a status, or that is ended now, at its limit."""
        self._running.remove(each)
        forks.end(each.process)
        found = self._found(each.part)
        word, error = "passed", found["error"]
        if status is None:
            word, error = "timed out", f"it was ended after {each.limit:.0f} s"
        elif status != 0:
            word = "failed"
            if error is None and all(check["holds"] for check in found["checks"]):
                error = "\n".join(_last_lines(each, _ERROR_LINES)) or f"it ended with status {status}"
        elif found["skipped"]:
            word = "skipped"
        self._keep(each, word, error)
        self._write()
        print(f"== {each.part.name}: {word} after {time.monotonic() - each.began:.0f} s", flush=True)

    def _keep(self, each: Running, status: str, error: str | None) -> None:
        seconds = round(time.monotonic() - each.began, 1)
        about = {"status": status, "seconds": seconds, "error": error, "started": each.started}
        self.results["parts"][each.part.name] = self._about(each.part.name) | self._found(each.part) | about
        if status not in ("passed", "skipped"):
            lines = [f"== {each.part.name}: {status}", error or "", "", *_last_lines(each, _FAILURE_LINES), ""]
            _add(self._call.output / FAILURES, "\n".join(lines))
        for name in KEPT_FILES:
            for path in sorted((self._work / each.part.name).glob(f"**/{name}")):
                _add(self._call.output / name, path.read_text(errors="replace"))

    def _write(self) -> None:
        """Write the results, with what parts that run have found so far, and their report."""
        for each in self._running:
            seconds = round(time.monotonic() - each.began, 1)
            about = {"status": "running", "seconds": seconds, "started": each.started}
            self.results["parts"][each.part.name] = self._about(each.part.name) | self._found(each.part) | about
        write_json(self._call.output / RESULTS, self.results)
        write_report(self._call.output)
        self._written = time.monotonic()

    def _about(self, name: str) -> dict[str, Any]:
        call = self._call
        tiny = call.tiny or call.device == "cpu"
        return {"card": call.card, "device": call.device, "tiny": tiny}

    def _result(self, part: Part) -> Path:
        return self._work / f"{part.name}.json"

    def _found(self, part: Part) -> dict[str, Any]:
        path = self._result(part)
        return json.loads(path.read_text()) if path.exists() else Record(path).to_json()


def _not_begun(why: str) -> dict[str, Any]:
    return Record(Path()).to_json() | {"status": "not begun", "seconds": 0.0, "error": f"it was not begun: {why}"}


def _last_lines(each: Running, count: int) -> list[str]:
    return Path(each.log.name).read_text(errors="replace").splitlines()[-count:]


def _add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _start_command(
    name: str, setting: Setting, result: Path, log: Path, variables: dict[str, str], limit: float
) -> subprocess.Popen:
    """Start a part as a command, which imports everything itself."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.part", name, "--device", setting.device]
    command += [*["--tiny"] * setting.tiny, "--directory", str(setting.directory), "--result", str(result)]
    command += ["--seconds", f"{limit:.1f}", *(["--bundle", str(setting.bundle)] if setting.bundle else [])]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    with log.open("a") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": path} | variables, start_new_session=True,
        )  # fmt: skip


@contextmanager
def _stopped_by(number: signal.Signals) -> Iterator[None]:
    def stop(*_: object) -> NoReturn:
        raise Stopped

    before = signal.signal(number, stop)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(number, before)
