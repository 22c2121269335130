"""Run random reward functions that misbehave on two ranks, and check that every case ends as configured:

    python -m benchmarks.reward_failures --state outputs/reward_failures.jsonl
    python -m benchmarks.reward_failures --cases 20 --seed 7

A case has one to three functions of random forms (ours, sync and async; TRL's lists, sync and async; verl's), random
samples, and random settings. A function sleeps, raises, returns None, NaN or text, exits, forks, eats memory, closes
the files of its process, or leaves a child behind. What must come out follows from the case: the rewards and the counts
of failures, or the failure that ends the run, the same on both ranks and within the time that the limits allow.

The seed is printed. With `--state`, each finished case is a line of that file, and a later run of the same seed does
only the cases that are missing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import misbehaving_rewards
from benchmarks.misbehaving_rewards import FORMS
from rl_megatron.config.rewards import RewardConfig, RewardFunctionConfig
from rl_megatron.data.tasks import Problem
from rl_megatron.rewards.scorer import RewardFailed, Scorer
from rl_megatron.topology.ranks import Ranks

RANKS = 2
SECONDS_ALLOWED = 25.0  # beside the limits of the calls: workers start anew, and other programs use the machine
HARMLESS = ("well", "fork", "print")
LATE = ("sleep",)
WRONG = ("raise", "none", "nan", "text", "exit", "leave", "eat", "close", "orphan")


@dataclass(frozen=True)
class Case:
    """One random case.

    Attributes:
        number: Its number.
        forms: The form of each function.
        words: For each function, what it does for each sample.
        on_error: The setting.
        on_timeout: The setting.
        timeout_seconds: The setting.
        num_workers: The setting.
        num_nodes: 1 if the ranks are on one node, 2 if each of them is the first of its node.
    """

    number: int
    forms: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]
    on_error: str
    on_timeout: str
    timeout_seconds: float
    num_workers: int
    num_nodes: int


@dataclass(frozen=True)
class Expected:
    """What has to come out of a case.

    Attributes:
        failing: Whether the failures of this kind may end the run: (function, sample) → "error" or "timeout".
        rewards: The rewards, if no failure ends the run.
    """

    failing: dict[tuple[int, int], str]
    rewards: list[float] | None


def random_case(seed: int, number: int) -> Case:
    """Return the case of a seed and a number."""
    draw = random.Random(f"{seed}/{number}")
    forms = tuple(draw.choices(FORMS, k=draw.randint(1, 3)))
    num_samples = draw.randint(1, 8)
    words = []
    for form in forms:
        line = [draw.choice(HARMLESS) if draw.random() < 0.2 else "well" for _ in range(num_samples)]
        bad = 1 if form.startswith("list") else draw.randint(0, 3)  # in a list, the first one hides the others
        for place in draw.sample(range(num_samples), min(bad, num_samples)):
            line[place] = draw.choice(LATE * 3 + WRONG)
        words.append(tuple(line))
    policies = ("zero", "zero", "error")
    return Case(
        number, forms, tuple(words), draw.choice(policies), draw.choice(policies), draw.choice((1.0, 1.5)),
        draw.randint(1, 2), draw.randint(1, 2),
    )  # fmt: skip


def expected(case: Case) -> Expected:
    """Return what has to come out of a case."""
    functions, num_samples = range(len(case.forms)), len(case.words[0])
    failing: dict[tuple[int, int], str] = {}
    skipped: set[tuple[int, int]] = set()
    for function in functions:
        for sample, word in enumerate(case.words[function]):
            kind = "timeout" if word in LATE else "error" if word in WRONG else None
            if kind is None:
                continue
            is_list = case.forms[function].startswith("list")
            if is_list and word == "none":
                skipped.add((function, sample))
            else:
                for each in range(num_samples) if is_list else (sample,):
                    failing[function, each] = kind
    for sample in range(num_samples):
        if all((function, sample) in skipped for function in functions):
            failing |= {(function, sample): "error" for function in functions}
    policy = {"error": case.on_error, "timeout": case.on_timeout}
    if any(policy[kind] == "error" for kind in failing.values()):
        return Expected(failing, None)
    without = failing.keys() | skipped
    return Expected(failing, [float(sum((f, s) not in without for f in functions)) for s in range(num_samples)])


def run_case(case: Case, file: str) -> dict[str, Any]:
    """Score the samples of a case on one of the ranks; return what came out."""
    if case.num_nodes == RANKS:
        os.environ["LOCAL_RANK"] = "0"
    else:
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
    functions = tuple(
        RewardFunctionConfig(path=file, name=f"{form}_{index}", label=f"f{index}")
        for index, form in enumerate(case.forms)
    )
    scorer = Scorer(
        RewardConfig(
            functions=functions, on_error=case.on_error, on_timeout=case.on_timeout,  # pyright: ignore[reportArgumentType]
            timeout_seconds=case.timeout_seconds, num_workers=case.num_workers, memory_limit_mb=2048.0,
        ),
        lambda: None,  # pyright: ignore[reportArgumentType]  # no task: there are functions
        Ranks.detect(),
    )  # fmt: skip
    completions = [
        " ".join([f"sample={sample}", *(f"f{function}={line[sample]}" for function, line in enumerate(case.words))])
        for sample in range(len(case.words[0]))
    ]
    problems = [Problem(f"prompt {index}", "1") for index in range(len(completions))]
    began = time.monotonic()
    try:
        rewards, metrics = scorer.score(problems, completions, [[1]] * len(completions), [False] * len(completions))
        outcome: dict[str, Any] = {"rewards": rewards.tolist(), "metrics": metrics.values()}
    except RewardFailed as error:
        outcome = {"failed": str(error)}
    finally:
        scorer.close()
    return outcome | {"seconds": time.monotonic() - began}


def wrong(case: Case, outcomes: list[dict[str, Any]]) -> str | None:
    """Return what is wrong with what came out of a case on the ranks, or None."""
    wanted, first = expected(case), outcomes[0]
    allowed = SECONDS_ALLOWED + (len(wanted.failing) + 1) * (case.timeout_seconds + 1.0)
    if max(outcome["seconds"] for outcome in outcomes) > allowed:
        return f"it took longer than {allowed:.0f} seconds"
    if any(outcome.get("failed") != first.get("failed") or outcome.get("rewards") for outcome in outcomes[1:]):
        return "the ranks differ"
    if wanted.rewards is None:
        return _wrong_failure(case, wanted, first)
    if first.get("rewards") != wanted.rewards:
        return f"wanted the rewards {wanted.rewards}"
    for function in range(len(case.forms)):
        for kind, policy in (("error", case.on_error), ("timeout", case.on_timeout)):
            found = first["metrics"].get(f"reward_f{function}_{kind}s", 0.0)
            number = sum(each == kind for (f, _), each in wanted.failing.items() if f == function)
            if found != (number if policy == "zero" else 0):
                return f"wanted {number} {kind}s of f{function}, and counted {found}"
    return None


def _wrong_failure(case: Case, wanted: Expected, outcome: dict[str, Any]) -> str | None:
    """Return what is wrong with a failure that ended the run, or None: it names one of the failures that may."""
    said = outcome.get("failed")
    if said is None:
        return "no failure ended the run"
    policy = {"error": case.on_error, "timeout": case.on_timeout}
    for (function, sample), kind in wanted.failing.items():
        named = f"'f{function}'" in said and f"'prompt {sample}'" in said and f"sample={sample} " in said
        if policy[kind] == "error" and named and f"reward.on_{kind}=zero" in said:
            return None
    return "the message names another function, prompt or completion"


def _rank(rank: int, store: str, cases: list[Case], file: str, answers: Any) -> None:
    shared = dist.FileStore(store, RANKS)  # pyright: ignore[reportPrivateImportUsage]  # documented, not re-exported
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))
    for case in cases:
        outcomes: list[Any] = [None] * RANKS
        dist.all_gather_object(outcomes, run_case(case, file))
        if rank == 0:
            answers.put((case, outcomes))
    dist.destroy_process_group()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--state", type=Path, help="a file of finished cases, with which a later run goes on")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, print those that end otherwise than expected, and return 1 if there are any."""
    options = parser().parse_args(arguments)
    print(f"seed {options.seed}, {options.cases} cases on {RANKS} ranks", flush=True)
    finished: dict[int, dict[str, Any]] = {}
    if options.state is not None and options.state.exists():
        lines = [json.loads(line) for line in options.state.read_text().splitlines()]
        finished = {line["number"]: line for line in lines if line["seed"] == options.seed}
    cases = [random_case(options.seed, n) for n in range(options.cases) if n not in finished]
    bad = sum(finished[n]["wrong"] is not None for n in finished if n < options.cases)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        file, answers = misbehaving_rewards.__file__, context.Queue()
        ranks = [
            context.Process(target=_rank, args=(rank, f"{directory}/store", cases, file, answers), daemon=True)
            for rank in range(RANKS if cases else 0)
        ]
        for process in ranks:
            process.start()
        for _ in cases:
            case, outcomes = answers.get(timeout=600)
            said = wrong(case, outcomes)
            bad += said is not None
            if said is not None:
                print(f"case {case.number}: {said}\n  {case}\n  {outcomes}", flush=True)
            if options.state is not None:
                options.state.parent.mkdir(parents=True, exist_ok=True)
                line = {"seed": options.seed, "wrong": said, **asdict(case)}
                with open(options.state, "a") as state:
                    state.write(json.dumps(line) + "\n")
        for process in ranks:
            process.join()
    print(f"{options.cases - bad} of {options.cases} cases ended as configured")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
