"""torchrun's agent with three changes: a round that ends while it forms is tried again; a node whose workers have succeeded
waits for the others, to start its workers again if theirs fail; and spares may take the places of workers.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.launcher import api

from ringfence.errors import ConfigurationError
from ringfence.launch.spares import Spares
from ringfence.launch.store import HostLostError, RoundEndedError


def use_sealed_agent() -> None:
    """Let torchrun create a `SealedAgent`. Raises ConfigurationError if this torch has no place for it."""
    if getattr(api, "LocalElasticAgent", None) not in (LocalElasticAgent, SealedAgent):
        raise ConfigurationError("this version of torch starts agents in a way that ringfence does not support")
    api.LocalElasticAgent = SealedAgent


@contextlib.contextmanager
def _started_by(spares: Spares) -> Iterator[None]:
    """Let spares take the places of the workers that torch starts in this context."""
    original = SubprocessHandler._popen

    def popen(handler: Any, arguments: tuple[str, ...], environ: dict[str, str]) -> Any:
        redirected = handler._stdout is not None or handler._stderr is not None
        return (None if redirected else spares.popen(arguments, environ)) or original(handler, arguments, environ)

    SubprocessHandler._popen = popen
    try:
        yield
    finally:
        SubprocessHandler._popen = original


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
        super()._initialize_workers(worker_group)
        delay = worker_group.spec.rdzv_handler.spares_after
        if delay is not None:
            self._spares_at = time.monotonic() + delay

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if worker_group.spec.rdzv_handler.spares_after is None:
            return dict(super()._start_workers(worker_group))
        self._spares = self._spares or Spares()
        with _started_by(self._spares):
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
            result = super()._monitor_workers(worker_group)
            if result.state is not WorkerState.SUCCEEDED:
                return result
            self._succeeded = result
        self._reported = self._reported or worker_group.spec.rdzv_handler.report_success()
        if worker_group.spec.rdzv_handler.is_finished:
            return self._succeeded
        return RunResult(state=WorkerState.HEALTHY)  # torchrun then asks whether the round has ended

    def _exit_barrier(self) -> None:
        """All nodes have finished: there is nothing left to wait for."""
