"""Start the demo's two workers as processes, have them all-reduce, and read their answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from ringfence import own_process
from ringfence.cli.worker_process import WorkerGroup, WorkerProcess
from ringfence.errors import RingfenceError

SENTENCE: Final = b"These are weights that nobody but us should read. "  # what the tensor's bytes spell
ANSWER_SECONDS: Final = 240.0  # a busy machine may take long to import torch


class DemoError(RingfenceError):
    """The demo could not run, so it proves nothing either way."""


class Workers(WorkerGroup):
    """Two workers with one backend; `environments` holds what each is to find in its environment."""

    def __init__(self, backend: str, folder: Path, environments: Sequence[Mapping[str, str]]) -> None:
        arguments = [(backend, str(rank), str(folder / f"{backend}.store")) for rank in range(len(environments))]
        commands = [own_process.command("ringfence.cli.demo.worker", *each) for each in arguments]
        super().__init__(zip(commands, environments, strict=True))

    def add_up(self) -> list[dict[str, str]]:
        """Have both add up once; what each answers, worker 0 first."""
        self.send("add up")
        return [_answer(rank, worker) for rank, worker in enumerate(self._workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(at_once=kind is not None)  # after an error, or Ctrl-C, nobody asks how they leave


def _answer(rank: int, worker: WorkerProcess) -> dict[str, str]:
    try:
        answer: dict[str, str] = worker.answer(time.monotonic() + ANSWER_SECONDS)
    except TimeoutError:
        raise DemoError(f"worker {rank} of the demo did not answer within {ANSWER_SECONDS:.0f} s") from None
    except ConnectionResetError:
        raise DemoError(f"worker {rank} of the demo ended early: {worker.how_it_ended()}") from None
    return answer
