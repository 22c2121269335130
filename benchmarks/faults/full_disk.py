"""A disk of its own for one run, which a fault fills to the last byte: a tmpfs, in a namespace of mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

DISK = "disk"  # the directory of a run that is on it
_BALLAST = "ballast"
_BYTES = 48 << 20  # enough for all files of a run
_IS_INSIDE = "RL_MEGATRON_FAULTS_MOUNT"


def enter_namespace(module: str, arguments: Sequence[str]) -> None:
    """Start `python -m module` again, in place of this process, where it may mount; do nothing if it is there already.

    What it mounts is gone with it. Any user may do so where Linux lets users have namespaces.
    """
    if _IS_INSIDE in os.environ:
        return
    os.environ[_IS_INSIDE] = "1"
    namespaces = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"]
    os.execvp("unshare", ["unshare", *namespaces, sys.executable, "-m", module, *arguments])


def mount_disk(directory: Path) -> None:
    """Give the run of `directory` a disk with its output directory and its temporary files."""
    disk = directory / DISK
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_BYTES}", "tmpfs", str(disk)], check=True)
    (disk / "out").mkdir()
    (disk / "tmp").mkdir()
    (directory / "out").symlink_to(Path(DISK) / "out")


def unmount_disk(directory: Path) -> None:
    """Take the disk away, if there is one. What its output directory held is then in the run's directory."""
    if os.path.ismount(directory / DISK):
        shutil.copytree(directory / DISK / "out", directory / "kept")
        (directory / "out").unlink()
        (directory / "kept").rename(directory / "out")
        subprocess.run(["umount", str(directory / DISK)], check=True)


def fill_disk(directory: Path) -> None:
    """Take all bytes that are free."""
    with (directory / DISK / _BALLAST).open("wb", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while ballast.write(bytes(size)):
                    pass


def free_disk(directory: Path) -> None:
    """Give the bytes back."""
    (directory / DISK / _BALLAST).unlink(missing_ok=True)
