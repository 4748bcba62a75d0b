"""The workers of the self-test as processes: start them on the loopback interface, have them run a check, read the answers."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from ringfence import own_process
from ringfence.cli.demo.workers import uninterrupted
from ringfence.cli.selftest.report import LOST, Outcome

COMMAND: Final = tuple(own_process.command("ringfence.cli.selftest.worker"))
LOOPBACK: Final = "127.0.0.1"
LEAVING_SECONDS: Final = 5.0
AFTER_LOSS_SECONDS: Final = 35.0  # for the others to notice, at the latest by the timeout of their collective


@dataclass(frozen=True)
class Plan:
    """How workers are started. `command` is the program of a worker; tests pass one of their own."""

    device: str
    count: int
    quick: bool
    command: Sequence[str] = COMMAND


class Workers:
    """A group of workers. Their files are in `folder`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        from ringfence.config.private_files import new_secret_file  # needs cryptography

        self._workers: list[_Worker] = []
        name = secrets.token_hex(4)
        try:
            secret = folder / f"{name}.secret"
            new_secret_file(secret)
            for rank in range(plan.count):
                with uninterrupted():
                    self._workers.append(_Worker(plan, rank, folder / f"{name}.store", secret))
        except BaseException:
            self.end()
            raise

    def ask(self, check: str, seconds: float) -> list[Outcome]:
        """Have all workers run a check; return their outcomes, worker 0 first."""
        for worker in self._workers:
            worker.send(check)
        return self.answers(seconds)

    def answers(self, seconds: float) -> list[Outcome]:
        """Return the next answer of each worker. A worker that does not answer in time, or has ended, is lost."""
        limit = time.monotonic() + seconds
        outcomes = []
        for worker in self._workers:
            outcomes.append(worker.answer(limit))
            if outcomes[-1].state == LOST:
                limit = min(limit, time.monotonic() + AFTER_LOSS_SECONDS)
        return outcomes

    def end(self) -> None:
        """End all workers at once: nobody uses their group any more."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait()
        self._workers = []


class _Worker:
    def __init__(self, plan: Plan, rank: int, store: Path, secret: Path) -> None:
        from ringfence.config.settings import inherited  # needs cryptography

        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `wait`
        self._channel, theirs = socket.socketpair()
        self._received = b""
        extra = {
            "RINGFENCE_SECRET_FILE": str(secret),
            "RINGFENCE_INTERFACE": LOOPBACK,
            "RINGFENCE_SAME_HOST": "sealed",  # each worker stands for a machine of its own
        }
        arguments = [plan.device, str(rank), str(plan.count), "quick" if plan.quick else "full", str(store)]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*plan.command, *arguments, str(theirs.fileno())],
                env={**inherited(os.environ), "OMP_NUM_THREADS": "1", **extra},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )

    def send(self, check: str) -> None:
        with contextlib.suppress(OSError):  # it has ended: reading its answer says so
            self._channel.sendall(json.dumps({"check": check}).encode() + b"\n")

    def answer(self, limit: float) -> Outcome:
        try:
            while b"\n" not in self._received:
                self._channel.settimeout(max(0.01, limit - time.monotonic()))
                chunk = self._channel.recv(1 << 16)
                if not chunk:
                    raise ConnectionResetError
                self._received += chunk
        except TimeoutError:
            return Outcome(LOST, "did not answer in time")
        except ConnectionResetError:
            return Outcome(LOST, self._how_it_ended())
        line, _, self._received = self._received.partition(b"\n")
        return Outcome(**json.loads(line))

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVING_SECONDS)
        code = self._process.returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        self._log.seek(0)
        last = next((line.strip() for line in reversed(self._log.read().splitlines()) if line.strip()), "")
        return f"its process ended with {how}" + (f" ({last})" if last else "")

    def kill(self) -> None:
        self._channel.close()
        self._process.kill()

    def wait(self) -> None:
        self._process.wait()
        self._log.close()
