"""The workers of the self-test: start them on the loopback interface, have them run a check, read the answers."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ringfence import own_process
from ringfence.cli.selftest.report import LOST, Outcome
from ringfence.cli.worker_process import WorkerGroup, WorkerProcess

COMMAND: Final = tuple(own_process.command("ringfence.cli.selftest.worker"))
LOOPBACK: Final = "127.0.0.1"
AFTER_LOSS_SECONDS: Final = 35.0  # for the others to notice, at the latest by the timeout of their collective


@dataclass(frozen=True)
class Plan:
    """How workers are started. `command` is the program of a worker; tests pass one of their own."""

    device: str
    count: int
    quick: bool
    command: Sequence[str] = COMMAND


class Workers(WorkerGroup):
    """A group of workers. Their files are in `folder`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        from ringfence.config.private_files import new_secret_file  # needs cryptography

        name = secrets.token_hex(4)
        secret, store = folder / f"{name}.secret", folder / f"{name}.store"
        new_secret_file(secret)
        extra = {
            "RINGFENCE_SECRET_FILE": str(secret),
            "RINGFENCE_INTERFACE": LOOPBACK,
            "RINGFENCE_SAME_HOST": "sealed",  # each worker stands for a machine of its own
        }
        how = "quick" if plan.quick else "full"
        arguments = [(plan.device, str(rank), str(plan.count), how, str(store)) for rank in range(plan.count)]
        super().__init__(([*plan.command, *each], extra) for each in arguments)

    def ask(self, check: str, seconds: float) -> list[Outcome]:
        """Have all workers run a check; return their outcomes, worker 0 first."""
        self.send(json.dumps({"check": check}))
        return self.answers(seconds)

    def answers(self, seconds: float) -> list[Outcome]:
        """Return the next answer of each worker. A worker that does not answer in time, or has ended, is lost."""
        limit = time.monotonic() + seconds
        outcomes = []
        for worker in self._workers:
            outcomes.append(_answer(worker, limit))
            if outcomes[-1].state == LOST:
                limit = min(limit, time.monotonic() + AFTER_LOSS_SECONDS)
        return outcomes


def _answer(worker: WorkerProcess, limit: float) -> Outcome:
    try:
        return Outcome(**worker.answer(limit))
    except TimeoutError:
        return Outcome(LOST, "did not answer in time")
    except ConnectionResetError:
        return Outcome(LOST, worker.how_it_ended())
