"""The few commands of a TPM 2.0 that collect evidence, sent to the kernel's resource manager (/dev/tpmrm0).

    command  = tag ‖ size ‖ code ‖ handles ‖ [authorization] ‖ parameters            (big-endian)
    response = tag ‖ size ‖ response code ‖ [parameter size] ‖ parameters ‖ [authorization]

Written here, as tpm2-tss and its Python packages are native code that a guest would have to install for four commands.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Iterator
from typing import Final, Protocol

from ringfence.admission.encoding import Reader, number
from ringfence.admission.proofs import tpm_quote
from ringfence.admission.proofs.tpm_quote import PCR_BYTES, PCRS
from ringfence.errors import ConfigurationError, ProtocolError

DEVICE: Final = "/dev/tpmrm0"
SECONDS: Final = 20.0  # for one command
RESPONSE_BYTES: Final = 4096

_NO_SESSIONS: Final = 0x8001
_SESSIONS: Final = 0x8002
_PASSWORD: Final = number(0x40000009, 4) + bytes(5)  # an empty password, without nonce and attributes
_OWNER: Final = 0x40000001
_NV_READ: Final = 0x14E
_NV_READ_PUBLIC: Final = 0x169
_QUOTE: Final = 0x158
_PCR_READ: Final = 0x17E
_RSASSA: Final = 0x0014
_SHA256: Final = 0x000B
_CHUNK_BYTES: Final = 512  # that every TPM returns at once (TPM_PT_NV_BUFFER_MAX)
_READS: Final = PCRS  # of PCRs: each returns at least one
_ATTEMPTS: Final = 5
_RETRY: Final = (0x908, 0x90A, 0x922)  # yielded, testing, retry
_ADVICE: Final = {
    errno.ENOENT: "this machine has no TPM: a confidential VM on Azure needs its vTPM turned on",
    errno.EACCES: "this user may not use the TPM: run the worker as root, or add it to the group tss",
    errno.EPERM: "this user may not use the TPM: run the worker as root, or add it to the group tss",
}


class Tpm(Protocol):
    """Sends one command to a TPM and returns its response."""

    def transmit(self, command: bytes) -> bytes: ...


class TpmDevice:
    """A TPM behind a file descriptor that takes a command in one write, and returns its response in one read."""

    def __init__(self, descriptor: int, seconds: float = SECONDS) -> None:
        self._descriptor = descriptor
        self._seconds = seconds

    def transmit(self, command: bytes) -> bytes:
        """Raises ConfigurationError if the TPM does not respond in time, and OSError."""
        if os.write(self._descriptor, command) != len(command):
            raise ConfigurationError("the TPM took a part of a command only: try again")
        deadline = time.monotonic() + self._seconds
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        while True:
            if not poll.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                raise ConfigurationError(f"the TPM did not respond within {self._seconds:.0f} s")
            try:
                return os.read(self._descriptor, RESPONSE_BYTES)
            except BlockingIOError:
                continue  # woken without a response


@contextlib.contextmanager
def opened(path: str = DEVICE) -> Iterator[TpmDevice]:
    """Open a TPM for some commands. Raises ConfigurationError, which says what to do."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the kernel's log")
        raise ConfigurationError(f"{path} cannot be opened: {error.strerror}; {advice}") from error
    try:
        yield TpmDevice(descriptor)
    except OSError as error:
        raise ConfigurationError(f"{path} fails: {error.strerror}; check the kernel's log") from error
    finally:
        os.close(descriptor)


# -- commands -------------------------------------------------------------------------------------------------------


def nv_size(tpm: Tpm, index: int) -> int:
    """Return the size of an NV index. Raises ConfigurationError."""
    reader = _call(tpm, _NV_READ_PUBLIC, (index,), b"", is_authorized=False)
    with _parsing():
        inner = Reader(_sized(reader))
        _sized(reader)  # its name
        reader.end()
        inner.take(4 + 2 + 4)  # index, algorithm of the name, attributes
        _sized(inner)  # its policy
        size = inner.number(2)
        inner.end()
    return size


def nv_read(tpm: Tpm, index: int, limit: int) -> bytes:
    """Return the content of an NV index of at most `limit` bytes, authorized as owner. Raises ConfigurationError."""
    size = nv_size(tpm, index)
    if size > limit:
        raise ConfigurationError(
            f"NV index {index:#010x} of the TPM has {size} bytes, where at most {limit} are allowed"
        )
    content = b""
    while len(content) < size:
        wanted = min(_CHUNK_BYTES, size - len(content))
        parameters = number(wanted, 2) + number(len(content), 2)
        reader = _call(tpm, _NV_READ, (_OWNER, index), parameters, is_authorized=True)
        with _parsing():
            part = _sized(reader)
            reader.end()
        if len(part) != wanted:
            raise ConfigurationError(f"the TPM returned {len(part)} bytes of an NV index instead of {wanted}")
        content += part
    return content


