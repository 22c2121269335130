"""Who could reach the processes of a run: the addresses at which they listen."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

_SECONDS_BETWEEN_LOOKS = 0.1


def listening(pids: Sequence[int]) -> set[tuple[str, int]]:
    """Return the addresses and TCP ports at which the processes and their descendants listen."""
    found: set[tuple[str, int]] = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                with suppress(psutil.NoSuchProcess):  # it has ended in the meantime
                    connections = process.net_connections("tcp")
                    found |= {(each.laddr.ip, each.laddr.port) for each in connections if each.status == "LISTEN"}
    return found


@contextmanager
def watched(pids: Sequence[int]) -> Iterator[set[tuple[str, int]]]:
    """Yield the set of where the processes and their descendants listen, which grows until the end of the context."""
    found, over = listening(pids), threading.Event()

    def look() -> None:
        while not over.wait(_SECONDS_BETWEEN_LOOKS):
            found.update(listening(pids))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        over.set()
        looking.join()


def reached_from_outside(addresses: set[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the addresses that other machines reach."""
    return sorted(each for each in addresses if not ipaddress.ip_address(each[0]).is_loopback)
