"""The process that forks the workers of `tests.pool`: it has imported torch once, for all of them.

It has imported nothing of ringfence that a forked child would refuse to use: a worker imports that itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = (  # by `import torch` and by the first import of the backend
    *("torch", "torch.distributed", "torch.distributed.nn.functional", "numpy", "OpenSSL.SSL"),
    *(
        "cryptography.x509",
        "cryptography.hazmat.primitives.ciphers.aead",
        "cryptography.hazmat.primitives.asymmetric.ec",
    ),
)
ANSWER_SECONDS = 60.0  # for the first worker, torch is imported
MESSAGE_BYTES = 1 << 18
PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """A worker that the server forked, with the methods of subprocess.Popen that the pool uses."""

    def __init__(self, status: int) -> None:
        self._status = os.fdopen(status, "rb", buffering=0)  # a line with the process id; at its end, one with the code
        self.returncode: int | None = None
        self.pid = self._number(ANSWER_SECONDS)

    def _number(self, seconds: float) -> int:
        if not select.select([self._status], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired("a worker of the test pool", seconds)
        text = self._status.readline()
        if not text:
            raise RuntimeError("the server of the test pool has ended")
        return int(text)

    def wait(self, timeout: float) -> int:
        """Return the exit status, as subprocess does: a signal is negative."""
        if self.returncode is None:
            self.returncode = self._number(timeout)
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class _Server:
    """This side of the server: one for each process that has a pool."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.pool_server", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path),
                cwd=ROOT,
                start_new_session=True,
            )
        self._socket = ours

    @property
    def usable(self) -> bool:
        return self._process.poll() is None

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], channel: int, log: int) -> ForkedProcess:
        reading, writing = os.pipe()
        try:
            request = pickle.dumps((list(arguments), dict(environment)))
            socket.send_fds(self._socket, [request], [channel, log, writing])
        finally:
            os.close(writing)
        return ForkedProcess(reading)


_lock = threading.Lock()
_server: _Server | None = None


def start(
    arguments: Sequence[str], environment: Mapping[str, str], channel: socket.socket, log: IO[bytes]
) -> ForkedProcess:
    """Fork a worker: `tests.pool_worker` with the descriptor of this channel and these arguments, and this environment."""
    global _server
    with _lock:
        if _server is None or not _server.usable:
            _server = _Server()
        return _server.fork(arguments, environment, channel.fileno(), log.fileno())


# -- the process of the server ----------------------------------------------------------------------------------------


def end_with_parent(parent: int) -> None:
    """End this process with its parent. A worker that is stuck in a collective would not notice that pytest has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(requests: socket.socket) -> None:
    """Fork a worker for each request, and report the ends of all, until the other endpoint is closed."""
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()
    running: dict[int, int] = {}  # process id: where its end is reported
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
            _reap(running)
        if requests in ready:
            message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 3)
            if not message:
                return
            arguments, environment = pickle.loads(message)
            channel, log, status = descriptors
            process = os.fork()
            if process == 0:
                for each in (requests, woken, wakes):
                    each.close()
                for each_status in (*running.values(), status):
                    os.close(each_status)
                become_worker(arguments, environment, channel, log)
            running[process] = status
            os.write(status, f"{process}\n".encode())
            os.close(channel)
            os.close(log)


def _reap(running: dict[int, int]) -> None:
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        report = running.pop(process)
        with contextlib.suppress(BrokenPipeError):
            os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(report)


def become_worker(arguments: Sequence[str], environment: Mapping[str, str], channel: int, log: int) -> None:
    """Run `tests.pool_worker` in this process, and end it."""
    code = 1
    try:
        server = os.getppid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["pool_worker", str(channel), *arguments, str(server)]
        from tests import pool_worker

        pool_worker.main()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:])
    end_with_parent(parent)
    for name in (*PRELOADED, "tests.pool_worker"):
        __import__(name)
    serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main()