def quote(tpm: Tpm, key: int, nonce: bytes) -> tuple[bytes, bytes]:
    """Return a quote over all PCRs by a persistent RSA key, and its signature. Raises ConfigurationError."""
    scheme = number(_RSASSA, 2) + number(_SHA256, 2)
    parameters = number(len(nonce), 2) + nonce + scheme + tpm_quote.SELECTION
    reader = _call(tpm, _QUOTE, (key,), parameters, is_authorized=True)
    with _parsing():
        quoted = _sized(reader)
        if reader.take(4) != scheme:
            raise ProtocolError("a signature that is not RSASSA with SHA-256")
        signature = _sized(reader)
        reader.end()
    return quoted, signature


def read_pcrs(tpm: Tpm) -> tuple[bytes, ...]:
    """Return the values of all PCRs of the SHA-256 bank. Raises ConfigurationError."""
    found: dict[int, bytes] = {}
    for _ in range(_READS):
        missing = [index for index in range(PCRS) if index not in found]
        if not missing:
            break
        reader = _call(tpm, _PCR_READ, (), number(1, 4) + _selection(missing), is_authorized=False)
        with _parsing():
            reader.take(4)  # the update counter
            if reader.number(4) != 1 or reader.number(2) != _SHA256 or reader.number(1) != 3:
                raise ProtocolError("PCRs of another bank: the SHA-256 bank must be active")
            bits = int.from_bytes(reader.take(3), "little")
            indices = [index for index in range(PCRS) if bits >> index & 1]
            values = [_sized(reader) for _ in range(reader.number(4))]
            reader.end()
            if len(values) != len(indices) or not values or any(len(each) != PCR_BYTES for each in values):
                raise ProtocolError("other PCRs than it announces")
            if not set(indices) <= set(missing):
                raise ProtocolError("PCRs that were not requested")
        found.update(zip(indices, values, strict=True))
    return tuple(found[index] for index in range(PCRS))


def _selection(indices: list[int]) -> bytes:
    bits = sum(1 << index for index in indices)
    return number(_SHA256, 2) + b"\3" + bits.to_bytes(3, "little")


# -- parts ----------------------------------------------------------------------------------------------------------


def _call(tpm: Tpm, code: int, handles: tuple[int, ...], parameters: bytes, *, is_authorized: bool) -> Reader:
    """Send a command and return a reader of its response's parameters. Raises ConfigurationError."""
    tag = _SESSIONS if is_authorized else _NO_SESSIONS
    middle = b"".join(number(handle, 4) for handle in handles)
    if is_authorized:
        middle += number(len(_PASSWORD), 4) + _PASSWORD
    body = number(code, 4) + middle + parameters
    command = number(tag, 2) + number(6 + len(body), 4) + body
    for attempt in range(_ATTEMPTS):
        result, reader = _response(tpm.transmit(command), tag)
        if result not in _RETRY:
            break
        time.sleep(0.05 * 2**attempt)
    if result:
        raise ConfigurationError(f"the TPM refuses command {code:#x} with {result:#x}: {_reason(result)}")
    return reader


def _response(data: bytes, tag: int) -> tuple[int, Reader]:
    with _parsing():
        reader = Reader(data)
        found, size, result = reader.number(2), reader.number(4), reader.number(4)
        if size != len(data):
            raise ProtocolError(f"a response of {len(data)} bytes, which announces {size}")
        if result:
            return result, reader
        if found != tag:
            raise ProtocolError(f"a response with tag {found:#x}")
        if tag == _SESSIONS:
            parameters = reader.take(reader.number(4))
            reader.take(reader.number(2) + 1)  # nonce and attributes of the session
            reader.take(reader.number(2))
            reader.end()
            reader = Reader(parameters)
    return result, reader


def _reason(result: int) -> str:
    if result & 0x0BF == 0x08B:  # TPM_RC_HANDLE, for any handle or parameter
        return "there is no such key or NV index; this is not a confidential VM on Azure"
    if result in (0x09A2, 0x98E):
        return "the owner's or the key's password is set, and must be empty"
    return "check the TPM with tpm2-tools"


def _sized(reader: Reader) -> bytes:
    return reader.take(reader.number(2))


@contextlib.contextmanager
def _parsing() -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        raise ConfigurationError(f"the TPM returned a malformed response: {error}") from error
