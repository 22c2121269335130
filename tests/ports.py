"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RANDOM = random.SystemRandom()  # other workers of pytest may have seeded the common generator alike


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1 that the system gives to nobody.

    A port that the system has chosen can be given to another connection as soon as it is closed here. Then rank 0
    cannot listen there, and the other ranks wait for an answer until their timeout.
    """
    first_of_system = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32768
    while True:
        port = _RANDOM.randrange(_FIRST, first_of_system)
        with socket.socket() as listening:
            try:
                listening.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
