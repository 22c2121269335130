"""Which files a test's code has synced to disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def note_syncs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Return a list that gets an entry for every sync from now on: the path, and the bytes that a file then has."""
    synced, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        synced.append((str(path), path.stat().st_size if path.is_file() else None))

    monkeypatch.setattr(os, "fsync", note)
    return synced
