"""A program that tries to escape its limits, and prints what became of each attempt as JSON: name → error or "worked".

Its arguments are the process id of its parent and a file of others. It is run by `test_confinement`.
"""

import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys

PARENT, OTHERS = int(sys.argv[1]), sys.argv[2]
DIRECTORY = os.path.dirname(OTHERS)
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {  # of x86_64
    "vfork": 58, "clone": 56, "clone3": 435, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438, "ptrace": 101,
    "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440, "kcmp": 312, "migrate_pages": 256,
    "ioprio_set": 251, "sched_setattr": 314, "unshare": 272, "setns": 308, "memfd_create": 319, "memfd_secret": 447,
    "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250,
    "userfaultfd": 323, "perf_event_open": 298, "io_uring_setup": 425, "bpf": 321, "mount": 165, "umount2": 166,
    "pivot_root": 155, "fsopen": 430, "open_tree": 428, "mount_setattr": 442, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "init_module": 175, "finit_module": 313, "swapon": 167, "syslog": 103, "quotactl": 179,
    "acct": 163, "iopl": 172, "sethostname": 170, "settimeofday": 164, "reboot": 169, "mknod": 133, "personality": 135,
    "fchmodat2": 452, "futimesat": 261, "setxattrat": 463, "io_setup": 206, "fanotify_init": 300, "landlock": 444,
    "seccomp": 317, "capset": 126, "setresuid": 117,
}  # fmt: skip


def call(name, *arguments):
    """Make a system call, with arguments that would do nothing much if it were allowed."""
    if libc.syscall(NUMBERS[name], *arguments) == -1:
        raise OSError(ctypes.get_errno(), "")


def x32():
    if libc.syscall(0x40000000 | 57) == -1:
        raise OSError(ctypes.get_errno(), "")


def on_a_pair(action):
    ours, _ = socket.socketpair()
    return action(ours.fileno())


def read_only(action):
    with open(OTHERS) as file:
        return action(file.fileno())


def write(path):
    with open(path, "r+b") as file:
        file.write(b"x")


def join_group(_):
    os.setpgid(0, os.getpgid(PARENT))


