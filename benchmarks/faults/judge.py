"""Run one fault to its end: the run that it hits, what the message tells the user to do, and the same command again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults import in_rank
from benchmarks.faults.cases import RUNS, Fault, Run
from benchmarks.faults.full_disk import free_disk, mount_disk, unmount_disk
from benchmarks.faults.launch import OUTPUT, Fork, start
from rl_megatron.checkpoint.directory import LEFTOVERS, check_digests, find_checkpoints, read_manifest
from rl_megatron.config.errors import STOPPED, ConfigError
from rl_megatron.config.metrics import METRICS_FILE, is_cost
from rl_megatron.rollouts.record import RolloutLog

RECOVERED = "recovered by itself"
CONTINUED = "saved, ended and continued"
NAMED = "named failure, then continued"
GOOD = (RECOVERED, CONTINUED, NAMED)
RESTARTS = 2
_LIMIT_SECONDS = 480.0  # of one start; the longest wait in a run is SECONDS, and is met a few times
_LEAVING_SECONDS = 40.0  # in which processes of a dead run must be gone
_OF_AN_ENGINE = ("refit_", "gate_")  # metrics that an engine has when it is started again
_REWARD = """
def even(completion_ids, **_):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
"""  # an untrained model gets different rewards
_GAME = """
import time

from rl_megatron import EnvironmentStep


class Game:
    def reset(self, record):
        self.turns = 0

    def step(self, answer):
        time.sleep(0.01)
        self.turns += 1
        return EnvironmentStep(" go on: ", reward=0.1, done=self.turns == 2)
"""
_PAIRS = "".join(
    json.dumps({"question": f"Is {n} a number?", "chosen": f"yes, {n}.", "rejected": f"no, {n}."}) + "\n"
    for n in range(10, 110)
)


class Wrong(Exception):
    """Something that must never happen did; the message says what."""


def undisturbed(name: str, kept: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run that no fault hits. It is run once, and they are kept in the file `kept`.

    Raises:
        Wrong: The run failed without any fault.
    """
    if not kept.is_file():
        directory = kept.with_suffix(f".{os.getpid()}")  # another process may run another shard
        prepare(directory)
        status = _wait(start(directory, RUNS[name].arguments, 0, lambda: None), directory, lambda: None)
        if status != 0:
            raise Wrong(f"the run without faults ended with status {status}: {_output(directory)[-2000:]}")
        of_all = [
            {key: value for key, value in line.items() if not key.startswith(_OF_AN_ENGINE)}
            for line in _metrics(directory)
        ]
        (directory / "metrics.json").write_text(json.dumps(of_all))
        (directory / "metrics.json").replace(kept)
        shutil.rmtree(directory)
    return json.loads(kept.read_text())


def prepare(directory: Path) -> None:
    """Make the directory of a run, with its data and its reward function."""
    directory.mkdir(parents=True)
    (directory / "even.py").write_text(_REWARD)
    (directory / "game.py").write_text(_GAME)
    (directory / "pairs.jsonl").write_text(_PAIRS)


