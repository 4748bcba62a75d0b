"""Times joins of processes over sockets, from the start command until the last worker is admitted."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from ringfence import own_process
from ringfence.private_files import new_secret_file
from ringfence.settings import inherited
from ringfence_lab.bench.channel import Channel, Message
from ringfence_lab.bench.worker_pool import BenchError

_ANSWER_SECONDS: Final = 120.0
_LOG_BYTES: Final = 2000


@dataclass(frozen=True)
class Round:
    """One join of all workers."""

    seconds: float  # until the last worker was admitted
    cpu: float  #     of all workers together


@dataclass(frozen=True)
class Joins:
    """Times of joins. The start of the interpreters is not part of the first join."""

    workers: int
    start_seconds: float
    rounds: tuple[Round, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(workers: int, rounds: int, say: Callable[[str], None] = lambda what: None) -> Joins:
    """Start processes, let them join `rounds` times, each time in a new generation, and check that they agree."""
    started = time.monotonic()
    with _Processes(workers) as processes:
        say(f"{workers} processes start")
        processes.answers()
        start = time.monotonic() - started
        found = []
        for generation in range(rounds):
            say(f"{workers} processes: join {generation + 1} of {rounds}")
            began = time.monotonic()
            processes.tell({"generation": str(generation)})
            answers = processes.answers()
            seconds = time.monotonic() - began
            if len({(answer["roster"], answer["workers"]) for answer in answers}) != 1:
                raise BenchError("the benchmark's processes are not in one session")
            found.append(Round(seconds, sum(answer["cpu"] for answer in answers)))
    return Joins(workers, start, tuple(found))


class _Processes:
    def __init__(self, count: int) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="ringfence-admission-")
        self._folder = Path(self._temporary.name)
        self._workers: list[tuple[subprocess.Popen[bytes], Channel]] = []
        new_secret_file(self._folder / "secret")
        (self._folder / "store").mkdir()
        try:
            for rank in range(count):
                self._workers.append(self._start(rank, count))
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, count: int) -> tuple[subprocess.Popen[bytes], Channel]:
        ours, theirs = socket.socketpair()
        ours.settimeout(_ANSWER_SECONDS)
        config = {
            "rank": rank,
            "size": count,
            "store": str(self._folder / "store"),
            "channel": theirs.fileno(),
            "parent": os.getpid(),
        }
        environment = inherited(os.environ)
        environment.update(
            RINGFENCE_SECRET_FILE=str(self._folder / "secret"),
            RINGFENCE_RUN_ID=self._folder.name,
            RINGFENCE_INTERFACE="127.0.0.1",
        )
        with theirs, self._log(rank).open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                own_process.command("ringfence_lab.bench.admission_worker", json.dumps(config)),
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return process, Channel(ours)

    def _log(self, rank: int) -> Path:
        return self._folder / f"worker{rank}.log"

    def tell(self, message: Message) -> None:
        for _, channel in self._workers:
            channel.send(message)

    def answers(self) -> list[Message]:
        """Receive one answer from each worker, in any order: after a failure the others may never answer."""
        found: dict[int, Message] = {}
        while len(found) < len(self._workers):
            waiting = {channel: rank for rank, (_, channel) in enumerate(self._workers) if rank not in found}
            ready, _, _ = select.select(list(waiting), [], [], _ANSWER_SECONDS)
            if not ready:
                raise BenchError(f"worker {', '.join(map(str, waiting.values()))} said nothing")
            for channel in ready:
                message = channel.receive()
                if message is None:
                    words = self._log(waiting[channel]).read_text(errors="replace")[-_LOG_BYTES:]
                    raise BenchError(f"worker {waiting[channel]} of the benchmark ended early:\n{words}")
                found[waiting[channel]] = message["done"]
        return [found[rank] for rank in range(len(self._workers))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for process, channel in self._workers:
            channel.close()
            process.kill()
            process.wait()
        self._temporary.cleanup()
