"""Start parts one after the other, end those that take too long, and keep all results in one file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import PARTS, Part
from benchmarks.gpu_check.record import Record, write_json

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = "results.json"
TOTAL_SECONDS = 1500  # no part begins later, and the last one is ended then
_LEAST_SECONDS = 10  # with less time left, a part is not begun
_ERROR_LINES = 12
_SECONDS_TO_END = 5.0


def run_parts(
    names: Sequence[str], device: str, tiny: bool, output: Path, total_seconds: float = TOTAL_SECONDS
) -> bool:
    """Run parts, add each result to the results file of `output` as it ends, and return whether all passed.

    Args:
        names: The parts.
        device: "cuda" or "cpu".
        tiny: Whether shapes are tiny.
        output: The directory of results and logs.
        total_seconds: When the last part is ended.
    """
    output.mkdir(parents=True, exist_ok=True)
    ends, passed = time.monotonic() + total_seconds, True
    for name in names:
        left = ends - time.monotonic()
        print(f"\n== {name}: {PARTS[name].meaning}", flush=True)
        result = _not_begun(left) if left < _LEAST_SECONDS else _run(PARTS[name], device, tiny, output, left)
        results = read_results(output)
        results["parts"][name] = result
        write_json(output / RESULTS, results)
        passed = passed and result["status"] in ("passed", "skipped")
        print(f"== {name}: {result['status']} after {result['seconds']:.0f} s", flush=True)
    return passed


def read_results(output: Path) -> dict[str, Any]:
    """Return what the results file has, also of earlier calls. Parts are in their order."""
    path = output / RESULTS
    results = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    results["parts"] = {name: results["parts"][name] for name in PARTS if name in results["parts"]}
    return results


def _not_begun(left: float) -> dict[str, Any]:
    error = f"it was not begun: {max(left, 0):.0f} s of the time of all parts were left; run it alone"
    return Record(Path()).to_json() | {"status": "not begun", "seconds": 0.0, "error": error}


def _run(part: Part, device: str, tiny: bool, output: Path, left: float) -> dict[str, Any]:
    result, log = output / f"{part.name}.json", output / f"{part.name}.log"
    result.unlink(missing_ok=True)
    command = command_of(part.name, device, tiny, output / part.name, result)
    began, limit = time.monotonic(), min(part.seconds, left)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with log.open("w") as file:
        status = _finish(command, file, limit)
    seconds = time.monotonic() - began
    text = log.read_text(errors="replace")
    print(text, end="", flush=True)
    found = json.loads(result.read_text()) if result.exists() else Record(result).to_json()
    error, word = None, "passed"
    if status is None:
        word, error = "timed out", f"it was ended after {limit:.0f} s"
    elif status != 0:
        word = "failed"
        if all(check["holds"] for check in found["checks"]):
            error = "\n".join(text.splitlines()[-_ERROR_LINES:]) or f"it ended with status {status}"
    elif found["skipped"]:
        word = "skipped"
    about = {"status": word, "seconds": round(seconds, 1), "error": error, "started": started}
    return found | about | {"device": device, "tiny": tiny or device == "cpu"}


def command_of(name: str, device: str, tiny: bool, directory: Path, result: Path) -> list[str]:
    """Return the command that runs one part."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.part", name, "--device", device]
    return [*command, *["--tiny"] * tiny, "--directory", str(directory), "--result", str(result)]


def _finish(command: list[str], log: Any, limit: float) -> int | None:
    """Return the exit status, or None if the process was ended at the limit. Its children are ended with it."""
    path = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """End a process and its children. torchrun ends its own ranks if it is asked to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
