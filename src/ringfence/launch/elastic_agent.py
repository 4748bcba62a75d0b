"""torchrun's agent with two changes: a round that ends while it forms is tried again, and a node whose workers have succeeded
waits for the others, to start its workers again if theirs fail.
"""

from __future__ import annotations

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from ringfence.errors import ConfigurationError
from ringfence.launch.store import HostLostError, RoundEndedError


def use_sealed_agent() -> None:
    """Let torchrun create a `SealedAgent`. Raises ConfigurationError if this torch has no place for it."""
    if getattr(api, "LocalElasticAgent", None) not in (LocalElasticAgent, SealedAgent):
        raise ConfigurationError("this version of torch starts agents in a way that ringfence does not support")
    api.LocalElasticAgent = SealedAgent


class SealedAgent(LocalElasticAgent):  # type: ignore[misc]  # torch is untyped here
    """An agent whose rendezvous is a `SealedRendezvous`."""

    _succeeded: RunResult | None = None  # the result of this node's workers, while others still work
    _reported = False  # whether the host knows of it

    def run(self, role: str = "default") -> RunResult:
        """Run until the end. An agent that comes after the run has finished succeeds without having done anything."""
        return super().run(role) or RunResult(state=WorkerState.SUCCEEDED)

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

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
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
