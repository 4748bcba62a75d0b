"""The workers of `demo` or `selftest` as processes of this machine: each answers a line that it is sent with a line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

LEAVING_SECONDS: Final = 5.0


class WorkerProcess:
    """One worker. `command` gets the descriptor of its channel as a last argument, `extra` is added to its environment."""

    def __init__(self, command: Sequence[str], extra: Mapping[str, str]) -> None:
        from ringfence.config.settings import inherited  # late, so that commands start where cryptography is missing

        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `end`, as the worker writes to it
        self._channel, theirs = socket.socketpair()
        self._received = b""
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*command, str(theirs.fileno())],
                env={**inherited(os.environ), "OMP_NUM_THREADS": "1", **extra},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )

    def send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it has ended: reading its answer says so
            self._channel.sendall(line.encode() + b"\n")

    def answer(self, limit: float) -> Any:
        """Return its next answer. Raises TimeoutError at `limit`, and ConnectionResetError if it has ended."""
        while b"\n" not in self._received:
            self._channel.settimeout(max(0.01, limit - time.monotonic()))
            chunk = self._channel.recv(1 << 16)
            if not chunk:
                raise ConnectionResetError
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def how_it_ended(self) -> str:
        """Describe how a worker that hung up has ended, with the last line that it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVING_SECONDS)
        code = self._process.returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        self._log.seek(0)
        last = next((line.strip() for line in reversed(self._log.read().splitlines()) if line.strip()), "")
        return f"its process ended with {how}" + (f" ({last})" if last else "")

    def leave(self, *, at_once: bool) -> None:
        """Hang up: a worker then leaves its group and ends. `at_once`: it is killed."""
        self._channel.close()
        if at_once:
            self._process.kill()

    def end(self) -> None:
        """Wait for the end of a worker that was told to leave."""
        try:
            self._process.wait(LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class WorkerGroup:
    """Workers, given as commands with what is added to their environments."""

    def __init__(self, workers: Iterable[tuple[Sequence[str], Mapping[str, str]]]) -> None:
        self._workers: list[WorkerProcess] = []
        try:
            for command, extra in workers:
                with _uninterrupted():
                    self._workers.append(WorkerProcess(command, extra))
        except BaseException:
            self.end(at_once=True)
            raise

    def send(self, line: str) -> None:
        """Send a line to all workers."""
        for worker in self._workers:
            worker.send(line)

    def end(self, *, at_once: bool) -> None:
        """Have all workers leave their group, or kill them, and wait for their end."""
        for worker in self._workers:
            worker.leave(at_once=at_once)
        for worker in self._workers:
            worker.end()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM: a worker that was started and is not yet in a list would be left behind."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for each in came:
        signal.raise_signal(each)
