"""A worker process with the connection of an engine's worker, which starts fast because it imports little."""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from rl_megatron.topology.child_process import die_with


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
            connection.send(("progress", (done + 1, arguments[0], "sequences", f"token {done}")))
    return "answer", arguments


if __name__ == "__main__":
    die_with(int(sys.argv[3]))
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            question = connection.recv()
        except EOFError:
            break
        connection.send(answer(*question))
