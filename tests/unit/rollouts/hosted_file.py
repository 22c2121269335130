"""A user's file: objects, functions and environments that behave and misbehave in worker processes."""

import asyncio
import os
import pickle
import sys
import time
from enum import IntEnum

from rl_megatron import EnvironmentStep


class Color(IntEnum):
    RED = 4


class Thing:
    def __init__(self, start=0, sleeps=0.0):
        time.sleep(sleeps)
        self.value = start

    def add(self, number):
        self.value += number
        return self.value

    async def wait(self, seconds):
        await asyncio.sleep(seconds)
        return self.value

    def with_a_loop_of_its_own(self):
        return asyncio.run(self.wait(0.0))

    def misbehave(self, how):  # noqa: RET503  # most ways do not return
        match how:
            case "raise":
                raise ValueError("on purpose")
            case "leave":
                sys.exit(0)
            case "object":
                return {"a": [Thing()]}
            case "megabytes":
                return "x" * 5_000_000
            case "eat":
                return len(b"x" * (4 << 30))
            case "sleep":
                time.sleep(60)
            case "die":
                os._exit(3)
            case "close":
                os.closerange(3, 1 << 16)  # the socket may have a large number
            case "forge":  # a message that would run code where it is read
                descriptor = int(sys.argv[1])
                payload = pickle.dumps(("answer", Forged(), True))
                os.write(descriptor, len(payload).to_bytes(8, "big") + payload)
                time.sleep(0.2)
            case "print":
                print("x" * 1000, flush=True)
                os.write(1, b"\0" * 100)
            case "numbers":
                return Color.RED, {"b": (1.5, None)}, {1, 2}

    async def hold_the_loop(self):
        time.sleep(60)


class Forged:
    def __reduce__(self):
        return os._exit, (7,)


class Closes:
    def __init__(self, path):
        self.path = path

    def close(self):
        with open(self.path, "a") as file:
            file.write("closed\n")


class DoesNotClose:
    def close(self):
        raise OSError("it is open")


def process_of(place):
    return os.getpid()


def double(number):
    return 2 * number


async def double_later(number):
    await asyncio.sleep(0.2)
    return 2 * number


class Guess:
    """Think of the record's number; say higher or lower."""

    def __init__(self, first=None):
        self.first = first

    def reset(self, record):
        self.number, self.turns = record["number"], 0
        return self.first

    def step(self, answer):
        self.turns += 1
        if answer == str(self.number):
            return EnvironmentStep("right", reward=1.0, done=True, metadata={"turns": self.turns})
        return EnvironmentStep("?", reward=-0.25, metadata={"last": answer, "turns": self.turns})


class Gym:
    """Gymnasium's form, with async methods."""

    async def reset(self, record):
        return "go", {"began": True}

    async def step(self, answer):
        await asyncio.sleep(0.0)
        return "on", 0.5, False, len(answer) > 1, {"answer": answer}


class Greets:
    """Begin with a message of its own, and say what it was asked to."""

    def __init__(self, how="well"):
        self.how = how

    def reset(self, record):
        return "hi"

    def step(self, answer):
        match self.how:
            case "nan":
                return EnvironmentStep(reward=float("nan"))
            case "stop":
                return EnvironmentStep("s", stop=["ZZ"])
            case "cut":
                return EnvironmentStep("s", truncated=True)
            case "forever":
                return EnvironmentStep("s")
        return EnvironmentStep("bye", done=True)


class Dies:
    """End the process of record 1 in its first steps; the others take two turns."""

    def reset(self, record):
        self.number, self.turns = record["number"], 0

    def step(self, answer):
        self.turns += 1
        if self.number == 1:
            os._exit(3)
        return EnvironmentStep("?", reward=1.0, done=self.turns == 2)


class OfNemo:
    """NeMo RL's interface: count to the number in the metadata; the answer of each turn is the next number."""

    def __init__(self, cfg):
        self.cfg = cfg

    def step(self, message_log_batch, metadata):
        import numpy as np  # torch, which NeMo RL's environments use, takes seconds to import

        ((log,), (state,)) = message_log_batch, metadata
        assert [message["role"] for message in log] == (["user"] + ["assistant", "environment"] * 9)[: len(log)]
        turns = sum(message["role"] == "assistant" for message in log)
        assert state["turns"] == turns - 1, "what one step returned is what the next one gets"
        done = turns == state["goal"]
        observations = [{"role": "environment", "content": f"{turns}{self.cfg['sign']}"}]
        left = {**state, "turns": turns}
        rewards, terminateds = np.array([float(done)]), np.array([done])
        return observations, [left], [["ZZ"]], rewards, terminateds, [log[-1]["content"]]
