"""Collects a report from every GPU of this machine, through NVIDIA's management library.

NVML lists all GPUs of the machine or container, regardless of CUDA_VISIBLE_DEVICES: peers must know of every GPU that the
worker can use.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from cryptography import x509

from ringfence.admission.proofs import nvidia_chain, spdm
from ringfence.admission.proofs.nvidia import GPUS, Gpu, pinned_root
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence.device_lock import exclusive

_device_lock = threading.Lock()  # a GPU answers one request at a time, and a worker collects for several connections
_ADVICE: Final = (
    "attestation needs a GPU with confidential computing (Hopper or later), enabled by the host, and a driver "
    "that is ready: `nvidia-smi conf-compute -f` shows its state"
)


class Library(Protocol):
    """The functions of `pynvml` that are used here."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, device: Any, nonce: bytes) -> Any: ...

    def nvmlDeviceGetConfComputeGpuCertificate(self, device: Any) -> Any: ...


def load() -> Library:
    """Import the library. Raises ConfigurationError if it is not installed."""
    try:
        import pynvml
    except ImportError:
        raise ConfigurationError(
            'to ask GPUs for evidence, nvidia-ml-py is needed: python -m pip install "nvidia-ml-py>=13"'
        ) from None
    library: Library = pynvml
    return library


def count(library: Library) -> int:
    """Return the number of GPUs. Raises ConfigurationError if a worker cannot present so many."""
    with _session(library):
        return _count(library)


def _count(library: Library) -> int:
    found = library.nvmlDeviceGetCount()
    if found not in GPUS:
        raise ConfigurationError(f"this machine has {found} GPUs; a worker presents {GPUS[0]} to {GPUS[-1]}")
    return found


def collect(nonce: bytes, library: Library, *, root: x509.Certificate | None = None) -> list[Gpu]:
    """Return one report over `nonce` from every GPU. `root`, which is left out of the chains, is for tests.

    Raises ConfigurationError.
    """
    if len(nonce) != spdm.NONCE_BYTES:
        raise ValueError(f"a GPU signs a nonce of {spdm.NONCE_BYTES} bytes")
    with exclusive(_device_lock), _session(library):
        return [_ask(index, nonce, library, root or pinned_root()) for index in range(_count(library))]


def _ask(index: int, nonce: bytes, library: Library, root: x509.Certificate) -> Gpu:
    try:
        device = library.nvmlDeviceGetHandleByIndex(index)
        report = library.nvmlDeviceGetConfComputeGpuAttestationReport(device, nonce)
        certificate = library.nvmlDeviceGetConfComputeGpuCertificate(device)
    except library.NVMLError as error:
        raise ConfigurationError(f"GPU {index} returned no attestation report: {error}; {_ADVICE}") from error
    text = _filled(index, certificate.attestationCertChain, certificate.attestationCertChainSize)
    data = _filled(index, report.attestationReport, report.attestationReportSize)
    try:
        gpu = Gpu(spdm.trim(data), nvidia_chain.chain_of(text.rstrip(b"\0"), root))
        signed = spdm.read(gpu.report).nonce
    except AdmissionError as error:
        raise ConfigurationError(f"GPU {index} returned a malformed report: {error}") from error
    if signed != nonce:
        raise ConfigurationError(f"GPU {index} returned the report of another request: try again")
    return gpu


def _filled(index: int, buffer: Any, size: int) -> bytes:
    """Return the part of a C buffer that was written."""
    content = bytes(buffer)
    if not 0 < size <= len(content):
        raise ConfigurationError(f"GPU {index} reports {size} bytes in a buffer of {len(content)}: update its driver")
    return content[:size]


@contextmanager
def _session(library: Library) -> Iterator[None]:
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise ConfigurationError(f"NVIDIA's management library does not start: {error}; {_ADVICE}") from error
    try:
        yield
    except library.NVMLError as error:
        raise ConfigurationError(f"NVIDIA's management library fails: {error}; {_ADVICE}") from error
    finally:
        library.nvmlShutdown()
