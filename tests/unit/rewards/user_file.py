"""A user's file of reward functions: good ones of every form, and ones that misbehave as the completion says."""

import asyncio
import ctypes
import time
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.misbehaving_rewards import act


def length(completion_ids, scale=1.0):
    return scale * len(completion_ids)


def fields(prompt, completion, answer, level, truncated=False):
    return {"score": float(completion == answer), "level": level, "cut": truncated, "note": "not a number"}


def everything(**given):
    return float(given["completion"] == given["answer"])


def trl(prompts, completions, solution, log_metric, **columns):
    log_metric("seen", float(len(prompts)))
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [None if wanted == "skip" else float(text == wanted) for text, wanted in zip(texts, solution, strict=True)]


def hidden_memory(completion):
    dumpable = 3  # PR_GET_DUMPABLE
    return float(ctypes.CDLL(None).prctl(dumpable, 0, 0, 0, 0) == 0)


async def trl_async(completions, **columns):
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": solution_str == ground_truth, "acc": 1.0, "source": data_source}


async def judge(completion):
    await asyncio.sleep(0.2)
    return len(completion)


def takes_a_while(completion):
    time.sleep(0.3)
    return 1.0


def takes_as_long(completion):
    return takes_a_while(completion)


async def computes(completion):
    """Hold the event loop twice, or for ever."""
    time.sleep(1000 if completion == "block" else 0.3)
    await asyncio.sleep(0)
    time.sleep(0.3)
    return 1.0


class Stateful:
    def __init__(self, offset):
        self.offset = offset

    def __call__(self, completion):
        return self.offset + len(completion)


def misbehave(completion):
    """Do what the completion says."""
    return act(completion)


async def misbehave_async(completion):
    if completion == "wait":
        await asyncio.sleep(1000)
    await asyncio.sleep(0.01)
    return misbehave(completion)


def misbehave_list(completions, **columns):
    return [misbehave(completion) for completion in completions]


def positional(completion, /):
    return 1.0


def nothing():
    return 1.0


@dataclass(frozen=True)
class Spelled:
    """A task whose reward for a completion is the number that it spells."""

    name: ClassVar[str] = "spelled"

    def reward(self, problem, completion):
        return float(completion)
