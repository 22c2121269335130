"""The runs of the campaign and its random faults, all of which follow from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

RANKS = 4
SECONDS = 60.0  # of the time limits of collectives and engines, which a busy machine does not reach
_BRIEF_SECONDS = 15.0  # the same where the fault is found by such a limit
TINY = (
    "train", "model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_attention_heads=2",
    "model.num_query_groups=2", "model.max_sequence_length=48", "tokenizer.vocab_size=260", "data.num_documents=200",
    "data.task.name=arithmetic", "data.num_demonstrations=64", "data.num_eval_examples=2", "data.sequence_length=16",
    "train.global_batch_size=16", "train.micro_batch_tokens=512", "train.steps=4", "train.save_every=2",
    "train.eval_every=0", "train.keep_checkpoints=9", f"train.collective_timeout_minutes={SECONDS / 60}",
    "generation.max_new_tokens=4", "output_dir=out",
)  # fmt: skip
PAIRS = tuple(key for key in TINY if not key.startswith("data.")) + ("data=gsm8k_pairs", "data.path=pairs.jsonl")
ROLLOUTS = (
    "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4", "reward.functions=[{path: even.py, name: even}]",
)  # fmt: skip
EMBEDDED = ("generation.engine=embedded",)
TRANSFORMERS = (
    "generation.engine=transformers", "generation.refit_bucket_mb=0.05",
    f"generation.engine_timeout_minutes={SECONDS / 60}",
)  # fmt: skip
_VLLM_PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
VLLM = (
    "generation.engine=vllm", f"generation.vllm.python={_VLLM_PYTHON}", "generation.refit_bucket_mb=0.05",
    "generation.engine_timeout_minutes=1", "model.hidden_size=64",
)  # fmt: skip
ASYNCHRONOUS = (
    "train.steps=8", "rollout.async_enabled=true", "rollout.max_trajectory_age_steps=2", "rollout.worker=conversation",
    "rollout.environment.name=game.py:Game", "rollout.environment.processes=2", "rollout.retries=2",
)  # fmt: skip
_LEARNING = ("load", "train", "save")
_OF_DISKS = ("start", "load", "train", "record", "save", "finish")
_SAMPLING = ("load", "generate", "reward", "logprobs", "train", "refit", "save")


@dataclass(frozen=True)
class Run:
    """A run that faults hit.

    Attributes:
        arguments: Its command line.
        moments: What can be interrupted in it, names of `in_rank.MOMENTS`.
    """

    arguments: tuple[str, ...]
    moments: tuple[str, ...]

    @property
    def has_engine_process(self) -> bool:
        """Return whether its rollout engine has a process of its own."""
        return "generation.engine=embedded" not in self.arguments and "refit" in self.moments

    @property
    def is_exact(self) -> bool:
        """Return whether two runs have equal metrics to the bit. The bits of a vLLM server depend on how it batches."""
        return "generation.engine=vllm" not in self.arguments

    @property
    def is_asynchronous(self) -> bool:
        """Return whether it generates while it trains. Which weights have sampled a token then depends on speed."""
        return "rollout.async_enabled=true" in self.arguments

    @property
    def part(self) -> str:
        """Return the part of the campaign that it belongs to: plain, vllm or asynchronous."""
        return "asynchronous" if self.is_asynchronous else "plain" if self.is_exact else "vllm"


RUNS = {
    "SFT": Run((*TINY, "algorithm=sft", "parallel.tensor=2", "parallel.context=2"), _LEARNING),
    "DPO": Run((*PAIRS, "algorithm=dpo", "loss=dpo", "parallel.tensor=2", "parallel.pipeline=2"), _LEARNING),
    "GRPO, embedded engine": Run(
        (*TINY, *ROLLOUTS, *EMBEDDED, "algorithm=grpo", "parallel.tensor=2", "rollout.save_every=1"), _SAMPLING
    ),
    "GRPO, transformers engine": Run(
        (*TINY, *ROLLOUTS, *TRANSFORMERS, "algorithm=grpo", "parallel.tensor=2", "parallel.pipeline=2"), _SAMPLING
    ),
    "PPO, embedded engine": Run((*TINY, *ROLLOUTS, *EMBEDDED, "algorithm=ppo", "parallel.pipeline=2"), _SAMPLING),
    "PPO, transformers engine": Run((*TINY, *ROLLOUTS, *TRANSFORMERS, "algorithm=ppo", "parallel.tensor=2"), _SAMPLING),
    "GRPO, vLLM server": Run((*TINY, *ROLLOUTS, *VLLM, "algorithm=grpo", "parallel.tensor=2"), _SAMPLING),
    "GRPO, asynchronous": Run(
        (*TINY, *ROLLOUTS, *TRANSFORMERS, *ASYNCHRONOUS, "algorithm=grpo", "parallel.tensor=2"),
        ("load", "wait", "train", "refit", "save"),
    ),
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        number: Its number in the campaign.
        run: The run that it hits, a key of `RUNS`.
        target: What is hit: "rank", "engine", "launcher", "disk" or "file" (of the output directory). In
            asynchronous runs also "coordinator", which is rank 0 with the queue of groups, and "environment", a process
            of environments; "rank" is then another one.
        action: The signal's name, `FULL`, `FULL_FOR_A_WHILE`, "truncated" or "one bit flipped".
        moment: During which call it comes; see `in_rank.MOMENTS`.
        rank: The rank that is hit, or that counts the calls.
        call: Which call of the moment it is, from 1.
        delay: Seconds from the begin of this call.
        chance: A number from 0 to 1 that chooses what else is random: the file and the place in it.
    """

    number: int
    run: str
    target: str
    action: str
    moment: str
    rank: int
    call: int
    delay: float
    chance: float

    @property
    def seconds(self) -> float:
        """Return the time limit of collectives and engines in the run that it hits."""
        return _BRIEF_SECONDS if self.action == "SIGSTOP" else SECONDS

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the command line of the run that it hits."""
        limits = f"train.collective_timeout_minutes={self.seconds / 60}"
        if RUNS[self.run].has_engine_process and RUNS[self.run].is_exact:
            return (*RUNS[self.run].arguments, limits, f"generation.engine_timeout_minutes={self.seconds / 60}")
        return (*RUNS[self.run].arguments, limits)

    @property
    def kind(self) -> str:
        """Return the row of the table that the fault counts in."""
        return f"{self.target}: {self.action}"


# kind → how many faults of it there are
COUNTS = {
    ("rank", "SIGKILL"): 30, ("rank", "SIGTERM"): 24, ("rank", "SIGSTOP"): 24,
    ("engine", "SIGKILL"): 12, ("engine", "SIGTERM"): 6, ("engine", "SIGSTOP"): 8,
    ("launcher", "SIGKILL"): 10, ("launcher", "SIGTERM"): 10,
    ("file", "truncated"): 12, ("file", "one bit flipped"): 12,
}  # fmt: skip
FULL, FULL_FOR_A_WHILE = "full", "full for a while"  # until the run has ended, and while it goes on
DISK_COUNTS = {("disk", FULL): 21, ("disk", FULL_FOR_A_WHILE): 21}
SERVER_COUNTS = {("engine", "SIGKILL"): 5, ("engine", "SIGTERM"): 3, ("engine", "SIGSTOP"): 4}  # of vLLM servers
ASYNCHRONOUS_COUNTS = {
    (target, "SIGKILL"): 20 for target in ("engine", "environment", "coordinator", "rank")
}  # of asynchronous runs
_OF_RANK_0 = ("engine", "environment", "disk")  # what rank 0 starts, or strikes
_LAST_CALL = {"start": 1, "load": 1, "save": 2, "finish": 1}
_BEFORE_THE_END = {"train": 3, "save": 1}  # a run that is asked to end in a later call is complete
_CALLED_ONCE = {"logprobs": 1}  # a run takes them from the embedded engine, once it has compared them with its own
_LONGEST = {"load": 1.0, "save": 0.2}  # seconds from the begin of a call


def faults(seed: int) -> list[Fault]:
    """Return all faults: those of synchronous runs without servers, of vLLM servers, and of asynchronous runs.

    Each kind hits all runs, and each of their moments, about equally often.
    """
    drawn: list[Fault] = []
    for part, counts in (
        ("plain", COUNTS), ("plain", DISK_COUNTS), ("vllm", SERVER_COUNTS), ("asynchronous", ASYNCHRONOUS_COUNTS)
    ):  # fmt: skip
        drawn += _drawn(random.Random(seed), counts, {name: run for name, run in RUNS.items() if run.part == part})
    return [Fault(**{**vars(fault), "number": number}) for number, fault in enumerate(drawn)]


def _rank(target: str, run: Run, chance: random.Random) -> int:
    if target in (*_OF_RANK_0, "coordinator"):
        return 0
    return chance.randrange(1, RANKS) if run.is_asynchronous else chance.randrange(RANKS)


def _drawn(chance: random.Random, counts: dict[tuple[str, str], int], runs: dict[str, Run]) -> list[Fault]:
    drawn: list[Fault] = []
    for (target, action), count in counts.items():
        places = [
            (name, moment)
            for name, run in runs.items()
            for moment in run.moments
            if target not in ("engine", "environment") or moment != "load"
            if target != "engine" or run.has_engine_process
        ]
        if target == "disk":  # rank 0 writes, but for checkpoints
            places = [(name, moment) for name in runs for moment in _OF_DISKS]
        if target == "file":  # they matter at saves and loads, whenever they come
            places = [(name, moment) for name, moment in places if moment in ("train", "save")]
        chance.shuffle(places)
        for _, (name, moment) in zip(range(count), cycle(places), strict=False):
            latest = _BEFORE_THE_END if target == "file" else _CALLED_ONCE if "embedded" in name else {}
            drawn.append(
                Fault(
                    0, name, target, action, moment,
                    rank=_rank(target, runs[name], chance),
                    call=min(chance.randint(1, _LAST_CALL.get(moment, 4)), latest.get(moment, 4)),
                    delay=round(chance.uniform(0, _LONGEST.get(moment, 0.05)), 4),
                    chance=round(chance.random(), 6),
                )
            )  # fmt: skip
    chance.shuffle(drawn)
    return drawn
