"""Worker processes for tests: started once, joined into process groups on demand, replaced when they hang or die."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.forked.asking import Forked
from tests.limits import FAR, HANG

ROOT = Path(__file__).resolve().parent.parent
LOG_TAIL = 4000
STACKS_SECONDS = 20.0  # time for a hanging worker to write its stacks before it is killed
LAST_FRAME = "in <module>"  # of the main thread, whose stack is written last

Environment = Mapping[str, str | None]  # None removes the variable


@dataclass(frozen=True)
class Failure:
    """The failure of a rank, in place of its result."""

    type: str  # the exception's type name, or "Hang", or "Death"
    message: str
    traceback: str = ""
    bases: tuple[str, ...] = ()  # names of the exception's base classes, its own included

    def __str__(self) -> str:
        return f"{self.type}: {self.message}\n{self.traceback}"


class WorkersFailed(AssertionError):
    """At least one rank failed where none should have."""


def values(results: Sequence[Any]) -> list[Any]:
    """Return the results if no rank failed; otherwise raise WorkersFailed with all details."""
    failed = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, Failure)]
    if failed:
        raise WorkersFailed("\n".join(failed))
    return list(results)


@dataclass(frozen=True)
class Group:
    """A default process group that the workers have joined, or will join."""

    backend: str
    world: int
    seconds: float
    environment: tuple[tuple[tuple[str, str | None], ...], ...]  # one set of variables for each rank


# ringfence, whose workers share a machine, or every second one does; otherwise each stands for a machine of its own.
IN_SHARED_MEMORY = "shared"
ON_TWO_MACHINES = "machines"
MACHINES = ("127.0.1.1", "127.0.1.2")  # what the roster lists for them


class Worker:
    """A worker process and the pipe to it."""

    def __init__(self, directory: Path, name: str, prefix: Sequence[str], secret_file: Path) -> None:
        self.log = directory / f"{name}.log"
        self.stacks = directory / f"{name}.stacks"
        ours, theirs = socket.socketpair()
        environment = dict(
            os.environ,
            OMP_NUM_THREADS="1",
            PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            RINGFENCE_SECRET_FILE=str(secret_file),
        )
        with self.log.open("wb") as log, theirs:
            self.process = self._started(prefix, environment, theirs, log)
        self.connection = Connection(ours.detach())
        self.pidfd = os.pidfd_open(self.process.pid)

    def _started(
        self, prefix: Sequence[str], environment: dict[str, str], channel: socket.socket, log: IO[bytes]
    ) -> Forked:
        """In a session of its own: Ctrl-C reaches pytest only, and a kill reaches the worker's loader children too."""
        arguments = [str(channel.fileno()), str(self.stacks), str(os.getpid())]
        return Forked(
            [*prefix, sys.executable, "-m", "tests.pool_worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[channel.fileno()],
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )

    def send(self, command: tuple[Any, ...]) -> None:
        # `receive` reports a dead worker. Plain pickle: multiprocessing's would pass tensors as descriptors.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(command))

    def receive(self) -> Any:
        """Return the reply; a closed pipe is a Failure."""
        try:
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            pass
        code = self.process.wait(timeout=HANG)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return Failure("Death", how, self.read_log())

    def give_up(self, seconds: float) -> Failure:
        """Make a hanging worker write its stacks, then kill it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_SECONDS
        while LAST_FRAME not in self.read_stacks() and time.monotonic() < deadline:
            wait([self.pidfd], 0.05)
        stacks = self.read_stacks()
        self.end()
        return Failure("Hang", f"no answer within {seconds:g} s", f"{stacks}\n{self.read_log()}")

    def read_stacks(self) -> str:
        return self.stacks.read_text(errors="replace") if self.stacks.exists() else ""

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=HANG)
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


@dataclass
class Call:
    """Pending commands on the first `world` workers of a pool."""

    pool: Pool
    world: int
    results: dict[int, Any] = field(default_factory=dict)

    def wait(self, timeout: float) -> list[Any]:
        """Return the result of every rank; a rank that does not answer within `timeout` seconds is replaced."""
        deadline = time.monotonic() + timeout
        while len(self.results) < self.world and (left := deadline - time.monotonic()) > 0:
            self._collect(left)
        for rank in range(self.world):
            if rank not in self.results:
                self.results[rank] = self.pool.workers[rank].give_up(timeout)
        ordered = [self.results[rank] for rank in range(self.world)]
        if any(isinstance(result, Failure) for result in ordered):
            self.pool.forget(rank for rank, result in enumerate(ordered) if _is_gone(result))
        return ordered

    def _collect(self, seconds: float) -> None:
        pending: dict[Any, int] = {}
        for rank in range(self.world):
            if rank not in self.results:
                worker = self.pool.workers[rank]
                pending[worker.connection] = pending[worker.pidfd] = rank
        for ready in wait(list(pending), seconds):
            rank = pending[ready]
            if rank not in self.results:
                self.results[rank] = self.pool.workers[rank].receive()


def _of_living(results: list[Any]) -> list[Any]:
    """Return the results. Raises WorkersFailed if a worker is gone that had answered the test before."""
    values([result if _is_gone(result) else None for result in results])
    return results


def _is_gone(result: Any) -> bool:
    return isinstance(result, Failure) and result.type in ("Hang", "Death")


class Pool:
    """Workers 0, 1, 2, ... that run module-level functions as the ranks of a process group.

    `prefixes[rank]` is put before a worker's command line, for example `["ip", "netns", "exec", "rf0"]`. Workers are forked
    from a process with torch, with this prefix and with `env` too; with other commands, their interpreters are started.
    """

    def __init__(self, prefixes: Sequence[Sequence[str]] = ()) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ringfence-pool-")
        self.directory = Path(self._directory.name)
        self.secret_file = self.directory / "secret"
        self.new_secret(self.secret_file)
        self.run_id = f"tests-{secrets.token_hex(4)}"
        self.generation = 0
        self.workers: dict[int, Worker] = {}
        self._prefixes = prefixes
        self._started = 0
        self._group: Group | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def new_secret(path: Path) -> Path:
        """Write a new secret to a private file."""
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        return path

    def fresh(self, prefixes: Sequence[Sequence[str]] = ()) -> Pool:
        """Return a separate pool, for a test that kills its workers or runs them elsewhere. Use it in a `with` statement."""
        return Pool(prefixes)

    def run(
        self,
        function: Callable[..., Any],
        world: int = 4,
        backend: str | None = "ringfence",
        args: Sequence[Any] = (),
        timeout: float = HANG,
        **group: Any,
    ) -> list[Any]:
        """Run `function(*args)` on every rank of the group; return the result or the Failure of each.

        `group` holds the options of `join`. With `backend=None` no group is joined.
        """
        if backend is not None:
            joined = self.join(backend, world, **group)
            if any(isinstance(result, Failure) for result in joined):
                return joined
        else:
            self.leave()
            self._start(world)
        return self.start(function, world, args).wait(timeout)

    def check(self, function: Callable[..., Any], *positional: Any, **keywords: Any) -> list[Any]:
        """Call `run`; raise WorkersFailed if a rank fails."""
        return values(self.run(function, *positional, **keywords))

    def start(self, function: Callable[..., Any], world: int, args: Sequence[Any] = ()) -> Call:
        """Start a function on workers that have joined (or need no group); the caller waits for the Call."""
        for rank in range(world):
            # The path goes along, so that a test's own module can be imported however pytest found it.
            self.workers[rank].send(("run", sys.path, function.__module__, function.__qualname__, tuple(args)))
        return Call(self, world)

    def join(
        self,
        backend: str,
        world: int,
        seconds: float = FAR,
        env: Environment | Sequence[Environment] = (),
        renew: bool = False,
        timeout: float = HANG,
    ) -> list[Any]:
        """Make the first `world` workers join a default group like this one; with `renew`, even if they have one.

        `seconds` is the group's own timeout. `env` is set for the join: one mapping, or one for each rank.
        """
        each = [env] * world if isinstance(env, Mapping) else list(env) or [{}] * world
        group = Group(backend, world, seconds, tuple(tuple(sorted(one.items())) for one in each))
        if self._group == group and not renew and self._are_members(world):
            return [None] * world
        self.leave()
        self._start(world)
        self.generation += 1
        self._group = group
        store = self.directory / f"store-{self.generation}"
        for rank in range(world):
            variables = {
                "RINGFENCE_SECRET_FILE": str(self.secret_file),
                "RINGFENCE_SAME_HOST": "shared" if backend in (IN_SHARED_MEMORY, ON_TWO_MACHINES) else "sealed",
                "RINGFENCE_INTERFACE": MACHINES[rank % 2] if backend == ON_TWO_MACHINES else None,
                "RINGFENCE_RUN_ID": self.run_id,
                "RINGFENCE_GENERATION": str(self.generation),
                **dict(each[rank]),
            }
            name = "ringfence" if backend in (IN_SHARED_MEMORY, ON_TWO_MACHINES) else backend
            self.workers[rank].send(("join", name, rank, world, str(store), seconds, variables))
        return Call(self, world).wait(timeout)

    def _are_members(self, world: int) -> bool:
        """Return whether the group still works on every worker; a test may have ended it."""
        for rank in range(world):
            self.workers[rank].send(("is_member",))
        return all(each is True for each in _of_living(Call(self, world).wait(HANG)))

    def leave(self, timeout: float = HANG) -> None:
        """Make every worker destroy its group, which may fail. Raises WorkersFailed if one hangs or dies then."""
        if self._group is None:
            return
        self._group = None
        world = max(self.workers, default=-1) + 1
        self._start(world)
        for rank in range(world):
            self.workers[rank].send(("leave",))
        _of_living(Call(self, world).wait(timeout))

    def forget(self, gone: Any) -> None:
        """After a failure: drop the group and the workers that are gone; they are restarted when needed."""
        for rank in gone:
            self.workers.pop(rank).end()
        self._must_leave()

    def _must_leave(self) -> None:
        # Not None: the remaining workers have to leave it before they join another.
        if self._group is not None:
            self._group = Group("", 0, 0, ())

    def _start(self, world: int) -> None:
        for rank in range(world):
            if rank not in self.workers:
                prefix = self._prefixes[rank] if rank < len(self._prefixes) else ()
                self._started += 1
                self.workers[rank] = Worker(self.directory, f"{self._started}-rank{rank}", prefix, self.secret_file)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.end()
        self.workers.clear()
        self._directory.cleanup()


def resolve(module: str, qualname: str) -> Callable[..., Any]:
    """Return the function that `Pool.start` named."""
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]
