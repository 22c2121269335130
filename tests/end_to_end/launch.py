"""The command line in processes: the real command, or forks of a process that has already imported torch.

Most runs are forks of `tests.forkserver`. They start after the imports, but have their own exit status and output, and
can be killed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from rl_megatron.config.metrics import is_cost
from tests.forkserver import environment, fork_context
from tests.ports import free_port

TIMEOUT = 600  # seconds; far longer than any run here takes, even on a busy machine

# With one layer and 200 documents, a step takes milliseconds.
TINY = (
    "model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_attention_heads=2",
    "model.num_query_groups=2", "model.max_sequence_length=48", "tokenizer.vocab_size=260", "data.num_documents=200",
    "data.task.name=arithmetic",
    "data.num_demonstrations=64", "data.num_eval_examples=8", "data.sequence_length=16", "train.global_batch_size=8",
    "train.micro_batch_tokens=64", "train.steps=3", "generation.max_new_tokens=4", "output_dir=out",
)  # fmt: skip
TINY_GRPO = ("algorithm=grpo", *TINY, "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4")
# A run of two ranks that tests interrupt; the fixture `whole` has the metrics of the run that nothing disturbs.
INTERRUPTED = ("train", *TINY_GRPO, "train.steps=8", "train.eval_every=0", "parallel.tensor=2")


@dataclass(frozen=True)
class Finished:
    status: int
    out: str
    err: str


class Running(ABC):
    """A running `rl-megatron`, whose processes can be killed together; leaving its context kills them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    @abstractmethod
    def is_running(self) -> bool: ...

    @property
    @abstractmethod
    def pids(self) -> list[int]: ...

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to every process of the run and wait for their end."""

    @abstractmethod
    def finish(self) -> Finished:
        """Wait until the run ends; return its exit status and its output."""

    @abstractmethod
    def _output(self) -> tuple[str, str]:
        """Return what the run has written to its standard output and error so far."""

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Poll `condition()` while the run continues; fail with its output if it ends or takes too long."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert self.is_running, f"the run ended before {what}:\n" + "\n".join(self._output())
            assert time.monotonic() < deadline, f"no {what} after {TIMEOUT} s:\n" + "\n".join(self._output())
            time.sleep(0.002)


class Command(Running):
    """The real command, whose processes import everything themselves."""

    def __init__(self, directory: Path, *arguments: str, ranks: int = 1):
        """Start the command in `directory`, under the launcher if it has several ranks."""
        launcher = ["rl_megatron.cli.launcher", "--nproc-per-node", str(ranks), "--standalone", "-m"]
        self._out, self._err = (directory / "stdout.txt").open("w+"), (directory / "stderr.txt").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", *(launcher if ranks > 1 else ()), "rl_megatron", *arguments],
            cwd=directory,
            env=environment(),
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._out.close()
        self._err.close()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def pids(self) -> list[int]:
        return [self._process.pid]

    def finish(self) -> Finished:
        self._process.wait(TIMEOUT)
        return Finished(self._process.returncode, *self._output())

    def kill(self) -> None:
        if self.is_running:
            _kill_with_descendants(self._process.pid)
        self._process.wait(TIMEOUT)

    def _output(self) -> tuple[str, str]:
        for file in (self._out, self._err):
            file.seek(0)
        return self._out.read(), self._err.read()


def command(directory: Path, *arguments: str, ranks: int = 1) -> Finished:
    """Run the real command until it ends."""
    with Command(directory, *arguments, ranks=ranks) as running:
        return running.finish()


def _kill_with_descendants(pid: int) -> None:
    """Kill a process first, so that it cannot clean up, and then its descendants."""
    for each in [pid, *_descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Return the descendants of `pid`. (Its process group lacks some, since launchers start ranks in own sessions.)"""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread may end meanwhile
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def rl_megatron(arguments: list[str]) -> int:
    """Run the command line in this process and return its exit status."""
    from rl_megatron.cli import main

    return main(arguments)


class Forks:
    """Starts `rl_megatron.cli.main` in forks of a process that has done the imports."""

    def __init__(self) -> None:
        self.context = fork_context()

    def run(self, directory: Path, *arguments: str, **options: Any) -> Finished:
        """Run the command in one process; return its exit status and its output."""
        return self.run_ranks(directory, *arguments, ranks=1, **options)[0]

    def run_ranks(self, directory: Path, *arguments: str, ranks: int, **options: Any) -> list[Finished]:
        """Run the command on several ranks; return the exit status and the output of each rank, in order."""
        with self.start(directory, *arguments, ranks=ranks, **options) as running:
            return running.finish_ranks()

    def start(
        self,
        directory: Path,
        *arguments: str,
        ranks: int = 1,
        largest_file: int | None = None,
        before: Callable[[], object] | None = None,
        program: Callable[[list[str]], int] = rl_megatron,
    ) -> Forked:
        """Start the command on `ranks` ranks.

        Args:
            directory: The working directory; every rank writes its output to files there.
            arguments: The command's arguments.
            ranks: The number of ranks.
            largest_file: The size in bytes at which writing to a file fails, as on a full disk.
            before: A function at module level that every rank calls before the command.
            program: A function at module level that every rank calls with the arguments; it returns the exit status.
        """
        port = free_port()
        processes = [
            self.context.Process(
                target=_main, args=(directory, arguments, rank, ranks, port, largest_file, before, program)
            )
            for rank in range(ranks)
        ]
        return Forked(directory, processes)

    def launch(
        self,
        directory: Path,
        *arguments: str,
        ranks: int,
        restarts: int = 0,
        with_torchrun: bool = False,
        meeting: Sequence[str] = (),
        seconds_to_follow: float = 300.0,
    ) -> Launched:
        """Start the command under a launcher.

        Args:
            directory: The working directory; the launcher and its ranks write their output to files there.
            arguments: The command's arguments.
            ranks: The number of ranks on this node.
            restarts: How often the launcher starts ranks again.
            with_torchrun: Whether the launcher is torchrun instead of that of scripts/train.sh.
            meeting: The launcher's options for meeting those of other nodes; none for one node.
            seconds_to_follow: How long ranks may need to end after the first one has.
        """
        options = ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts), *(meeting or ("--standalone",))]
        program = partial(_launch, [*options, "-m", "rl_megatron"], with_torchrun, seconds_to_follow)
        place = (0, 1, free_port(), None, None)
        return Launched(directory, [self.context.Process(target=_main, args=(directory, arguments, *place, program))])


