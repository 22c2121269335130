"""Which files a test's code has synced to disk."""

from __future__ import annotations

import os

import pytest


def note_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the path of every file or directory that is synced from now on."""
    synced, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", note)
    return synced
