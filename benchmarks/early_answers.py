"""Measure how soon the command line answers mistakes in paths and files:

    python benchmarks/early_answers.py
    python benchmarks/early_answers.py --repetitions 7 --cases "data.path is missing"

Each case is the real command in a new process, in a directory of its own. Its time includes the start of Python and all
imports. A case is answered if the status is 2 and the line has the expected words. The goal is a median of at most 3 s.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

BOUND_SECONDS = 3.0
_GRPO = ("train", "algorithm=grpo", "data=arithmetic")
_GOOD = '{"question": "1+1=", "answer": "2"}\n'

# {name: (arguments, words of the answer)}
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "data.path is missing": (("train", "algorithm=sft", "data.path=absent"), "there is nothing at"),
    "a line is not JSON": (("train", "algorithm=sft", "data.path=bad.jsonl"), "bad.jsonl:2 is not JSON"),
    "a key of the loss is mistyped": ((*_GRPO, "loss.ratio_clip_maxx=0.5"), "did you mean 'loss.ratio_clip_max'"),
    "the reward's file is missing": ((*_GRPO, "reward.functions=[{path: absent.py, name: f}]"), "there is no file"),
    "tokenizer.path is missing": (("train", "data=arithmetic", "tokenizer.path=absent"), "there is no tokenizer at"),
    "init_from is missing": (("train", "data=arithmetic", "init_from=absent"), "checkpoint absent does not exist"),
    "convert import of nothing": (("convert", "import", "absent", "new"), "absent/config.json is missing"),
}


class Answer(NamedTuple):
    """What one command answered.

    Attributes:
        seconds: How long the process ran.
        status: Its exit status.
        line: Its last line on stderr.
    """

    seconds: float
    status: int
    line: str


def measure(name: str, directory: Path, repetitions: int) -> list[Answer]:
    """Run the command of a case several times in `directory`, in which `bad.jsonl` is written."""
    (directory / "bad.jsonl").write_text(f"{_GOOD}{{oops\n")
    repository = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (repository, os.environ.get("PYTHONPATH"))))}
    answers = []
    for _ in range(repetitions):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "rl_megatron", *CASES[name][0]],
            cwd=directory, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        lines = done.stderr.strip().splitlines()
        answers.append(Answer(time.perf_counter() - began, done.returncode, lines[-1] if lines else ""))
    return answers


def wrong(name: str, answers: list[Answer]) -> str | None:
    """Return what is wrong with the answers of a case, or None."""
    for answer in answers:
        if answer.status != 2:
            return f"status {answer.status}, expected 2: {answer.line}"
        if not re.search(re.escape(CASES[name][1]), answer.line):
            return f"the line does not have {CASES[name][1]!r}: {answer.line}"
    if statistics.median(answer.seconds for answer in answers) > BOUND_SECONDS:
        return f"slower than {BOUND_SECONDS:g} s"
    return None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--repetitions", type=int, default=5, help="commands for each case, after one that is not timed"
    )
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Print the seconds of each case beside the bound. The exit status is 1 if a case is wrong or too slow."""
    options = parser().parse_args(arguments)
    print(f"{'median s':>8} {'longest s':>9} {'bound s':>7} status  mistake")
    failed = False
    for name in options.cases:
        with tempfile.TemporaryDirectory() as directory:
            _, *answers = measure(name, Path(directory), options.repetitions + 1)
        seconds = [answer.seconds for answer in answers]
        problem = wrong(name, answers)
        failed |= problem is not None
        print(
            f"{statistics.median(seconds):8.2f} {max(seconds):9.2f} {BOUND_SECONDS:7.2f} "
            f"{answers[-1].status:6d}  {name}{'' if problem is None else f': {problem}'}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
