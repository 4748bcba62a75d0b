"""Collecting from GPUs: NVIDIA's own Python bindings on top of a driver that is a test's, with minted GPUs in it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pynvml
import pytest

from ringfence.admission.binding import Binding
from ringfence.admission.policy import Evidence, Policy, verify
from ringfence.admission.proofs import nvidia
from ringfence.admission.proofs.nvidia import Gpu, Rules, verify_report
from ringfence.errors import ConfigurationError
from ringfence.evidence import nvml
from tests import provers
from tests.limits import HANG
from tests.unit import nvidia_mint as mint
from tests.unit.admission_samples import worker
from tests.unit.nvml_driver import Driver
from tests.unit.overlap import watched

ROOT = mint.root()
NONCE = bytes(range(32))
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
NO_DRIVER = pynvml.NVML_ERROR_DRIVER_NOT_LOADED


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Two GPUs under NVIDIA's bindings."""
    found = Driver(ROOT, mint.Device.under(ROOT, 1), mint.Device.under(ROOT, 2))
    monkeypatch.setattr(pynvml, "nvmlLib", found)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield found
    assert found.open == 0, "every session is closed"


def collect(nonce: bytes = NONCE) -> list[Gpu]:
    return nvml.collect(nonce, nvml.load(), root=ROOT.certificate)


def test_every_gpu_is_asked_and_its_report_verifies(driver: Driver) -> None:
    assert nvml.count(nvml.load()) == 2
    names = [verify_report(gpu, NONCE, mint.NOW, root=ROOT.certificate).device for gpu in collect()]
    assert names == [device.name for device in driver.devices]


def test_what_is_collected_admits(driver: Driver) -> None:
    reference_values = verify_report(collect()[0], NONCE, mint.NOW, root=ROOT.certificate).reference_values()
    prover = provers.of_nvidia(collect)
    policy = Policy((nvidia.verifier(Rules((reference_values,), gpus=2), lambda: mint.NOW, root=ROOT.certificate),))
    binding = Binding(b"a connection")
    assert verify(policy, Evidence(worker(1).entry, prover.kind, prover.prove(binding), binding))


def test_gpus_are_asked_for_one_connection_at_a_time(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker collects for its parent and its children at the same time; a device keeps one question in mind."""
    report, overlapped = watched(driver.nvmlDeviceGetConfComputeGpuAttestationReport)
    monkeypatch.setattr(driver, "nvmlDeviceGetConfComputeGpuAttestationReport", report)
    threads = [threading.Thread(target=collect) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert not overlapped.is_set()


def test_trailing_bytes_of_a_driver_are_not_sent(driver: Driver) -> None:
    driver.behind = b"\0"
    for gpu in collect():
        assert verify_report(gpu, NONCE, mint.NOW, root=ROOT.certificate)


def test_the_answer_to_another_process_is_not_accepted(driver: Driver) -> None:
    driver.nonce = bytes(32)
    with pytest.raises(ConfigurationError, match="of another request: try again"):
        collect()


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("init", NO_DRIVER, "does not start: .*confidential computing"),
        ("count", NO_DRIVER, "fails: .*confidential computing"),
        ("report", NOT_SUPPORTED, "GPU 0 returned no attestation report: Not Supported; .*nvidia-smi conf-compute"),
        ("size", 0, "0 bytes in a buffer of 8192"),
        ("size", 8193, "8193 bytes in a buffer of 8192"),
        ("size", 100, "malformed report: the GPU report is truncated"),
        ("devices", (), "this machine has 0 GPUs"),
        ("devices", (None,) * 17, "this machine has 17 GPUs"),
    ],
)
def test_what_goes_wrong_is_named(driver: Driver, name: str, code: object, reason: str) -> None:
    setattr(driver, name, code)
    with pytest.raises(ConfigurationError, match=reason):
        collect()


def test_without_pynvml_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigurationError, match=r"pip install \"nvidia-ml-py>=13\""):
        nvml.load()


def test_a_nonce_has_32_bytes(driver: Driver) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        collect(bytes(31))
