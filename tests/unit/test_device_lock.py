"""Evidence for several connections: one request to a device at a time, and none for a disconnected peer."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable

import pytest

from ringfence.admission.binding import Binding, Role
from ringfence.admission.messages import Proof
from ringfence.admission.policy import Prover
from ringfence.admission.proofs import nvidia, snp
from ringfence.errors import ConfigurationError
from ringfence.evidence import guest, nvml, tsm
from ringfence.session.join.collect import Collector, FailureWindow, Outcome
from ringfence.session.join.peer import Peer
from ringfence.transport.tls import Credentials, Tls, TlsStream
from tests.limits import HANG
from tests.unit.admission_samples import worker
from tests.unit.nvml_driver import Driver
from tests.unit.overlap import watched
from tests.unit.test_collect import snp_kernel
from tests.unit.test_evidence_nvml import ROOT, driver  # noqa: F401 - a fixture

BINDING = Binding(b"one connection")


def unauthenticated_peer() -> Peer:
    near, far = socket.socketpair()
    far.close()
    return Peer(TlsStream(near, Tls(Credentials(), server=False)), worker(1).handshake(Role.CHILD), "somebody", 0.0)


def outcomes(collector: Collector, count: int) -> dict[Peer, Outcome]:
    found: dict[Peer, Outcome] = {}
    while len(found) < count:
        assert select.select([collector], [], [], HANG)[0], "nothing was collected"
        found.update(collector.finished())
    return found


class Asks(Prover):
    """A prover that asks a device."""

    kind = snp.KIND

    def __init__(self, ask: Callable[[bytes], object]) -> None:
        self._ask = ask

    def prove(self, binding: Binding) -> bytes:
        self._ask(binding.digest)
        return b"a proof"


def check_disconnected_peer_is_skipped(device: threading.Lock, prover: Asks, questions: Callable[[], int]) -> None:
    collector = Collector(prover)
    waiting, gone = unauthenticated_peer(), unauthenticated_peer()
    with device:  # it is busy with another question
        collector.start(gone, BINDING)
        collector.start(waiting, BINDING)
        gone.stream.close()
    found = outcomes(collector, 2)
    assert isinstance(found[waiting], Proof)
    assert isinstance(found[gone], ConfigurationError) and "its requester has disconnected" in str(found[gone])
    assert questions() == 1
    waiting.stream.close()
    collector.close()


@pytest.mark.promise("Evidence that takes long to collect does not stop a run, and collections are limited.")
def test_the_kernel_is_not_asked_for_a_disconnected_peer() -> None:
    kernel = snp_kernel()
    prover = Asks(lambda data: guest.snp(data, kernel))
    check_disconnected_peer_is_skipped(tsm._device_lock, prover, lambda: len(kernel.made))


def test_gpus_are_not_asked_for_a_disconnected_peer(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    asked = []
    plain = driver.nvmlDeviceGetConfComputeGpuAttestationReport

    def report(handle: object, out: object) -> int:
        asked.append(handle)
        return plain(handle, out)

    monkeypatch.setattr(driver, "nvmlDeviceGetConfComputeGpuAttestationReport", report)
    prover = Asks(lambda data: nvml.collect(nvidia.nonce_of(data), nvml.load(), root=ROOT.certificate))
    check_disconnected_peer_is_skipped(nvml._device_lock, prover, lambda: len(asked) // len(driver.devices))


def test_the_kernel_is_asked_for_one_connection_at_a_time() -> None:
    kernel = snp_kernel()
    kernel.make_report, overlapped = watched(kernel.make_report)
    collector = Collector(Asks(lambda data: guest.snp(data, kernel)))
    peers = [unauthenticated_peer() for _ in range(4)]
    for peer in peers:
        collector.start(peer, BINDING)
    assert all(isinstance(each, Proof) for each in outcomes(collector, 4).values())
    assert not overlapped.is_set()
    for peer in peers:
        peer.stream.close()
    collector.close()


# -- giving up ------------------------------------------------------------------------------------------------------


def test_a_failure_window_starts_at_the_first_consecutive_failure() -> None:
    failure_window = FailureWindow()
    assert failure_window.record(100.0, 101.0) == 0
    assert failure_window.record(102.0, 111.0) == 10
    assert failure_window.record(111.0, 131.5) == 30.5, "an attempt that takes long is an attempt all the same"


def test_time_without_attempts_does_not_count() -> None:
    """A parent is asked for evidence when a child comes; the next may come minutes later."""
    failure_window = FailureWindow()
    failure_window.record(100.0, 101.0)
    assert failure_window.record(200.0, 201.0) == 0
    assert failure_window.record(202.0, 203.0) == 2


def test_a_proof_for_a_disconnected_peer_ends_a_failure_window() -> None:
    collector, gone = Collector(Asks(lambda _: None)), unauthenticated_peer()
    collector.failure_window.record(100.0, 101.0)
    gone.stream.close()
    collector.start(gone, BINDING)
    assert isinstance(outcomes(collector, 1)[gone], Proof)
    assert collector.failure_window.record(103.0, 140.0) == 0
    collector.close()