ZEROS = (0,) * 6
ATTEMPTS = {
    "processes": {
        "fork": os.fork,
        "vfork": lambda: call("vfork", *ZEROS),
        "clone": lambda: call("clone", signal.SIGCHLD, *ZEROS[1:]),
        "clone3": lambda: call("clone3", struct.pack("8Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64),
        "fork by x32": x32,
        "execv": lambda: os.execv("/bin/true", ["true"]),
        "posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "kill": lambda: os.kill(PARENT, 0),
        "kill of its group": lambda: os.killpg(os.getpgid(PARENT), 0),
        "tkill": lambda: call("tkill", PARENT, 0),
        "tgkill": lambda: call("tgkill", PARENT, PARENT, 0),
        "rt_sigqueueinfo": lambda: call("rt_sigqueueinfo", PARENT, signal.SIGURG, b"\0" * 128),
        "rt_tgsigqueueinfo": lambda: call("rt_tgsigqueueinfo", PARENT, PARENT, signal.SIGURG, b"\0" * 128),
        "pidfd_open": lambda: call("pidfd_open", PARENT, 0),
        "pidfd_send_signal": lambda: call("pidfd_send_signal", 0, 0, 0, 0),
        "pidfd_getfd": lambda: call("pidfd_getfd", 0, 0, 0),
        "FIOSETOWN": lambda: on_a_pair(lambda pair: fcntl.ioctl(pair, 0x8901, struct.pack("i", PARENT))),
        "SIOCSPGRP": lambda: on_a_pair(lambda pair: fcntl.ioctl(pair, 0x8902, struct.pack("i", -PARENT))),
        "FIOASYNC": lambda: on_a_pair(lambda pair: fcntl.ioctl(pair, 0x5452, struct.pack("i", 1))),
        "F_SETOWN": lambda: on_a_pair(lambda pair: fcntl.fcntl(pair, fcntl.F_SETOWN, PARENT)),
        "F_SETOWN_EX": lambda: on_a_pair(lambda pair: fcntl.fcntl(pair, 15, struct.pack("ii", 1, PARENT))),
        "F_SETSIG": lambda: on_a_pair(lambda pair: fcntl.fcntl(pair, 10, signal.SIGURG)),
        "F_NOTIFY": lambda: fcntl.fcntl(os.open(".", os.O_RDONLY), fcntl.F_NOTIFY, 1),
        "ptrace": lambda: call("ptrace", 16, PARENT, 0, 0),
        "process_vm_readv": lambda: call("process_vm_readv", PARENT, 0, 0, 0, 0, 0),
        "process_vm_writev": lambda: call("process_vm_writev", PARENT, 0, 0, 0, 0, 0),
        "process_madvise": lambda: call("process_madvise", 0, 0, 0, 0, 0),
        "kcmp": lambda: call("kcmp", os.getpid(), PARENT, 0, 0, 0),
        "migrate_pages": lambda: call("migrate_pages", PARENT, 0, 0, 0),
        "memory of the parent": lambda: open(f"/proc/{PARENT}/mem", "rb").close(),
        "environment of the parent": lambda: open(f"/proc/{PARENT}/environ", "rb").read(),
        "a file of the parent": lambda: open(f"/proc/{PARENT}/fd/1", "rb").close(),
        "a path of the parent": lambda: os.readlink(f"/proc/{PARENT}/fd/1"),
        "the parent's directory": lambda: os.listdir(f"/proc/{PARENT}/cwd"),
        "limits of the parent": lambda: resource.prlimit(PARENT, resource.RLIMIT_NOFILE),
        "priority of the parent": lambda: os.setpriority(os.PRIO_PROCESS, PARENT, 19),
        "cores of the parent": lambda: os.sched_setaffinity(PARENT, {0}),
        "scheduling of the parent": lambda: call("sched_setattr", PARENT, struct.pack("IIQiIQQQ", 48, *ZEROS, 0), 0),
        "ioprio_set": lambda: call("ioprio_set", 1, PARENT, 0x6000),
        "outliving the parent": lambda: libc.prctl(1, 0, 0, 0, 0) and call("kcmp", *ZEROS),
        "the parent's group": lambda: join_group(None),
        "unshare": lambda: call("unshare", 0x10000000),
        "setns": lambda: call("setns", 0, 0),
    },
    "memory": {
        "memfd_create": lambda: call("memfd_create", b"x", 0),
        "memfd_secret": lambda: call("memfd_secret", 0),
        "shmget": lambda: call("shmget", 0, 4096, 0o1600),
        "semget": lambda: call("semget", 0, 1, 0o1600),
        "msgget": lambda: call("msgget", 0, 0o1600),
        "mq_open": lambda: call("mq_open", b"/x", os.O_CREAT | os.O_RDWR, 0o600, 0),
        "add_key": lambda: call("add_key", b"user", b"x", b"y", 1, -3),
        "request_key": lambda: call("request_key", b"user", b"x", 0, -3),
        "keyctl": lambda: call("keyctl", 0, -3, 0, 0, 0),
        "F_SETPIPE_SZ": lambda: fcntl.fcntl(os.pipe()[1], 1031, 1 << 20),
        "userfaultfd": lambda: call("userfaultfd", 1),
        "perf_event_open": lambda: call("perf_event_open", *ZEROS),
        "io_setup": lambda: call("io_setup", 1, ctypes.byref(ctypes.c_ulong())),
        "a file in /dev/shm": lambda: open(f"/dev/shm/escape-{os.getpid()}", "w").close(),
        "more memory": lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)),
        "a large file": lambda: os.posix_fallocate(os.open("large", os.O_CREAT | os.O_RDWR), 0, 17 << 20),
    },
    "files": {
        "open": lambda: write(OTHERS),
        "truncate": lambda: os.truncate(OTHERS, 0),
        "O_TRUNC": lambda: os.open(OTHERS, os.O_RDONLY | os.O_TRUNC),
        "remove": lambda: os.remove(OTHERS),
        "rename": lambda: os.rename(OTHERS, "mine"),
        "rename over it": lambda: [open("mine", "w").close(), os.rename("mine", OTHERS)],
        "link": lambda: os.link(OTHERS, "linked"),
        "link beside it": lambda: [open("mine", "w").close(), os.link("mine", f"{DIRECTORY}/linked")],
        "symlink beside it": lambda: os.symlink("/", f"{DIRECTORY}/linked"),
        "through a symlink": lambda: [os.symlink(OTHERS, "symlink"), write("symlink")],
        "through a descriptor": lambda: read_only(lambda file: write(f"/proc/self/fd/{file}")),
        "mkdir": lambda: os.mkdir(f"{DIRECTORY}/new"),
        "mknod": lambda: call("mknod", b"node", 0o010600, 0),
        "chmod": lambda: os.chmod(OTHERS, 0o666),
        "fchmod": lambda: read_only(lambda file: os.fchmod(file, 0o666)),
        "fchmodat2": lambda: call("fchmodat2", -100, OTHERS.encode(), 0o666, 0),
        "chown": lambda: os.chown(OTHERS, -1, -1),
        "fchown": lambda: read_only(lambda file: os.fchown(file, -1, -1)),
        "utime": lambda: os.utime(OTHERS, (1, 1)),
        "futimens": lambda: read_only(lambda file: os.utime(file, (1, 1))),
        "futimesat": lambda: call("futimesat", -100, OTHERS.encode(), 0),
        "setxattr": lambda: os.setxattr(OTHERS, "user.x", b"y"),
        "fsetxattr": lambda: read_only(lambda file: os.setxattr(file, "user.x", b"y")),
        "removexattr": lambda: os.removexattr(OTHERS, "user.kept"),
        "setxattrat": lambda: call("setxattrat", -100, OTHERS.encode(), 0, b"user.x", 0, 0),
        "flock": lambda: read_only(lambda file: fcntl.flock(file, fcntl.LOCK_SH)),
        "lockf": lambda: read_only(lambda file: fcntl.lockf(file, fcntl.LOCK_SH)),
        "F_OFD_SETLK": lambda: read_only(lambda file: fcntl.fcntl(file, 37, struct.pack("hhqqi", 0, 0, 0, 0, 0))),
        "F_SETLEASE": lambda: read_only(lambda file: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)),
        "FS_IOC_SETFLAGS": lambda: read_only(lambda file: fcntl.ioctl(file, 0x40086602, struct.pack("l", 0x40))),
        "oom_score_adj of the parent": lambda: open(f"/proc/{PARENT}/oom_score_adj", "w").write("1000"),
        "a terminal": lambda: open("/dev/tty", "w").write("x"),
        "quotactl": lambda: call("quotactl", 0, 0, 0, 0),
    },
    "network": {
        "inet": lambda: socket.socket(socket.AF_INET),
        "inet6": lambda: socket.socket(socket.AF_INET6),
        "unix": lambda: socket.socket(socket.AF_UNIX),
        "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
        "vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
        "io_uring_setup": lambda: call("io_uring_setup", 1, b"\0" * 120),
    },
    "the kernel": {
        name: (lambda name=name: call(name, *ZEROS))
        for name in (
            "bpf", "mount", "umount2", "pivot_root", "fsopen", "open_tree", "mount_setattr", "name_to_handle_at",
            "open_by_handle_at", "init_module", "finit_module", "swapon", "syslog", "acct", "iopl", "sethostname",
            "settimeofday", "reboot", "personality", "fanotify_init", "landlock", "seccomp", "capset", "setresuid",
        )
    }
    | {"chroot": lambda: os.chroot(".")},
    "at last": {"many files": lambda: [os.pipe() for _ in range(1000)]},
}  # fmt: skip

if __name__ == "__main__":
    results = {}
    for kind, attempts in ATTEMPTS.items():
        for name, attempt in attempts.items():
            try:
                attempt()
                results[f"{kind}: {name}"] = "worked"
            except (OSError, ValueError) as error:
                number = getattr(error, "errno", None)
                results[f"{kind}: {name}"] = errno.errorcode[number] if number else str(error)
    print(json.dumps(results))
