"""A driver of a test's own, with minted GPUs in it, under NVIDIA's own Python bindings."""

from __future__ import annotations

import ctypes
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from tests.unit import nvidia_mint as mint


class Driver:
    """What libnvidia-ml.so does: C functions that fill in what they are pointed at, and return a code."""

    def __init__(self, root: mint.Issuer, *devices: mint.Device) -> None:
        self.root = root
        self.devices = devices
        self.open = 0
        self.init = self.count = self.report = 0  # codes to return
        self.behind = b""  # what a report's buffer holds after the report, inside the length
        self.nonce: bytes | None = None  # of somebody else's question
        self.size: int | None = None

    def nvmlInitWithFlags(self, flags: int) -> int:
        self.open += self.init == 0
        return self.init

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return self.count

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index.value + 1
        return 0

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, handle: Any, out: Any) -> int:
        asked = bytes(out._obj.nonce)
        data = self._device(handle).report(self.nonce or asked) + self.behind
        ctypes.memmove(out._obj.attestationReport, data, len(data))
        out._obj.attestationReportSize = len(data) if self.size is None else self.size
        return self.report

    def nvmlDeviceGetConfComputeGpuCertificate(self, handle: Any, out: Any) -> int:
        certificates = [x509.load_der_x509_certificate(each) for each in self._device(handle).chain]
        text = b"".join(each.public_bytes(Encoding.PEM) for each in (*certificates, self.root.certificate)) + b"\0"
        ctypes.memmove(out._obj.attestationCertChain, text, len(text))
        out._obj.attestationCertChainSize = len(text)
        return 0

    def _device(self, handle: Any) -> mint.Device:
        return self.devices[ctypes.cast(handle, ctypes.c_void_p).value - 1]  # type: ignore[operator]
