"""Kill workers at random moments, and look for what they leave behind.

    python -m tests.integration.kills 300 --where shared-memory
    python -m tests.integration.kills 300 --where channels

Two to four workers, which share memory or have two channels between each other, call collectives and point-to-point transfers
of random sizes. One of them, or all but one, are killed. The others must raise an error that names a killed worker, long before
any timeout; after they have destroyed their groups, nothing of the session may be left: no mapping or descriptor of shared
memory, no other descriptor, no thread, no socket, and no file that a worker had in the shared memory of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from ringfence import keys
from ringfence.errors import RingfenceError
from tests.integration.process_signal import ProcessSignal
from tests.limits import FAR, FAR_OUTAGE, HANG, no_early_blame
from tests.pool import IN_SHARED_MEMORY, Pool, values

WORLDS: Final = (2, 3, 4)
SMALLEST: Final = 4 << 10  # bytes of a tensor
LONGEST: Final = (
    0.5  # seconds of work before a kill; the first milliseconds, when links are made, are as likely as the rest
)
MEMORY: Final = "memfd:ringfence"
FILES: Final = "/dev/shm/"  # shared memory of the machine that has names


class Where(NamedTuple):
    """What is between the workers."""

    backend: str
    env: dict[str, str]
    largest: int  # bytes of a tensor


PLACES: Final = {
    "shared-memory": Where(IN_SHARED_MEMORY, {}, 8 << 20),
    "channels": Where("ringfence", {"RINGFENCE_CHANNELS": "2"}, 32 << 20),  # parts of more than 2 MiB use both
}


class Traces(NamedTuple):
    """What a process holds."""

    mappings: int  # of shared memory
    descriptors: dict[str, int]  # by kind
    threads: list[str]  # of ringfence


class Report(NamedTuple):
    """What happened to a survivor."""

    kind: str
    message: str
    raised: float  # by the machine's monotonic clock
    sockets: list[str]  # names of the abstract sockets of the session's workers
    left: Traces  # after the group was destroyed


class Kill(NamedTuple):
    """One kill: seconds until each survivor raised, and what is wrong."""

    seconds: list[float]
    problems: list[str]


# -- in the workers ----------------------------------------------------------------------------------------------------


def look() -> Traces:
    """Return what this process holds."""
    kinds: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor of the folder itself
            continue
        kinds[MEMORY if MEMORY in target else target.split(":")[0].split("/")[-1]] += 1
    mappings = sum(MEMORY in line for line in Path("/proc/self/maps").read_text().splitlines())
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ringfence")]
    return Traces(mappings, dict(kinds), threads)


def all_reduce(count: int, _: random.Random) -> None:
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    assert bool((tensor == dist.get_world_size()).all())


def broadcast(count: int, chance: random.Random) -> None:
    root = chance.randrange(dist.get_world_size())
    tensor = torch.full((count,), float(dist.get_rank() == root))
    dist.broadcast(tensor, root)
    assert bool((tensor == 1).all())


def all_gather(count: int, _: random.Random) -> None:
    world = dist.get_world_size()
    gathered = torch.empty(world * (count // world + 1))
    dist.all_gather_into_tensor(gathered, torch.full((count // world + 1,), float(dist.get_rank())))
    assert bool((gathered.view(world, -1) == torch.arange(float(world))[:, None]).all())


def reduce_scatter(count: int, _: random.Random) -> None:
    world = dist.get_world_size()
    part = torch.empty(count // world + 1)
    dist.reduce_scatter_tensor(part, torch.ones(world * len(part)))
    assert bool((part == world).all())


def all_to_all(count: int, _: random.Random) -> None:
    world = dist.get_world_size()
    received = torch.empty(world * (count // world + 1))
    dist.all_to_all_single(received, torch.full_like(received, float(dist.get_rank())))
    assert bool((received.view(world, -1) == torch.arange(float(world))[:, None]).all())


def pass_on(count: int, _: random.Random) -> None:
    """Send to the next worker, and receive from the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = torch.empty(count)
    sending = dist.isend(torch.full((count,), float(rank)), (rank + 1) % world)
    dist.recv(received, (rank - 1) % world)
    if sending is not None:
        sending.wait()
    assert bool((received == (rank - 1) % world).all())


CALLS: tuple[Callable[[int, random.Random], None], ...] = (
    all_reduce,
    all_reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    all_to_all,
    pass_on,
    pass_on,
)


