"""Ask every GPU of this machine for a report, through NVIDIA's management library.

NVML lists the GPUs that this machine or container has, whatever CUDA_VISIBLE_DEVICES says: a GPU that can be reached is
a GPU that others should know about.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, cast

from cryptography import x509

from ringfence.admission.proofs import nvidia_chain, spdm
from ringfence.admission.proofs.nvidia import GPUS, Gpu, pinned_root
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence.device_lock import exclusive

_asking = threading.Lock()  # a GPU answers one question at a time, and a worker collects for several connections
_ADVICE: Final = (
    "attestation needs a GPU with confidential computing (Hopper or later), switched on for it by the host, and a driver "
    "that is ready: `nvidia-smi conf-compute -f` shows its state"
)


class Library(Protocol):
    """The part of `pynvml` that is used here."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, device: Any, nonce: bytes) -> Any: ...

    def nvmlDeviceGetConfComputeGpuCertificate(self, device: Any) -> Any: ...


def load() -> Library:
    """The library, if it is installed."""
    try:
        return cast(Library, importlib.import_module("pynvml"))
    except ImportError:
        raise ConfigurationError(
            'to ask GPUs for evidence, nvidia-ml-py is needed: python -m pip install "nvidia-ml-py>=13"'
        ) from None


def count(library: Library) -> int:
    """How many GPUs there are; none is not an error."""
    with _session(library):
        return library.nvmlDeviceGetCount()


def collect(nonce: bytes, library: Library, *, root: x509.Certificate | None = None) -> list[Gpu]:
    """One report over `nonce` from every GPU. `root` is what a chain ends in and travels without; for tests."""
    if len(nonce) != spdm.NONCE_BYTES:
        raise ValueError(f"a GPU signs a nonce of {spdm.NONCE_BYTES} bytes")
    with exclusive(_asking), _session(library):
        found = library.nvmlDeviceGetCount()
        if found not in GPUS:
            raise ConfigurationError(f"this machine has {found} GPUs; a worker shows {GPUS[0]} to {GPUS[-1]}")
        return [_ask(index, nonce, library, root or pinned_root()) for index in range(found)]


def _ask(index: int, nonce: bytes, library: Library, root: x509.Certificate) -> Gpu:
    try:
        device = library.nvmlDeviceGetHandleByIndex(index)
        report = library.nvmlDeviceGetConfComputeGpuAttestationReport(device, nonce)
        certificate = library.nvmlDeviceGetConfComputeGpuCertificate(device)
    except library.NVMLError as error:
        raise ConfigurationError(f"GPU {index} gives no attestation report: {error}; {_ADVICE}") from error
    text = _filled(index, certificate.attestationCertChain, certificate.attestationCertChainSize)
    data = _filled(index, report.attestationReport, report.attestationReportSize)
    try:
        gpu = Gpu(spdm.trim(data), nvidia_chain.chain_of(text.rstrip(b"\0"), root))
        signed = spdm.read(gpu.report).nonce
    except AdmissionError as error:
        raise ConfigurationError(f"GPU {index} gives a report that cannot be read: {error}") from error
    if signed != nonce:
        raise ConfigurationError(f"GPU {index} answered a question that somebody else asked: try again")
    return gpu


def _filled(index: int, buffer: Any, size: int) -> bytes:
    """The part of a C buffer that its length says was written."""
    content = bytes(buffer)
    if not 0 < size <= len(content):
        raise ConfigurationError(f"GPU {index} says it wrote {size} bytes into {len(content)}: update its driver")
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
