"""torchrun's agent with six changes: a round that ends while it forms is tried again; a node whose workers have succeeded
waits for the others, to start its workers again if theirs fail; workers end with the agent; one that was ended while it wrote
why it failed has said nothing; workers may join the next round in place; and spares may take their places.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.launcher import api

from ringfence.errors import AbortedError, ConfigurationError, PeerLostError
from ringfence.launch.spares import Spares
from ringfence.launch.store import HostLostError, RoundEndedError
from ringfence.launch.tied import tied

_TEXT: Final = 200  # characters of an exception that other nodes are told
_CONSEQUENCES: Final = (PeerLostError.__name__, AbortedError.__name__)  # of another worker's failure


def use_sealed_agent() -> None:
    """Let torchrun create a `SealedAgent`. Raises ConfigurationError if this torch has no place for it."""
    if getattr(api, "LocalElasticAgent", None) not in (LocalElasticAgent, SealedAgent):
        raise ConfigurationError("this version of torch starts agents in a way that ringfence does not support")
    api.LocalElasticAgent = SealedAgent


@contextlib.contextmanager
def _tied_workers(spares: Spares | None) -> Iterator[None]:
    """Tie the workers that torch starts in this context to this process, and let spares take their places."""
    original = SubprocessHandler._popen

    def popen(handler: Any, arguments: tuple[str, ...], environ: dict[str, str]) -> Any:
        redirected = handler._stdout is not None or handler._stderr is not None
        spare = None if spares is None or redirected else spares.popen(arguments, environ)
        return spare or original(handler, tuple(tied(arguments)), environ)

    SubprocessHandler._popen = popen
    try:
        yield
    finally:
        SubprocessHandler._popen = original


def cause_of(failures: Mapping[int, ProcessFailure]) -> str:
    """Return what failed first on this node: its rank, and its signal or its exception.

    "" if workers failed only because another node's did.
    """
    causes = []
    for rank, failure in sorted(failures.items(), key=lambda each: (each[1].timestamp, each[0])):
        said = failure.message.get("message", "") if isinstance(failure.message, dict) else ""
        if said.startswith(_CONSEQUENCES):
            continue
        what = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        causes.append(f"rank {rank} ended with {what}" + (f": {' '.join(said.split())[:_TEXT]}" if said else ""))
    return causes[0] if causes else ""


def _refuse_rejoins(rendezvous: Any, waiting: Iterable[int], reason: str) -> WorkerState:
    """Tell workers why they cannot rejoin. They raise, and are found to have failed."""
    rendezvous.loop.answer_rejoins(dict.fromkeys(waiting, reason))
    return WorkerState.HEALTHY


class SealedAgent(LocalElasticAgent):  # type: ignore[misc]  # torch is untyped here
    """An agent whose rendezvous is a `SealedRendezvous`."""

    _succeeded: RunResult | None = None  # the result of this node's workers, while others still work
    _reported = False  # whether the host knows of it
    _spares: Spares | None = None
    _spares_at = 0.0  # when to start spares for the workers that were started last

    def run(self, role: str = "default") -> RunResult:
        """Run until the end. An agent that comes after the run has finished succeeds without having done anything."""
        try:
            return super().run(role) or RunResult(state=WorkerState.SUCCEEDED)
        finally:
            if self._spares is not None:
                self._spares.close()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join a round and learn the ranks of the workers; again, if a node is lost in between."""
        while True:
            try:
                super()._rendezvous(worker_group)
                return
            except (RoundEndedError, HostLostError):
                continue

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self._succeeded, self._reported = None, False
        worker_group.spec.rdzv_handler.workers_run = True
        super()._initialize_workers(worker_group)
        delay = worker_group.spec.rdzv_handler.options.spares_after
        if delay is not None:
            self._spares_at = time.monotonic() + delay

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if worker_group.spec.rdzv_handler.options.spares_after is not None:
            self._spares = self._spares or Spares()
        with _tied_workers(self._spares):
            return dict(super()._start_workers(worker_group))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        super()._shutdown(death_sig, timeout)
        self._spares_at = float("inf")

    def _start_spares(self) -> None:
        """Start the spares that are due."""
        if self._spares is not None and time.monotonic() >= self._spares_at:
            self._spares_at = float("inf")
            self._spares.prepare()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._start_spares()
        if self._succeeded is None:
            result = self._result_of(worker_group)
            if result.state is WorkerState.HEALTHY:
                return RunResult(state=self._let_rejoin(worker_group))
            if result.state is not WorkerState.SUCCEEDED:
                worker_group.spec.rdzv_handler.failure = cause_of(result.failures)
                return result
            self._succeeded = result
            worker_group.spec.rdzv_handler.workers_run = False
        self._reported = self._reported or worker_group.spec.rdzv_handler.report_success()
        if worker_group.spec.rdzv_handler.is_finished:
            return self._succeeded
        return RunResult(state=WorkerState.HEALTHY)  # torchrun then asks whether the round has ended

    def _result_of(self, worker_group: WorkerGroup) -> RunResult:
        """Return what has become of the workers. torchrun itself fails on an error file that was not written to its end."""
        while True:
            try:
                return super()._monitor_workers(worker_group)
            except json.JSONDecodeError:
                if not self._remove_partial_error_files():
                    raise

    def _remove_partial_error_files(self) -> bool:
        """Remove error files that nobody completes, since their workers have ended. Return whether there were any."""
        found = False
        for local_rank, handler in self._pcontext.subprocess_handlers.items():
            path = Path(self._pcontext.error_files[local_rank])
            if handler.proc.poll() is None or not path.is_file():
                continue
            try:
                json.loads(path.read_text())
            except json.JSONDecodeError:
                path.unlink()
                found = True
        return found

    def _let_rejoin(self, worker_group: WorkerGroup) -> WorkerState:
        """Join the next round for workers that wait for it in place, once all of this node do. Return their state.

        As when workers are started again, it counts as a restart unless another node has ended the round.
        """
        rendezvous: Any = worker_group.spec.rdzv_handler
        waiting = rendezvous.loop.rejoining()
        if not waiting:
            return WorkerState.HEALTHY
        if rendezvous.options.rejoin_within is None:
            return _refuse_rejoins(rendezvous, waiting, "start it with `ringfence run --rejoin`")
        if len(waiting) < len(worker_group.workers):
            late = time.monotonic() >= min(waiting.values()) + rendezvous.options.rejoin_within
            return WorkerState.UNHEALTHY if late else WorkerState.HEALTHY
        if not rendezvous.is_round_over:
            if self._remaining_restarts <= 0:
                return _refuse_rejoins(rendezvous, waiting, "no restarts are left (--max-restarts)")
            self._remaining_restarts -= 1
        processes = {worker.local_rank: worker.id for worker in worker_group.workers}
        self._rendezvous(worker_group)
        for worker in worker_group.workers:
            worker.id = processes[worker.local_rank]
        rendezvous.loop.answer_rejoins(
            {each.local_rank: self._round_of(each, worker_group) for each in worker_group.workers}
        )
        return WorkerState.HEALTHY

    def _round_of(self, worker: Any, worker_group: WorkerGroup) -> dict[str, str]:
        """Return the variables of a worker's round, as torchrun sets them for a new process."""
        spec = worker_group.spec
        found: dict[str, object] = {
            "RANK": worker.global_rank,
            "WORLD_SIZE": worker.world_size,
            "GROUP_RANK": worker_group.group_rank,
            "GROUP_WORLD_SIZE": worker_group.group_world_size,
            "ROLE_RANK": worker.role_rank,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - self._remaining_restarts,
            "RINGFENCE_GENERATION": spec.rdzv_handler.generation,
        }
        return {name: str(value) for name, value in found.items()}

    def _exit_barrier(self) -> None:
        """All nodes have finished: there is nothing left to wait for."""
