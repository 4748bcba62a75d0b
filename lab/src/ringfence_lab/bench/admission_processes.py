"""Times joins of processes over sockets, from the start command until the last worker is admitted. Needs no torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ringfence.config.settings import Settings
from ringfence.runtime.control import Bye
from ringfence.session.join import join, listen
from ringfence_lab.bench.json_pipe import Message, run_worker
from ringfence_lab.bench.worker_pool import JOINS, BenchError, Placement, WorkerPool

_JOIN_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Join:
    """One join of all workers."""

    seconds: float  # until the last worker was admitted
    cpu: float  #     of all workers together


@dataclass(frozen=True)
class Joins:
    """Times of joins. The start of the interpreters is not part of the first join."""

    workers: int
    start_seconds: float
    rounds: tuple[Join, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(workers: int, rounds: int, say: Callable[[str], None] = lambda what: None) -> Joins:
    """Start processes, let them join `rounds` times, each time in a new generation, and check that they agree."""
    started = time.monotonic()
    say(f"{workers} processes start")
    with WorkerPool([Placement()] * workers, module=JOINS) as pool:
        start = time.monotonic() - started
        found = []
        for generation in range(rounds):
            say(f"{workers} processes: join {generation + 1} of {rounds}")
            began = time.monotonic()
            answers = pool.tell("join", generation=str(generation))
            seconds = time.monotonic() - began
            if len({(answer["roster"], answer["workers"]) for answer in answers}) != 1:
                raise BenchError("the benchmark's processes are not in one session")
            found.append(Join(seconds, sum(answer["cpu"] for answer in answers)))
    return Joins(workers, start, tuple(found))


# -- in the processes -----------------------------------------------------------------------------------------------


class FolderStore:
    """A store for workers of one machine: a file for each key, which appears whole or not at all."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def set(self, key: str, value: str, /) -> None:
        file = self._file(key)
        builder = file.with_suffix(f".{os.getpid()}")
        builder.write_text(value, encoding="ascii")
        builder.replace(file)

    def get(self, key: str, /) -> bytes:
        return self._file(key).read_bytes()

    def check(self, keys: list[str], /) -> bool:
        return all(self._file(key).exists() for key in keys)

    def _file(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


class JoiningWorker:
    """A worker that joins on command."""

    def __init__(self, config: Message) -> None:
        self._rank, self._size = config["rank"], config["size"]
        self._store = FolderStore(Path(config["store"]))
        self._settings = Settings.from_environment(os.environ)

    def hello(self) -> Message:
        return {"torch": "torch" in sys.modules}

    def join(self, generation: str) -> Message:
        settings = replace(self._settings, generation=generation)
        cpu = time.process_time()
        with listen(settings) as listener:
            address = settings.link_address(listener.getsockname()[:2])
            member = join(self._store, self._rank, self._size, settings, address, _JOIN_SECONDS, b"")
        cpu = time.process_time() - cpu
        for edge in member.edges:
            edge.send(Bye(self._rank))
            edge.close()
        return {"cpu": cpu, "roster": member.roster.digest.hex(), "workers": len(member.roster.entries)}


if __name__ == "__main__":
    run_worker(JoiningWorker)