class Forked(Running):
    """The forked ranks of one run, in order."""

    def __init__(self, directory: Path, processes: Sequence[BaseProcess]) -> None:
        self._directory, self._processes = directory, processes
        for process in processes:
            process.start()

    @property
    def is_running(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(TIMEOUT)

    def finish(self) -> Finished:
        """Wait for every rank; return the result of the lowest rank that failed, or of rank 0."""
        finished = self.finish_ranks()
        return next((rank for rank in finished if rank.status), finished[0])

    def finish_ranks(self) -> list[Finished]:
        """Wait for every rank; return the exit status and the output of each, in order."""
        for process in self._processes:
            process.join(TIMEOUT)
            assert process.exitcode is not None, f"still running after {TIMEOUT} s in {self._directory}"
        outputs = [(self._read("out", rank), self._read("err", rank)) for rank in range(len(self._processes))]
        return [
            Finished(process.exitcode or 0, *output) for process, output in zip(self._processes, outputs, strict=True)
        ]

    def _output(self) -> tuple[str, str]:
        ranks = range(len(self._processes))
        return self._read("out", 0), "".join(self._read("err", rank) for rank in ranks)

    def _read(self, name: str, rank: int) -> str:
        path = self._directory / f"{name}{rank}.txt"
        return path.read_text() if path.exists() else ""


class Launched(Forked):
    """A launcher and the ranks that it has forked."""

    def signal(self, number: int) -> None:
        """Send a signal to the launcher."""
        os.kill(self.pids[0], number)

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank that has started, by rank."""
        return {int(file.stem): int(file.read_text()) for file in self._directory.glob("*.rank")}

    def kill(self) -> None:
        if self.is_running:
            _kill_with_descendants(self.pids[0])
        super().kill()


def _launch(options: list[str], with_torchrun: bool, seconds_to_follow: float, arguments: list[str]) -> int:
    """Start ranks as forks of this process, which stands for that of a launcher; return its exit status."""
    from torch.distributed.run import main as torchrun

    from benchmarks.faults.launch import launch
    from rl_megatron.cli import launcher

    launcher.SECONDS_TO_FOLLOW = seconds_to_follow
    return launch(torchrun if with_torchrun else launcher.main, [*options, *arguments], _begin_rank) or 0


def _begin_rank() -> None:
    """Write down this rank's process, and import from the working directory, as `python -m` does."""
    sys.path.insert(0, os.getcwd())
    partial_file = Path(f"{os.environ['RANK']}.partial")
    partial_file.write_text(str(os.getpid()))
    partial_file.replace(f"{os.environ['RANK']}.rank")


def _main(
    directory: Path,
    arguments: tuple[str, ...],
    rank: int,
    ranks: int,
    port: int,
    largest_file: int | None,
    before: Callable[[], object] | None,
    program: Callable[[list[str]], int],
) -> None:
    os.chdir(directory)
    if largest_file is not None:  # Python ignores the limit's signal, so that writing fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()})
    if before is not None:
        before()
    sys.exit(program(list(arguments)))


def metrics(directory: Path, timed: bool = False) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl.

    Args:
        directory: The run's output directory.
        timed: Whether to keep the metrics that differ between equal runs: costs, and those of weight syncs and logprob
            checks, because a resumed run starts a new engine.
    """
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    objects = [json.loads(line) for line in lines if line.endswith("\n")]
    if timed:
        return objects
    excluded = ("refit_", "gate_")
    return [
        {key: value for key, value in line.items() if not (is_cost(key) or key.startswith(excluded))}
        for line in objects
    ]


def checkpoints(output_dir: Path, stage: str) -> list[str]:
    """Return the sorted names of the files and directories in a stage's checkpoint directory."""
    directory = output_dir / "checkpoints" / stage
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def train_and_export(forks: Forks, directory: Path, *overrides: str) -> Path:
    """Train a tiny model by SFT in `directory`/out, and write it for Hugging Face in `directory`/exported."""
    trained = forks.run(directory, "train", *TINY, "algorithm=sft", *overrides)
    assert trained.status == 0, trained.err
    exported = forks.run(
        directory, "convert", "export", str(trained_checkpoint(directory)), str(directory / "exported")
    )
    assert exported.status == 0, exported.err
    return directory


def trained_checkpoint(directory: Path) -> Path:
    """Return the last checkpoint of `train_and_export`."""
    return directory / "out" / "checkpoints" / "sft" / "step-000003"
