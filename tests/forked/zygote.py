"""The process that forks interpreters: it has one thread and imported packages, and runs no program itself."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from typing import Any

from tests.forked import asking, attributes, interpreter
from tests.forked.command import Command, fixed
from tests.forked.packages import Packages

MESSAGE_BYTES = 1 << 18
MOST_DESCRIPTORS = 250


def main(descriptor: int) -> None:
    """Serve requests. Returns, or raises what ends an interpreter, in a forked process whose program has ended."""
    path = sys.path[1:]
    own = fixed(os.environ)
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # entry points are run when the program imports torch
    packages = Packages()
    packages.preload()
    if any(name == "ringfence" or name.startswith("ringfence.") for name in sys.modules):
        sys.exit("the zygote has imported ringfence")
    if len(os.listdir("/proc/self/task")) != 1:
        sys.exit("the zygote has more than one thread: set OMP_NUM_THREADS=1, as scripts/test does")
    # Called in reverse order: after what a program registers, before the destructors of torch's libraries, which take 0.2 s.
    attributes.LIBC.on_exit(attributes.LIBC._exit, None)
    attributes.LIBC.__cxa_atexit(attributes.LIBC.fflush, None, None)
    os.setpgid(
        0, 0
    )  # in the session of the process that asks, but not in its group, where a test may look for what is left
    attributes.ignore_signals()
    gc.collect()
    gc.freeze()
    channel: socket.socket | None = socket.socket(fileno=descriptor)
    while channel is not None:
        request, status = next_request(channel)
        try:
            channel = become(request, status, own)
        except BaseException:
            os.write(status, traceback.format_exc().encode())
            os._exit(1)
    interpreter.run(Command(**request["command"]), packages, path)


def next_request(channel: socket.socket) -> tuple[dict[str, Any], int]:
    """Fork for each request. Returns in the forked process, which is then a child of the process that asked."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            ends = os.pidfd_open(os.getpid())
            if os.fork():
                os._exit(0)
            select.select([ends], [], [])  # the kernel gives this process its new parent before
            channel.detach()  # not to close, later, what has its number then
            request = pickle.loads(message)
            status, *others = descriptors
            return request, attributes.arrange_descriptors(others, request["descriptors"], status)
        os.waitpid(between, 0)
        for each in descriptors:
            os.close(each)


def become(request: dict[str, Any], status: int, own: dict[str, str]) -> socket.socket | None:
    """Make of this process what was asked for, and of one more its zygote, for which the channel is returned."""
    status = attributes.hidden(status)
    attributes.apply(request)
    me = os.getpid()
    if request["has_zygote"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            attributes.LIBC.prctl(attributes.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(0)
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            attributes.close_others({0, 1, 2, theirs.fileno()})
            return theirs
        theirs.close()
        channel = socket.socket(fileno=attributes.hidden(ours.detach()))
        asking.install(asking.Zygote(channel, own))
        asking.replace_exec()
    os.chdir(request["folder"])
    attributes.restore_signals(request["ignored"], request["blocked"])
    os.write(status, f"{me}\n".encode())
    os.close(status)
    return None
