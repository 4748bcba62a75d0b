"""An agent that hosts the store and cannot present evidence for a while: it stays, and admits others as soon as it can."""

from __future__ import annotations

import logging
from dataclasses import replace
from unittest.mock import patch

import pytest

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.entry import Entry
from ringfence.admission.policy import Prover
from ringfence.errors import ConfigurationError
from ringfence.launch.agent_admission import AgentAdmission
from tests.attack.launch_attacks import Service
from tests.limits import FAR

pytestmark = pytest.mark.processes

FAILURES = 3


class Unavailable(Prover):
    """A prover whose service is down for the first few proofs."""

    def __init__(self, genuine: AgentAdmission) -> None:
        self.genuine = genuine.prover
        self.kind = self.genuine.kind
        self.asked = 0

    def prove(self, binding: Binding) -> bytes:
        self.asked += 1
        if self.asked <= FAILURES:
            raise ConfigurationError("the service is down")
        return self.genuine.prove(binding)

    def endorse(self, entry: Entry, proof_digest: bytes) -> bytes:
        return self.genuine.endorse(entry, proof_digest)


def test_a_host_without_evidence_drops_each_agent_and_admits_it_later(caplog: pytest.LogCaptureFixture) -> None:
    """The limit on how long evidence may be missing is zero here: it ends a worker's join, and must not end the host."""
    caplog.set_level(logging.INFO, "ringfence.launch.host")
    provers: list[Unavailable] = []

    class WithoutEvidence(Service):
        def _admission(self, rank: int) -> AgentAdmission:
            made = super()._admission(rank)
            if rank == 0:
                provers.append(Unavailable(made))
                made = replace(made, prover=provers[0])
            return made

    with patch.multiple(keys, EVIDENCE_SECONDS=0.0, ADMISSION_SECONDS=FAR):
        service = WithoutEvidence()  # raises unless both agents are in the round
        service.stop()
    assert provers[0].asked == FAILURES + 1
    levels = [each.levelno for each in caplog.records if each.name == "ringfence.launch.host"]
    assert levels.count(logging.WARNING) == FAILURES
    assert sum(each.getMessage().startswith("admitted") for each in caplog.records) == 1
