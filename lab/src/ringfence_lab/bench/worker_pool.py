"""The worker processes of the benchmark: started together, given the same commands, measured as one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from ringfence import own_process
from ringfence.cli.dev_ca import Authority
from ringfence.config.private_files import new_secret_file
from ringfence.config.settings import inherited
from ringfence.errors import RingfenceError
from ringfence.runtime import staging_times
from ringfence_lab.bench.json_pipe import Message, receive, send

_ANSWER_SECONDS: Final = 600.0
_LEAVING_SECONDS: Final = 5.0
_LOG_BYTES: Final = 2000
TRANSPORTS: Final = "ringfence_lab.bench.worker"  # modules that workers run
RINGS: Final = "ringfence_lab.bench.tee_worker"


class BenchError(RingfenceError):
    """The benchmark failed. The samples measured so far are kept."""


class Placement(NamedTuple):
    """Where one worker runs: a prefix of its command line, its address and its interface.

    On the loopback, each worker stands for a machine of its own and seals what it sends to the others.
    """

    prefix: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    interface: str = "lo"


class WorkerPool:
    """One worker process for each placement. A context manager: leaving it ends the workers.

    With a `device`, such as "sim" or "cuda", the variants are those on device tensors. Workers run `module`; other `settings`
    are for it.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        variants: Sequence[str] = (),
        device: str | None = None,
        module: str = TRANSPORTS,
        **settings: Any,
    ) -> None:
        self.size = len(placements)
        self._module = module
        self._settings = {"variants": list(variants), "device": device, **settings}
        self._temporary = tempfile.TemporaryDirectory(prefix="ringfence-bench-")
        self._folder = Path(self._temporary.name)
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        try:
            new_secret_file(self._folder / "secret")
            Authority.open_or_make(self._folder, None, "bench.example").issue(["ring"], days=1)
            for rank, placement in enumerate(placements):
                self._workers.append(self._start(rank, placement))
            self.facts = self.tell("hello")[0]
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, placement: Placement) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = multiprocessing.Pipe()
        config = {
            "rank": rank,
            "size": self.size,
            "store": str(self._folder / "store"),
            "host": placement.host,
            "folder": str(self._folder),
            **self._settings,
            "channel": theirs.fileno(),
            "parent": os.getpid(),
        }
        environment = inherited(os.environ)
        environment.update(
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME=placement.interface,
            RINGFENCE_SECRET_FILE=str(self._folder / "secret"),
            RINGFENCE_RUN_ID=self._folder.name,
            RINGFENCE_INTERFACE=placement.host,
            RINGFENCE_SAME_HOST="shared" if placement.prefix else "sealed",
        )
        with theirs, self._log(rank).open("wb") as log:
            # A session of its own: Ctrl-C reaches the benchmark only, which then ends its workers.
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [*placement.prefix, *own_process.command(self._module, json.dumps(config))],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return process, ours

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers, by rank."""
        return [process.pid for process, _ in self._workers]

    def _log(self, rank: int) -> Path:
        return self._folder / f"worker{rank}.log"

    def tell(self, command: str, **arguments: Any) -> list[Message]:
        """Send a command to every worker and return their answers by rank.

        Raises BenchError if a worker fails, ends or does not answer.
        """
        for _, pipe in self._workers:
            with contextlib.suppress(OSError):  # it has ended: reading its answer reports that
                send(pipe, {"do": command, **arguments})
        answers: dict[int, Message] = {}
        while len(answers) < self.size:  # in any order: after a failure the others may never answer
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers) if rank not in answers}
            ready = [pipe for pipe in wait(list(waiting), _ANSWER_SECONDS) if isinstance(pipe, Connection)]
            if not ready:
                silent = ", ".join(map(str, waiting.values()))
                raise BenchError(f"worker {silent} of the benchmark sent no answer for {_ANSWER_SECONDS:.0f} s")
            for pipe in ready:
                answers[waiting[pipe]] = self._answer(waiting[pipe], pipe)
        return [answers[rank] for rank in range(self.size)]

    def _answer(self, rank: int, pipe: Connection) -> Message:
        message = receive(pipe)
        if message is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._workers[rank][0].wait(_LEAVING_SECONDS)
            words = self._log(rank).read_text(errors="replace")[-_LOG_BYTES:]
            raise BenchError(f"worker {rank} of the benchmark ended early. The end of its log:\n{words}")
        if "error" in message:
            raise BenchError(f"worker {rank} of the benchmark failed: {message['error']}")
        done: Message = message["done"]
        return done

    def measure(self, command: str, **arguments: Any) -> dict[str, Message]:
        """Measure one round: the time of the slowest rank, and the CPU time and bytes of all ranks."""
        answers = self.tell(command, **arguments)
        return {name: _together([answer[name] for answer in answers]) for name in answers[0]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            try:
                process.wait(_LEAVING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._workers.clear()
        self._temporary.cleanup()


def _together(measured: Sequence[Message]) -> Message:
    """Combine what the ranks measured of one variant into a sample."""
    first, repeats = measured[0], measured[0]["repeats"]

    def total(name: str) -> Any:
        return sum(each[name] for each in measured) / repeats

    slowest = max(each["seconds"] for each in measured) / repeats
    whole: Message = {"seconds": slowest, "cpu": total("cpu"), "sent": total("sent"), "repeats": repeats}
    if "counted" in first:  # sealed, as frames, and inside machines (byte_counts.Traffic)
        columns = zip(*(each["counted"] for each in measured), strict=True)
        whole["counted"] = [sum(column) / repeats for column in columns]
    if "late" in first:
        whole["late"] = total("late")
        whole |= {name: first[name] for name in ("dilation",) if name in first}
        whole["wall"] = max(each["wall"] for each in measured) / repeats
    if "stages" in first:
        everywhere = sum(each["seconds"] for each in measured)
        stages = {stage: sum(each["stages"][stage] for each in measured) / 1e9 for stage in first["stages"]}
        stages["rest"] = max(0.0, everywhere - sum(stages.values()))
        whole["mean"] = everywhere / len(measured) / repeats  # what the shares are shares of
        whole["stages"] = {stage: seconds / everywhere for stage, seconds in stages.items()}
    if first.get("staging"):  # seconds of one call by stage, and of one pass, as means over all ranks
        spent = {name: sum(each["staging"][name] for each in measured) for name in first["staging"]}
        whole["staging"] = {
            "call": {stage: spent[stage] / spent["calls"] / 1e9 for stage in staging_times.CALL_STAGES},
            "pass": {stage: spent[stage] / spent["passes"] / 1e9 for stage in staging_times.PASS_STAGES},
            "passes": spent["passes"] / spent["calls"],
        }
    return whole
