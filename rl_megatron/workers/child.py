"""The child's side of `ChildProcess`: it connects to its parent, and runs users' code for it."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from rl_megatron.config.loading.import_strings import find_files
from rl_megatron.workers.calls import CallMark
from rl_megatron.workers.frames import read_frame
from rl_megatron.workers.linux import die_with, hide_memory


def connect(arguments: Sequence[str]) -> tuple[socket.socket, CallMark]:
    """Return the socket and the mark that this process shares with its parent, and make it end with its parent.

    The arguments are the descriptors of the socket and of the mark's memory, and the parent's process id.
    """
    descriptor, marks, parent = map(int, arguments)
    die_with(parent)
    shared = mmap.mmap(marks, CallMark.SIZE)
    os.close(marks)
    return socket.socket(fileno=descriptor), CallMark(shared)


def serve_user_code(arguments: Sequence[str], serve: Callable[[socket.socket, CallMark], None]) -> NoReturn:
    """Prepare this process with what `ChildProcess.prepare` sends, call `serve`, and exit."""
    connection, mark = connect(arguments)
    hide_memory()
    try:
        paths, keeps_path, files, memory = read_frame(connection)
        # An interpreter other than the parent's searches its own directories first, and then those of the user's files.
        sys.path[:] = [*sys.path, *(path for path in paths if path not in sys.path)] if keeps_path else paths
        find_files(files)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        serve(connection, mark)
    except OSError:  # the other end is gone, or the user's code closed the socket
        os._exit(1)
    os._exit(0)  # do not wait for threads of the user's code
