"""What this process has started, as the system lists it."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

from rl_megatron.generation.servers.process import GUARDIAN


def children_with(argument: str) -> list[psutil.Process]:
    """Return the children of this process that have the argument in their command lines, the oldest first."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended
            while not (command := child.cmdline()):  # it has started its program, and the system has not noted which
                time.sleep(0.001)
            if argument in command:
                found.append(child)
    return sorted(found, key=lambda child: child.create_time())


def servers() -> list[psutil.Process]:
    """Return the servers that this process has started, which are children of their guardians."""
    return [server for guardian in children_with(GUARDIAN) for server in guardian.children()]
