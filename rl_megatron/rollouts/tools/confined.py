"""Run the program on standard input with limits. `interpreter` starts this file in a process of its own.

The file imports the standard library only, because that process does not find the package. Its arguments are the limit
of CPU time in seconds, that of memory in bytes, the parent's process id, and a descriptor, to which it writes the names
of the limits that the system does not have.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import resource
import signal
import struct
import sys
import traceback
import types

_LARGEST_FILE = 16 << 20  # bytes
_MOST_PROCESSES = 64  # threads count, too
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_THREAD = 0x10000000, 0x40000000, 0x00010000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 1, 22, 38, 2
# For each machine: its name in a filter, the number of clone, and those of the system calls that are refused: fork,
# vfork, socket, kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, ptrace, process_vm_readv, process_vm_writev,
# unshare, setns, mount, bpf, keyctl, setpriority, sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr,
# ioprio_set, and, with the same number on both, pidfd_send_signal and io_uring_setup.
_SYSTEM_CALLS = {
    "x86_64": (
        0xC000003E, 56, (
            57, 58, 41, 62, 200, 234, 129, 297, 101, 310, 311, 272, 308, 165, 321, 250, 141, 203, 144, 142, 314, 251,
            424, 425,
        ),
    ),
    "aarch64": (
        0xC00000B7, 220, (
            198, 129, 130, 131, 138, 240, 117, 270, 271, 97, 268, 40, 280, 219, 140, 122, 119, 118, 274, 30, 424, 425,
        ),
    ),
}  # fmt: skip
# fcntl, of which the commands F_SETOWN, F_SETSIG and F_SETOWN_EX send signals to others, and prlimit64.
_FCNTL_AND_PRLIMIT = {"x86_64": (72, 302), "aarch64": (25, 261)}
_SETOWN, _SETSIG, _SETOWN_EX = 8, 10, 15
_CLONE3 = 435
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Offsets in what a filter reads; of the arguments, of their lower halves.
_NUMBER, _MACHINE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_X32 = 0x40000000  # numbers of x86_64's second calling convention
# Landlock's system calls, and its bits for changes of files: writing, removing, making, moving and truncating them.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _GET_VERSION, _PATH_BENEATH = 444, 445, 446, 1, 1
_WRITE_FILE, _REMOVE_AND_MAKE, _MOVE, _TRUNCATE = 1 << 1, sum(1 << bit for bit in range(4, 13)), 1 << 13, 1 << 14
_NAME = "program"


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def limit(seconds: int, memory: int, parent: int) -> list[str]:
    """Set the limits of this process, and return the names of the limits that the system does not have.

    Args:
        seconds: CPU time.
        memory: Address space, in bytes.
        parent: The process with which this one ends.
    """
    libc, is_linux = ctypes.CDLL(None, use_errno=True), sys.platform == "linux"
    missing = []
    if is_linux:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
    _lower(resource.RLIMIT_CPU, seconds)
    _lower(resource.RLIMIT_FSIZE, _LARGEST_FILE)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_AS, memory)
    if is_linux and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        # The limit counts the processes of this namespace only. In that of the system it would count all of the user's.
        _lower(resource.RLIMIT_NPROC, _MOST_PROCESSES)
    else:
        missing.append("namespace")
    if not is_linux or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return [*missing, "landlock", "filter"]
    if not _protect_files(libc):
        missing.append("landlock")
    if not _filter_system_calls(libc):
        missing.append("filter")
    return missing


def _lower(kind: int, value: int) -> None:
    """Set a limit for good, unless it is lower already."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _protect_files(libc: ctypes.CDLL) -> bool:
    """Refuse to change files outside the working directory, for good; return whether it works."""
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_VERSION)
    if version < 1:
        return False
    changes = _WRITE_FILE | _REMOVE_AND_MAKE | (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = struct.pack("Q", changes)
    rules = libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    for path, allowed in ((".", changes), ("/dev/null", _WRITE_FILE)):
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed, place)
        has_failed = libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0) != 0
        os.close(place)
        if has_failed:
            return False
    works = libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return works


def _filter_system_calls(libc: ctypes.CDLL) -> bool:
    """Refuse to start processes, to reach others and to open sockets, for good; return whether it works.

    A filter of system calls also holds for root, which the limit of processes does not.
    """
    if os.uname().machine not in _SYSTEM_CALLS:
        return False
    machine, clone, others = _SYSTEM_CALLS[os.uname().machine]
    refused = _ERROR | _EPERM
    rules = [
        (_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, refused),
    ]  # fmt: skip
    for number in others:
        rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refused)]
    fcntl, prlimit = _FCNTL_AND_PRLIMIT[os.uname().machine]
    rules += [
        (_EQUAL, 0, 6, fcntl), (_LOAD, 0, 0, _SECOND_ARGUMENT), (_EQUAL, 2, 0, _SETOWN), (_EQUAL, 1, 0, _SETSIG),
        (_EQUAL, 0, 1, _SETOWN_EX), (_RETURN, 0, 0, refused), (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, prlimit), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, 0),  # 0: the process itself
        (_RETURN, 0, 0, refused), (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip
    # Threads may start. Where clone3 does not exist, the C library takes clone, whose flags a filter can read.
    rules += [
        (_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | _ENOSYS),
        (_EQUAL, 0, 3, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, refused), (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip
    packed = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    held = ctypes.create_string_buffer(packed, len(packed))
    program = _Filter(len(rules), ctypes.cast(held, ctypes.c_void_p))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0


def run(program: str) -> int:
    """Run a program as the main module, and return its exit status. An error is printed as Python does."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    linecache.cache[_NAME] = len(program), None, program.splitlines(keepends=True), _NAME
    try:
        exec(compile(program, _NAME, "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # whatever the program raises
        frames = error.__traceback__
        traceback.print_exception(type(error), error, frames.tb_next if frames else None)
        return 1
    return 0


if __name__ == "__main__":
    _seconds, _memory, _parent, _descriptor = map(int, sys.argv[1:])
    del sys.argv[1:]
    os.dup2(1, 2)
    _program = sys.stdin.buffer.read().decode("utf-8", "replace")
    os.write(_descriptor, " ".join(limit(_seconds, _memory, _parent)).encode())
    os.close(_descriptor)
    sys.exit(run(_program))
