"""Run a Python program of a model under limits: Landlock, a seccomp filter of system calls, and resource limits.

`confinement` starts this file in a separate process. The file imports only the standard library, because that process
cannot import the package. Its arguments are the CPU time limit in seconds, the memory limit in bytes, the parent's
process id, a file descriptor to which it writes the names of the limits that the system lacks, a file descriptor of the
program's source, and the program's own arguments.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import resource
import signal
import struct
import sys
import threading
import traceback
import types

_LARGEST_FILE = 16 << 20  # bytes
_MOST_DESCRIPTORS = 128  # a pipe can hold a mebibyte that no other limit counts
_MOST_PROCESSES = 64  # threads count, too
_STACK_OF_A_THREAD = 1 << 20  # bytes
_CLONE_THREAD, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x00010000, 0x08000000, 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 1, 22, 38, 2
# The system calls that a program may use, with their numbers on x86_64 and on aarch64. All others are refused, such as
# those that start processes, reach other processes, open network sockets, change owners, permissions, times and
# attributes of files, or allocate memory that RLIMIT_AS does not count.
_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
preadv2 327 286, pwritev2 328 287, sendfile 40 71, copy_file_range 326 285, splice 275 76, tee 276 77,
lseek 8 62, fsync 74 82, fdatasync 75 83, sync_file_range 277 84, fallocate 285 47, fadvise64 221 223,
truncate 76 45, ftruncate 77 46, open 2 -, creat 85 -, openat 257 56, close 3 57, close_range 436 436, dup 32 23,
dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79,
statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, statfs 137 43, fstatfs 138 44, readlink 89 -,
readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, mkdir 83 -,
mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276,
link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, umask 95 166, mmap 9 222, munmap 11 215,
mprotect 10 226, mremap 25 216, brk 12 214, madvise 28 233, mincore 27 232, msync 26 227, mlock 149 228,
mlock2 325 284, munlock 150 229, membarrier 324 283, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132,
pause 34 -, alarm 37 -, getitimer 36 102, setitimer 38 103, timer_create 222 107, timer_settime 223 110,
timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111, time 201 -, times 100 153,
gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, nanosleep 35 101, clock_nanosleep 230 115,
restart_syscall 219 128, select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441,
eventfd 284 -, eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
signalfd 282 -, signalfd4 289 74, socketpair 53 199, sendto 44 206, recvfrom 45 207, sendmsg 46 211,
recvmsg 47 212, shutdown 48 210, getsockname 51 204, getpeername 52 205, setsockopt 54 208, getsockopt 55 209,
getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgid 121 155, getpgrp 111 -, getsid 124 156,
sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, getpriority 140 141, uname 63 160,
sysinfo 99 179, getrusage 98 165, getrlimit 97 163, setrlimit 160 164, getcpu 309 168, getrandom 318 278,
wait4 61 260, waitid 247 95, futex 202 98, futex_waitv 449 449, set_robust_list 273 99, set_tid_address 218 96,
arch_prctl 158 -, rseq 334 293, exit 60 93, exit_group 231 94
"""
_FIRST_ARGUMENT, _SECOND_ARGUMENT = 16, 24  # offsets of the lower halves in `struct seccomp_data`
# System calls that are allowed only for some values of an argument: name, numbers, the argument's offset, values.
_ALLOWED_IF = (
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Other commands lock files, enlarge
    # pipes, or choose a process that gets signals.
    ("fcntl", 72, 25, _SECOND_ARGUMENT, (0, 1, 2, 3, 4, 1030, 1032)),
    # TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
    ("ioctl", 16, 29, _SECOND_ARGUMENT, (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA. PR_SET_PDEATHSIG would let the program outlive its parent.
    ("prctl", 157, 167, _FIRST_ARGUMENT, (15, 16, 0x53564D41)),
    ("prlimit64", 302, 261, _FIRST_ARGUMENT, (0,)),  # the process itself
)
_CLONE = (56, 220)  # allowed only to start threads
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # columns of the tables above, and AUDIT_ARCH_…
# Other calls from this number on fail with ENOSYS, so that libraries use older ones instead. One of them is clone3,
# whose flags a filter cannot read.
_FIRST_NEWER_CALL = 424
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE = 0, 4  # offsets
_X32 = 0x40000000  # system calls of the x32 ABI have numbers from here on
# Landlock's system calls, and its bits for changes of files: writing, removing, making, moving and truncating them.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _GET_VERSION, _PATH_BENEATH = 444, 445, 446, 1, 1
_WRITE_FILE, _REMOVE_AND_MAKE, _MOVE, _TRUNCATE = 1 << 1, sum(1 << bit for bit in range(4, 13)), 1 << 13, 1 << 14
_BIND_AND_CONNECT = 0b11  # of TCP
_OTHERS_SOCKETS_AND_SIGNALS = 0b11  # abstract sockets of other processes, and signals to them
_NAME = "program"


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def limit(seconds: int, memory: int, parent: int) -> list[str]:
    """Set the limits of this process, and return the names of those that the system lacks.

    `seconds` limits the CPU time, and `memory` the address space in bytes. This process ends with process `parent`.
    """
    libc, is_linux = ctypes.CDLL(None, use_errno=True), sys.platform == "linux"
    missing = []
    if is_linux:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)
    _lower(resource.RLIMIT_CPU, seconds)
    _lower(resource.RLIMIT_FSIZE, _LARGEST_FILE)
    _lower(resource.RLIMIT_NOFILE, _MOST_DESCRIPTORS)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_AS, memory)
    threading.stack_size(_STACK_OF_A_THREAD)
    if is_linux and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0:
        # This limit counts the processes of the namespace. Outside, it would count all of the user's.
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
    """Set a limit permanently, unless it is lower already."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _protect_files(libc: ctypes.CDLL) -> bool:
    """Refuse changes of files outside the working directory, and access to other processes, permanently.

    Return whether all changes of these files are refused: Landlock before version 3 allows truncation.
    """
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_VERSION)
    if version < 1:
        return False
    changes = _WRITE_FILE | _REMOVE_AND_MAKE | (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = [changes]
    if version >= 4:
        handled.append(_BIND_AND_CONNECT)
    if version >= 6:
        handled.append(_OTHERS_SOCKETS_AND_SIGNALS)
    packed = struct.pack(f"{len(handled)}Q", *handled)
    rules = libc.syscall(_CREATE_RULESET, packed, ctypes.c_size_t(len(packed)), 0)
    for path, allowed in ((".", changes), ("/dev/null", _WRITE_FILE)):
        descriptor = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed, descriptor)
        has_failed = libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0) != 0
        os.close(descriptor)
        if has_failed:
            return False
    works = libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return works and version >= 3


def list_allowed_calls(machine: str) -> dict[str, int]:
    """Return the numbers of the system calls that programs may use with any arguments, by name."""
    column, _ = _MACHINES[machine]
    entries = [entry.split() for entry in _ALLOWED.split(",")]
    return {name: int(numbers[column]) for name, *numbers in entries if numbers[column] != "-"}


def list_conditional_calls(machine: str) -> dict[str, int]:
    """Return the numbers of the system calls that programs may use only with some arguments, by name."""
    column, _ = _MACHINES[machine]
    return {name: numbers[column] for name, *numbers, _, _ in _ALLOWED_IF} | {"clone": _CLONE[column]}


def _filter_system_calls(libc: ctypes.CDLL) -> bool:
    """Refuse all system calls except those of the tables, permanently; return whether that has succeeded.

    Unlike the limit on the number of processes, the filter also applies to root.
    """
    if os.uname().machine not in _MACHINES:
        return False
    column, machine = _MACHINES[os.uname().machine]
    refused = _ERROR | _EPERM
    rules = [
        (_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, refused),
    ]  # fmt: skip
    for number in list_allowed_calls(os.uname().machine).values():
        rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for _, *numbers, argument, values in _ALLOWED_IF:
        rules += [(_EQUAL, 0, 2 * len(values) + 2, numbers[column]), (_LOAD, 0, 0, argument)]
        for value in values:
            rules += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
        rules += [(_RETURN, 0, 0, refused)]
    rules += [
        (_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, refused),
        (_AT_LEAST, 0, 1, _FIRST_NEWER_CALL), (_RETURN, 0, 0, _ERROR | _ENOSYS), (_RETURN, 0, 0, refused),
    ]  # fmt: skip
    packed = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    held = ctypes.create_string_buffer(packed, len(packed))
    program = _Filter(len(rules), ctypes.cast(held, ctypes.c_void_p))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0


def run(program: str) -> int:
    """Run a program as the main module, and return its exit status. Print an error as Python does."""
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
    _seconds, _memory, _parent, _reports, _text = map(int, sys.argv[1:6])
    sys.argv[:] = [_NAME, *sys.argv[6:]]
    with open(_text, "rb") as _file:
        _program = _file.read().decode("utf-8", "replace")
    os.write(_reports, " ".join(limit(_seconds, _memory, _parent)).encode())
    os.close(_reports)
    sys.exit(run(_program))