@no_early_blame
def work_until_a_worker_is_killed(seed: int, path: str, largest: int) -> Report:
    """Call collectives, in the same order on every worker, until one raises; then destroy the group."""
    session = dist.group.WORLD._session
    key = session.engine.keys.session_key
    sockets = [keys.local_socket(key, rank)[1:].decode() for rank in range(dist.get_world_size())]
    del session, key  # as in a script: nothing but the process group refers to the session
    chance = random.Random(seed)
    with ProcessSignal(path) as started:
        started.notify()
    try:
        while True:
            size = int(SMALLEST * (largest / SMALLEST) ** chance.random())
            chance.choice(CALLS)(size // 4, chance)
    except RingfenceError as error:
        raised = time.monotonic()
        kind, message = type(error).__name__, str(error)
    dist.destroy_process_group()
    return Report(kind, message, raised, sockets, look())


# -- in the test -------------------------------------------------------------------------------------------------------


def shared_files(pids: list[int]) -> set[str]:
    """Return the files in the machine's shared memory that these processes have open or mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line[line.index(FILES) :] for line in maps if FILES in line}
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(link))
    return {path for path in found if path.startswith(FILES) and os.path.exists(path)}


def kill(pool: Pool, where: Where, chance: random.Random, folder: Path) -> Kill:
    """Kill some workers of a new session at a random moment."""
    world = chance.choice(WORLDS)
    victims = chance.sample(range(world), chance.choice((1, 1, 1, world - 1)))
    before = pool.check(look, world, None)
    pids = [pool.workers[rank].process.pid for rank in range(world)]
    known = shared_files(pids)
    values(pool.join(where.backend, world, seconds=FAR, env=where.env | FAR_OUTAGE, renew=True))
    with ProcessSignal(folder / "started") as started:
        arguments = chance.randrange(1 << 30), started.path, where.largest
        call = pool.start(work_until_a_worker_is_killed, world, arguments)
        started.wait(world, HANG)
        ended = wait([pool.workers[rank].pidfd for rank in range(world)], LONGEST * chance.random() ** 2)
        shared = shared_files(pids) - known
        killed = time.monotonic()
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        results = call.wait(HANG)
    problems = ["a worker ended before the kill"] if ended else []
    survivors = [rank for rank in range(world) if rank not in victims]
    for rank in survivors:
        problems += [f"worker {rank} of {world}: {text}" for text in _problems(results[rank], victims, before[rank])]
    reports = [results[rank] for rank in survivors if isinstance(results[rank], Report)]
    in_use = Path("/proc/net/unix").read_text()
    problems += [f"the socket {name} is left" for name in (reports[0].sockets if reports else ()) if name in in_use]
    problems += [f"{path} is left" for path in shared if os.path.exists(path)]
    return Kill([report.raised - killed for report in reports], problems)


def _problems(report: Any, victims: list[int], before: Traces) -> list[str]:
    """Return what is wrong with a survivor."""
    if not isinstance(report, Report):
        return [str(report)]
    found = []
    if report.kind not in ("PeerLostError", "AbortedError"):
        found.append(f"raised {report.kind}: {report.message}")
    elif not any(f"worker {victim}" in report.message for victim in victims):
        found.append(f"names none of {victims}: {report.message}")
    if report.left != before:
        found.append(f"held {before} before the session, and {report.left} after it")
    return found


def shared_kib() -> int:
    """Shared memory in use, of all processes of the machine."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Shmem"].split()[0])


def kills(
    pool: Pool, where: Where, count: int, folder: Path, seed: int = 0, show: Callable[[str], None] = lambda _: None
) -> list[Kill]:
    """Kill `count` times; tell `show` how it goes on."""
    chance = random.Random(seed)
    done = []
    for number in range(count):
        done.append(kill(pool, where, chance, folder))
        for problem in done[-1].problems:
            show(f"kill {number} of seed {seed}: {problem}")
        if (number + 1) % 25 == 0:
            show(summary(done))
    return done


def summary(done: list[Kill]) -> str:
    seconds = [each for kill in done for each in kill.seconds]
    problems = sum(len(kill.problems) for kill in done)
    return (
        f"{len(done)} kills, {len(seconds)} survivors raised after {statistics.median(seconds):.3f} s (median), "
        f"{max(seconds):.3f} s (worst); {problems or 'no'} problems"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.integration.kills", description="Kill workers at random moments."
    )
    parser.add_argument("count", type=int, help="how often")
    parser.add_argument("--where", choices=PLACES, default="shared-memory", help="what is between the workers")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ringfence-kills-") as folder, Pool() as pool:
        memory = shared_kib()
        done = kills(
            *(pool, PLACES[options.where], options.count, Path(folder), options.seed),
            lambda text: print(text, flush=True),
        )
        pool.leave()
        print(summary(done))
        print(f"shared memory of the machine: {memory} KiB before, {shared_kib()} KiB after")
    sys.exit(any(kill.problems for kill in done))


if __name__ == "__main__":
    from tests.integration import kills as module  # workers import it by this name

    module.main()
