"""Collects a report of this guest from the kernel: configfs-tsm, the interface to TDX and SEV-SNP (Linux 6.7 and later).

    mkdir  ──►  generation = g  ──►  write inblob  ──►  generation = g + 1?  ──►  read outblob, auxblob
                                                                            ──►  generation still the same?  ──►  rmdir

The kernel takes a binary attribute when its file is closed, and drops errors at that point. So a report is accepted only if
no other process wrote in between and it contains the 64 bytes of the request.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ringfence.admission.proofs import snp_report, tdx_quote
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence.device_lock import exclusive

FOLDER: Final = "/sys/kernel/config/tsm/report"
TDX: Final = "tdx_guest"
SNP: Final = "sev_guest"
REPORT_DATA_BYTES: Final = 64
ATTEMPTS: Final = 5
BLOB_BYTES: Final = 32 * 1024  # the kernel's own limit

_device_lock = threading.Lock()  # for one report at a time; a request that waits here can still be cancelled
_AGAIN: Final = (errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.EEXIST)
_ADVICE: Final = {
    errno.ENOENT: "this is not a confidential VM, or its kernel is older than 6.7, or configfs is not mounted "
    "(mount -t configfs none /sys/kernel/config)",
    errno.ENXIO: "no driver for it is loaded: modprobe tdx_guest, or modprobe sev-guest",
    errno.EACCES: "only root may request a report: run the worker as root",
    errno.EPERM: "only root may request a report: run the worker as root",
    errno.EINVAL: "the kernel refuses the request: check the privilege level (VMPL) of this guest",
    errno.ETIMEDOUT: "the host does not answer: check that its quoting service runs",
    errno.EIO: "the host reports an error: check its quoting service",
}


class KernelFiles:
    """The file operations on configfs-tsm. Tests override them all: a plain folder cannot behave like the kernel."""

    def make(self, folder: str) -> None:
        os.mkdir(folder)

    def remove(self, folder: str) -> None:
        os.rmdir(folder)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def read(self, path: str, limit: int) -> bytes:
        with open(path, "rb", buffering=0) as file:
            content = b""
            while len(content) <= limit and (part := file.read(limit + 1 - len(content))):
                content += part
            return content

    def write(self, path: str, content: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Collected:
    """The kernel's answer to a request."""

    provider: str
    outblob: bytes
    auxblob: bytes


class _Retry(Exception):
    """Another process interfered."""


def collect(
    report_data: bytes,
    files: KernelFiles,
    *,
    level: int | None = None,
    draw: Callable[[], str] = lambda: secrets.token_hex(8),
) -> Collected:
    """Return a report with `report_data`. `level` is the VMPL to request, on SEV-SNP.

    Raises ConfigurationError.
    """
    if len(report_data) != REPORT_DATA_BYTES:
        raise ValueError(f"a report has {REPORT_DATA_BYTES} bytes of report data")
    reason = ""
    for _ in range(ATTEMPTS):
        try:
            with exclusive(_device_lock):
                return _attempt(report_data, files, level, f"{FOLDER}/ringfence-{draw()}")
        except _Retry as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno not in _AGAIN:
                advice = _ADVICE.get(error.errno or 0, "check the kernel's log")
                raise ConfigurationError(f"no attestation report from the kernel: {reason}; {advice}") from error
    raise ConfigurationError(f"no attestation report from the kernel in {ATTEMPTS} attempts: {reason}")


def provider(files: KernelFiles) -> str:
    """Return which type of guest this is, without requesting a report. Raises ConfigurationError."""
    folder = f"{FOLDER}/ringfence-{secrets.token_hex(8)}"
    try:
        files.make(folder)
        try:
            return _text(files, folder, "provider")
        finally:
            _remove(files, folder)
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the kernel's log")
        raise ConfigurationError(f"no attestation by the kernel: {error.strerror}; {advice}") from error


def _attempt(report_data: bytes, files: KernelFiles, level: int | None, folder: str) -> Collected:
    files.make(folder)
    try:
        generation = _generation(files, folder)
        if _set_level(files, folder, level):
            generation += 1
        files.write(f"{folder}/inblob", report_data)
        generation += 1
        if _generation(files, folder) != generation:
            raise _Retry("the kernel did not accept the request, or another process wrote too")
        outblob = _blob(files, f"{folder}/outblob")
        auxblob = _blob(files, f"{folder}/auxblob") if files.exists(f"{folder}/auxblob") else b""
        collected = Collected(_text(files, folder, "provider"), outblob, auxblob)
        if _generation(files, folder) != generation:
            raise _Retry("another process wrote while the report was read")
        if _report_data(collected) != report_data:
            raise _Retry("the report has other report data than requested")
        return collected
    finally:
        _remove(files, folder)


def _set_level(files: KernelFiles, folder: str, level: int | None) -> bool:
    """Write the privilege level, if the kernel supports it and it is not 0; return whether it was written."""
    if not files.exists(f"{folder}/privlevel_floor"):
        return False
    floor = int(_text(files, folder, "privlevel_floor"))
    if level is not None and level < floor:
        raise ConfigurationError(f"this guest runs at VMPL {floor} and cannot request a report of VMPL {level}")
    wanted = floor if level is None else level
    if wanted:
        files.write(f"{folder}/privlevel", str(wanted).encode())
    return bool(wanted)


def _report_data(collected: Collected) -> bytes:
    if collected.provider == SNP:
        return collected.outblob[snp_report.REPORT_DATA]
    if collected.provider == TDX:
        try:
            return tdx_quote.report_data(collected.outblob)
        except AdmissionError as error:
            raise ConfigurationError(f"the kernel returned a malformed quote: {error}") from error
    raise ConfigurationError(f"the kernel's provider {collected.provider!a} is neither {TDX} nor {SNP}")


def _generation(files: KernelFiles, folder: str) -> int:
    return int(_text(files, folder, "generation"))


def _text(files: KernelFiles, folder: str, name: str) -> str:
    return files.read(f"{folder}/{name}", 4096).decode("ascii").strip()


def _blob(files: KernelFiles, path: str) -> bytes:
    content = files.read(path, BLOB_BYTES)
    if len(content) > BLOB_BYTES:
        raise ConfigurationError(f"{path} has more than {BLOB_BYTES} bytes")
    return content


def _remove(files: KernelFiles, folder: str) -> None:
    with contextlib.suppress(OSError):  # the report was read, or another error is being raised
        files.remove(folder)
