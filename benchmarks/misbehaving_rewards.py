"""Reward functions of every form that do what a word of the completion says: most words are of misbehaviour.

`reward_failures` runs them. The completion "sample=3 f0=well f1=sleep" makes the functions of the number 0 return a
score, and those of the number 1 sleep.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

FORMS = ("sample", "sample_async", "list", "list_async", "verl", "verl_async")
_MOST_FUNCTIONS = 3  # of a form
_NO_SCORES = {"none": None, "nan": float("nan"), "text": "1.0", "nothing": {}}


def act(word: str) -> Any:
    """Do what a word says, and return a score or something else."""
    if word == "sleep":
        time.sleep(1000)
    if word == "raise":
        raise ValueError("raised\non purpose")
    if word == "exit":
        os._exit(3)
    if word == "leave":
        raise SystemExit(0)
    if word == "eat":
        return float(len(bytearray(8 << 30)))
    if word == "close":
        os.closerange(3, 200)
    if word == "fork" and os.fork() == 0:
        return 7.0
    if word == "orphan":
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    if word == "print":
        print("printed by a reward function", flush=True)
    return _NO_SCORES.get(word, 1.0)


def _word_of(completion: str, name: str) -> str:
    return dict(part.split("=") for part in completion.split()).get(name, "well")


def _function(form: str, name: str) -> Callable[..., Any]:
    """Return a function of a form, which does what the completion says of its name."""

    def sample(completion):
        return act(_word_of(completion, name))

    async def sample_async(completion):
        word = _word_of(completion, name)
        await asyncio.sleep(1000 if word == "sleep" and len(completion) % 2 else 0.01)
        return act(word)

    def of_list(completions, **columns):
        return [act(_word_of(completion, name)) for completion in completions]

    async def list_async(completions, **columns):
        await asyncio.sleep(0.01)
        return [act(_word_of(completion, name)) for completion in completions]

    def verl(data_source, solution_str, ground_truth, extra_info):
        return {"score": act(_word_of(solution_str, name)), "seen": 1.0}

    async def verl_async(solution_str, ground_truth):
        await asyncio.sleep(0.01)
        return {"score": act(_word_of(solution_str, name)), "seen": 1.0}

    return dict(zip(FORMS, (sample, sample_async, of_list, list_async, verl, verl_async), strict=True))[form]


for _form in FORMS:
    for _number in range(_MOST_FUNCTIONS):
        globals()[f"{_form}_{_number}"] = _function(_form, f"f{_number}")
