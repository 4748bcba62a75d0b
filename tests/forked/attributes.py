"""What the kernel keeps for a process and an exec passes on: read in the process that asks, set in the forked one."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import threading
from collections.abc import Sequence
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_REC, MS_SLAVE, MNT_DETACH = 0x4000, 0x80000, 2
NAMESPACES = (
    "cgroup",
    "ipc",
    "mnt",
    "pid_for_children",
    "user",
    "uts",
)  # and the one of the network, which can be entered
NETWORK = "/proc/thread-self/ns/net"
LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"]
SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
FIRST_HIDDEN = 1000  # descriptors that a program is not to see among its own


def check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def inherited() -> dict[str, Any]:
    """Return what a process that this thread starts inherits from it and a forked one is to have too."""
    mask = os.umask(0)
    os.umask(mask)
    return {
        "umask": mask,
        "network": (os.readlink(NETWORK), f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"),
        "group": os.getpgid(0),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "ignored": [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN],
        "limits": {kind: resource.getrlimit(kind) for kind in LIMITS},
        "affinity": os.sched_getaffinity(0),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
    }


def unchangeable() -> tuple[object, ...]:
    """Return what a forked process cannot change: a zygote that differs in it cannot be used."""
    namespaces = [os.readlink(f"/proc/thread-self/ns/{name}") for name in NAMESPACES]
    return (
        os.getsid(0),
        os.getresuid(),
        os.getresgid(),
        sorted(os.getgroups()),
        namespaces,
        os.readlink("/proc/self/root"),
    )


def apply(wanted: dict[str, Any]) -> None:
    """Give this process the attributes that `inherited` returned in another, and those of its Popen."""
    name, path = wanted["network"]
    if name != os.readlink(NETWORK):
        enter_network(path)
    if wanted["namespace"]:
        enter_namespace(wanted["namespace"])
    if wanted["new_session"]:
        os.setsid()
    else:
        group = wanted["new_group"] if wanted["new_group"] is not None else wanted["group"]
        if os.getpgid(0) != group:
            os.setpgid(0, group)
    os.umask(wanted["umask"])
    for kind, limit in wanted["limits"].items():
        if resource.getrlimit(kind) != limit:
            resource.setrlimit(kind, limit)
    if os.sched_getaffinity(0) != wanted["affinity"]:
        os.sched_setaffinity(0, wanted["affinity"])
    if os.getpriority(os.PRIO_PROCESS, 0) != wanted["priority"]:
        os.setpriority(os.PRIO_PROCESS, 0, wanted["priority"])


def enter_network(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    check(LIBC.setns(descriptor, CLONE_NEWNET), path)
    os.close(descriptor)


def enter_namespace(path: str) -> None:
    """As `ip netns exec` does, whose /sys shows the interfaces of the namespace."""
    enter_network(path)
    check(LIBC.unshare(CLONE_NEWNS), "unshare")
    check(LIBC.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None), "mount /")
    LIBC.umount2(b"/sys", MNT_DETACH)
    check(LIBC.mount(os.fsencode(os.path.basename(path)), b"/sys", b"sysfs", 0, None), "mount /sys")


def ignore_signals() -> None:
    """Of a zygote: it ends with the process that it belongs to, not by what reaches its process group."""
    for number in SIGNALS:
        if number != signal.SIGCHLD and number < signal.SIGRTMIN:
            signal.signal(number, signal.SIG_IGN)


def restore_signals(ignored: Sequence[int], blocked: Sequence[int]) -> None:
    """As an interpreter has them after an exec: what was ignored stays so, and Python ignores two and handles SIGINT."""
    for number in SIGNALS:
        stays = number in ignored or number in IGNORED_BY_PYTHON
        wanted: Any = signal.SIG_IGN if stays else signal.SIG_DFL
        if number == signal.SIGINT and not stays:
            wanted = signal.default_int_handler
        if signal.getsignal(number) != wanted:
            with contextlib.suppress(OSError, ValueError):  # of those that the C library uses
                signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def arrange_descriptors(descriptors: Sequence[int], targets: Sequence[int], other: int) -> int:
    """Have these descriptors under these numbers, and no others but one more; return its number."""
    above = max(*targets, *descriptors, other) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors]
    other = fcntl.fcntl(other, fcntl.F_DUPFD, above)
    for each, target in zip(moved, targets, strict=True):
        os.dup2(each, target)
    close_others({*targets, other})
    return other


def close_others(kept: set[int]) -> None:
    for number in open_descriptors():
        if number not in kept:
            with contextlib.suppress(OSError):  # the one of the listing
                os.close(number)


def open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def hidden(descriptor: int) -> int:
    """Move a descriptor out of the numbers that a program's own get; a program that exec replaces it with does not have it."""
    first = min(FIRST_HIDDEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 8)
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(first, 3))
    os.close(descriptor)
    return moved