def outcome_of(fault: Fault, directory: Path, wanted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Run a fault in a new directory, and return what came of it: `outcome`, `seconds` and `said`.

    `outcome` is one of `GOOD`, or says what is wrong.
    """
    began = time.monotonic()
    shutil.rmtree(directory, ignore_errors=True)
    prepare(directory)
    try:
        if fault.target == "disk":
            mount_disk(directory)
        outcome = _run(fault, directory)
        if RUNS[fault.run].is_asynchronous:
            _check_log(directory, RUNS[fault.run])
        else:
            _check_metrics(_metrics(directory), wanted, RUNS[fault.run])
        _check_checkpoints(directory)
        _check_leftovers(directory)
    except Wrong as wrong:
        outcome = str(wrong)
    finally:
        _kill_what_is_left(directory)
        unmount_disk(directory)
    return {"outcome": outcome, "seconds": round(time.monotonic() - began, 1), "said": _output(directory)[-6000:]}


def _check_metrics(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], run: Run) -> None:
    """Check the metrics of a run: all of them if they must be equal, and otherwise what does not depend on tokens.

    Raises:
        Wrong: They differ.
    """
    if run.is_exact:
        kept = [{key: value for key, value in line.items() if not key.startswith(_OF_AN_ENGINE)} for line in found]
        if kept != list(wanted):
            raise Wrong("the metrics are not those of the undisturbed run")
        return
    steps = [[(line["kind"], line["step"], line.get("lr")) for line in lines] for lines in (found, wanted)]
    if steps[0] != steps[1]:
        raise Wrong("the steps and learning rates are not those of the undisturbed run")
    # An evaluation has the check of the weights that the next step samples with.
    checked = {line["step"] + (line["kind"] == "eval") for line in found if "gate_max" in line}
    unchecked = [line["step"] for line in found if line["kind"] == "train" and line["step"] not in checked]
    if unchecked:
        raise Wrong(f"the logprob check did not run in step {unchecked[0]}")


def _check_log(directory: Path, run: Run) -> None:
    """Check the log of an asynchronous run, and that a replay of it has the same metrics.

    Raises:
        Wrong: A group is missing or was used twice, one is too old, or the metrics differ.
    """
    steps = RolloutLog(directory / "out" / "rollouts" / "grpo").read()
    used = [group for step in sorted(steps) for group in steps[step].used]
    if [group.number for group in used] != list(range(len(used))) or sorted(steps) != list(range(1, len(steps) + 1)):
        raise Wrong("the log does not have every group once, in order")
    if max(age for group in used for age in group.ages) > 2:
        raise Wrong("a group of the log is too old")
    (directory / "out").rename(directory / "first")
    replay = f"rollout.replay={directory / 'first' / 'rollouts' / 'grpo'}"
    status = _wait(start(directory, (*run.arguments, replay), 0, lambda: None), directory, lambda: None)
    found, wanted = ([line for line in lines if line["kind"] == "train"] for lines in (
        _metrics(directory), _metrics(directory, "first")
    ))  # fmt: skip
    kept = [
        [{key: value for key, value in line.items() if not key.startswith(_OF_AN_ENGINE)} for line in lines]
        for lines in (found, wanted)
    ]
    if status != 0 or kept[0] != kept[1]:
        raise Wrong(f"a replay of the log ended with status {status}, and its metrics are not those of the run")
    shutil.rmtree(directory / "out")
    (directory / "first").rename(directory / "out")


def _run(fault: Fault, directory: Path) -> str:
    arguments = RUNS[fault.run].arguments
    seen: set[Path] = set()

    def look() -> None:
        """Check that no complete checkpoint has gone."""
        found = set(_checkpoints(directory))
        if lost := seen - found:
            raise Wrong(f"a complete checkpoint was lost: {sorted(lost)[0]}")
        seen.update(found)

    struck = start(directory, fault.arguments, RESTARTS, partial(in_rank.arm, fault, directory), fault.seconds)
    status = _wait(struck, directory, look)
    if not (directory / in_rank.STRUCK).exists():
        raise Wrong(f"the fault did not come, and the run ended with status {status}")
    if fault.target == "file" and status != STOPPED:
        raise Wrong(f"the run ended with status {status} instead of {STOPPED} after SIGTERM")
    if fault.target == "disk":
        free_disk(directory)
        if "Traceback (most recent call last)" in _output(directory):
            raise Wrong(f"status {status} with a traceback")
    if status == 0:
        return RECOVERED
    outcome = CONTINUED if status == STOPPED else NAMED
    if fault.target != "launcher" or fault.action != "SIGKILL":  # nobody is left then to say anything
        _check_message(directory, status)
    if fault.target == "file":
        damaged, intact = _damage(fault, directory)
        status = _wait(start(directory, arguments, 0, lambda: None), directory, lambda: None)
        if status == 0 and damaged.name == METRICS_FILE:
            _check_warning(damaged, directory, intact)
        if status == 0:
            return RECOVERED
        outcome = NAMED
        _check_message(directory, status)
        if status != 2 or damaged.name not in _output(directory).splitlines()[-1]:
            raise Wrong(f"{damaged.relative_to(directory)} is damaged, and status {status} does not name it")
        if "checkpoints" in damaged.parts:
            shutil.rmtree(damaged.parent)  # as the message says
        else:
            damaged.write_bytes(intact)
        look = lambda: None  # noqa: E731  # this checkpoint was removed on purpose
    status = _wait(start(directory, arguments, 0, lambda: None), directory, look)
    if status != 0:
        raise Wrong(f"the same command does not continue the run: it ended with status {status}")
    return outcome


def _wait(run: Fork, directory: Path, look: Callable[[], object]) -> int:
    """Return the exit status of a run, calling `look` meanwhile.

    Raises:
        Wrong: It takes too long, or it leaves processes.
    """
    deadline = time.monotonic() + _LIMIT_SECONDS
    while run.poll() is None:
        look()
        if time.monotonic() > deadline:
            raise Wrong(f"the run did not end in {_LIMIT_SECONDS:.0f} s")
        time.sleep(0.02)
    look()
    deadline = time.monotonic() + _LEAVING_SECONDS
    while left := _processes(directory):
        if time.monotonic() > deadline:
            raise Wrong(f"{len(left)} process(es) of the run were still there: {' '.join(left[0].cmdline())[-200:]}")
        time.sleep(0.05)
    return run.returncode or 0


def _damage(fault: Fault, directory: Path) -> tuple[Path, bytes]:
    """Truncate a file of the output directory, or flip a bit of it. Return the file and what it held."""
    out = directory / "out"
    newest = _newest_policy_checkpoint(directory)
    files = sorted(path for path in newest.iterdir() if path.is_file() and path.stat().st_size)
    files += [out / "metrics.jsonl", out / "config.yaml", *sorted((out / "tokenizer").glob("*.json"))]
    file = files[int(fault.chance * len(files))]
    intact = file.read_bytes()
    place = int(fault.chance * 7919 * len(intact)) % len(intact)
    if fault.action == "truncated":
        file.write_bytes(intact[:place])
    else:
        flipped = bytearray(intact)
        flipped[place] ^= 1 << int(fault.chance * 104729) % 8
        file.write_bytes(flipped)
    return file, intact


def _check_warning(damaged: Path, directory: Path, intact: bytes) -> None:
    """Check that a warning names the damaged file of metrics, and put back the lines that it had before."""
    if f"{METRICS_FILE} is not as it was" not in _output(directory):
        raise Wrong(f"{METRICS_FILE} was damaged, and no warning names it")
    recorded = [json.loads(line) for line in intact.decode().splitlines()]
    lines = [json.loads(line) for line in damaged.read_text().splitlines()]
    last = max(line["step"] for line in recorded)
    added = [line for line in lines if line["step"] > last]
    damaged.write_text("".join(json.dumps(line) + "\n" for line in recorded + added))


def _newest_policy_checkpoint(directory: Path) -> Path:
    saved = _checkpoints(directory)
    if not saved:
        raise Wrong("the run was asked to end, and saved no checkpoint")
    return saved[-1]


def _check_message(directory: Path, status: int) -> None:
    """Check that the run's last line says why it ended."""
    lines = _output(directory).splitlines() or [""]
    if not (lines[-1].startswith("error: ") or lines[-1].endswith(f"(exit status {STOPPED})")):
        raise Wrong(f"status {status}, and the last line says no reason: {lines[-1][:300]}")
    if "Traceback (most recent call last)" in _output(directory):
        raise Wrong(f"status {status} with a traceback")


def _checkpoints(directory: Path, critics: bool = False) -> list[Path]:
    """Return all complete checkpoints of a run; a critic's without that of its policy is not a whole checkpoint."""
    stages = [*(directory / "out" / "checkpoints").glob("*/")]
    return [path for stage in stages if critics or stage.suffix != ".critic" for path in find_checkpoints(stage)]


def _check_checkpoints(directory: Path) -> None:
    """Read all checkpoints of a finished run.

    Raises:
        Wrong: One of them is damaged.
    """
    for path in _checkpoints(directory, critics=True):
        try:
            check_digests(path, read_manifest(path), 0, 1)
        except ConfigError as error:
            raise Wrong(f"a damaged checkpoint was left: {error}") from error


def _check_leftovers(directory: Path) -> None:
    """Check that a finished run has left nothing that it was writing.

    Raises:
        Wrong: There is something.
    """
    left = [path for path in (directory / "out").rglob("*") if path.suffix in LEFTOVERS]
    if left:
        raise Wrong(f"{left[0].relative_to(directory)} was left")


def _metrics(directory: Path, output: str = "out") -> list[dict[str, Any]]:
    path = directory / output / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [{key: value for key, value in line.items() if not is_cost(key)} for line in lines]


def _output(directory: Path) -> str:
    path = directory / OUTPUT
    return path.read_text(errors="replace") if path.is_file() else ""


def _processes(directory: Path) -> list[psutil.Process]:
    """Return the processes whose working directory is that of the run."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, psutil.Error):  # it may end meanwhile
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(directory):
                process = psutil.Process(int(entry.name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def _kill_what_is_left(directory: Path) -> None:
    for process in _processes(directory):
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
