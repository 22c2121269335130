"""The command line as processes: the real command, torchrun, or forks of a process that has imported torch already.

Importing torch and megatron-core takes seconds and is the same in every run, so most runs here are forks: processes of
their own, with their own exit status, output and death, that begin with the imports behind them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT = 600  # seconds; far more than any run here takes, on a machine that does much else

# One layer, 200 rows: a step takes milliseconds.
TINY = (
    "model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_attention_heads=2",
    "model.num_query_groups=2", "model.max_sequence_length=48", "tokenizer.vocab_size=260", "data.num_documents=200",
    "data.num_demonstrations=64", "data.num_eval_rows=8", "data.sequence_length=16", "train.global_batch_size=8",
    "train.micro_batch_size=4", "train.steps=3", "generation.max_new_tokens=4", "output_dir=out",
)  # fmt: skip


@dataclass(frozen=True)
class Finished:
    status: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """This process's, without ranks, with the repository importable from anywhere."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


class Command:
    """A running `rl-megatron`, alone or on several ranks under torchrun, whose processes can be killed together."""

    def __init__(self, directory: Path, *arguments: str, ranks: int = 1):
        launcher = [] if ranks == 1 else ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        self._out, self._err = (directory / "stdout.txt").open("w+"), (directory / "stderr.txt").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", *launcher, "rl_megatron", *arguments],
            cwd=directory,
            env=environment(),
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._out.close()
        self._err.close()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def finish(self) -> Finished:
        self._process.wait(TIMEOUT)
        return Finished(self._process.returncode, *self._output())

    def wait_until(self, condition, what: str) -> None:
        """Polls `condition()` while the command runs; fails, showing its output, where it ends or takes too long."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert self.is_running, f"the run ended before {what}:\n" + "\n".join(self._output())
            assert time.monotonic() < deadline, f"no {what} after {TIMEOUT} s:\n" + "\n".join(self._output())
            time.sleep(0.002)

    def kill(self) -> None:
        """SIGKILL to every process of the command, the launcher first so that it cannot tidy up."""
        for pid in [self._process.pid, *_descendants(self._process.pid)] if self.is_running else []:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._process.wait(TIMEOUT)

    def _output(self) -> tuple[str, str]:
        for file in (self._out, self._err):
            file.seek(0)
        return self._out.read(), self._err.read()


def command(directory: Path, *arguments: str, ranks: int = 1) -> Finished:
    """The real command from start to end."""
    with Command(directory, *arguments, ranks=ranks) as running:
        return running.finish()


def _descendants(pid: int) -> list[int]:
    """torchrun starts its ranks in sessions of their own, so a process group does not hold them all."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # threads come and go while one looks
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


class Forks:
    """`run(directory, *arguments, ranks=…)`: `rl_megatron.cli.main` in forks of one process with the imports done."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["rl_megatron.algorithms.run", "torch.utils.tensorboard", "matplotlib.pyplot"]
        )
        before = dict(os.environ)
        os.environ.update(environment())
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def run(self, directory: Path, *arguments: str) -> Finished:
        return self.run_ranks(directory, *arguments, ranks=1)[0]

    def run_ranks(self, directory: Path, *arguments: str, ranks: int, **limits: int) -> list[Finished]:
        """Every rank's end, in order."""
        with self.start(directory, *arguments, ranks=ranks, **limits) as running:
            return running.finish()

    def start(self, directory: Path, *arguments: str, ranks: int, largest_file: int | None = None) -> Forked:
        """`largest_file`: bytes at which a file cannot grow any more, as on a full disk."""
        port = _free_port()
        processes = [
            self._context.Process(target=_main, args=(directory, arguments, rank, ranks, port, largest_file))
            for rank in range(ranks)
        ]
        return Forked(directory, processes)


class Forked:
    """Running ranks that can be killed together."""

    def __init__(self, directory: Path, processes: list[multiprocessing.Process]) -> None:
        self._directory, self._processes = directory, processes
        for process in processes:
            process.start()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def is_running(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(TIMEOUT)

    def finish(self) -> list[Finished]:
        for process in self._processes:
            process.join(TIMEOUT)
            assert process.exitcode is not None, f"still running after {TIMEOUT} s in {self._directory}"
        outputs = [
            [(self._directory / f"{name}{rank}.txt").read_text() for name in ("out", "err")]
            for rank in range(len(self._processes))
        ]
        return [Finished(process.exitcode, *output) for process, output in zip(self._processes, outputs, strict=True)]


def _main(
    directory: Path, arguments: tuple[str, ...], rank: int, ranks: int, port: int, largest_file: int | None
) -> None:
    os.chdir(directory)
    if largest_file is not None:  # Python ignores the signal, so that writing fails as it does on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()})
    from rl_megatron.cli import main

    sys.exit(main(list(arguments)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def metrics(directory: Path, timed: bool = False) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl; without `timed`, without what a clock measured, or what belongs to the start
    of an engine: a run that goes on starts one anew."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    objects = [json.loads(line) for line in lines if line.endswith("\n")]
    apart = ("seconds", "refit_", "gate_")
    return [{key: value for key, value in line.items() if timed or not key.startswith(apart)} for line in objects]


def checkpoints(output_dir: Path, stage: str) -> list[str]:
    """Names of what lies in a stage's checkpoint directory."""
    directory = output_dir / "checkpoints" / stage
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
