"""A process that answers as an engine's worker, and that starts fast because it imports little."""

import os
import pickle
import signal
import sys
import time

from rl_megatron.workers.child import connect
from rl_megatron.workers.frames import read_frame, write_frame


def answer(method: str, arguments: tuple) -> tuple[str, object]:
    """Do what the method's name says and return (kind of the answer, value)."""
    if method == "die" and arguments[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    if method == "leave" and arguments[0]:
        sys.exit(3)
    if method == "sleep":
        time.sleep(arguments[0])
    if method in ("refused", "failed", "broken"):
        time.sleep(*arguments)
        return method, "because"
    if method == "work":
        for done in range(arguments[0]):
            send("progress", (done + 1, arguments[0], "sequences", f"token {done}"))
    return "answer", arguments


def send(*message: object) -> None:
    write_frame(connection, pickle.dumps(message))


if __name__ == "__main__":
    connection, _ = connect(sys.argv[1:])
    while (question := read_frame(connection)) is not None:
        send(*answer(*question[1:]))
