"""Fetches a worker's X.509-SVID from a SPIFFE Workload API, over gRPC on a Unix socket.

gRPC starts threads of its own, which do not survive the forks of data loaders and may hang a process that ends. So a separate
process, of this module, asks and prints JSON, and this one waits for it for a bounded time. The response is a protobuf message
of five fields, which is parsed here: the package `spiffe` would add six packages for it.
"""

from __future__ import annotations

import base64
import ssl
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from ringfence import own_process
from ringfence.admission.proofs import der
from ringfence.admission.proofs.certificate import Credential, read_credential
from ringfence.errors import ConfigurationError

SECONDS: Final = 20.0
RESPONSE_BYTES: Final = 1 << 20
INSTALL: Final = 'python -m pip install "grpcio>=1.80"'

_METHOD: Final = "/SpiffeWorkloadAPI/FetchX509SVID"
_METADATA: Final = (("workload.spiffe.io", "true"),)  # so that no other protocol can be tricked into this request
_SCHEME: Final = "unix://"
_ADVICE: Final = {
    "PERMISSION_DENIED": "no identity is registered for this workload: register it with the issuer",
    "UNAVAILABLE": "check that the agent runs, and that this user may open its socket",
    "DEADLINE_EXCEEDED": "check that the agent runs",
    "UNIMPLEMENTED": "the socket is not that of a Workload API",
}


def fetch(socket: str, seconds: float = SECONDS) -> Credential:
    """Return the default X.509-SVID of this workload, which is the first of the response. Raises ConfigurationError."""
    response = _run_child(path_of(socket), seconds)
    try:
        chain, key = parse(response)
        certificates = "".join(map(ssl.DER_cert_to_PEM_cert, chain)).encode("ascii")
        lines = base64.encodebytes(key).decode("ascii")
        pem = f"-----BEGIN PRIVATE KEY-----\n{lines}-----END PRIVATE KEY-----\n".encode("ascii")
        return read_credential(certificates, pem)
    except ValueError as error:
        raise ConfigurationError(f"the Workload API at {socket} returned an unusable SVID: {error}") from None


def path_of(socket: str) -> str:
    """Return the path of a socket that is given as a path or as a unix: URI. Raises ConfigurationError."""
    path = socket.removeprefix(_SCHEME)
    if not path.startswith("/") or not path.isprintable():
        raise ConfigurationError(
            f"RINGFENCE_SPIFFE_SOCKET={socket[:200]!a}: name a Unix socket, such as unix:///run/spire/sockets/agent.sock; "
            "over TCP the key would travel without protection"
        )
    return path


# -- the message ----------------------------------------------------------------------------------------------------


def parse(response: bytes) -> tuple[tuple[bytes, ...], bytes]:
    """Parse an X509SVIDResponse and return the chain of its first SVID, the workload's own certificate first, and its key.

    All in DER, the key in PKCS #8. Parsing verifies nothing. Raises ValueError.
    """
    svids = [value for number, value in _fields(response) if number == 1]
    if not svids or not isinstance(svids[0], bytes):
        raise ValueError("it has no SVID")
    found: dict[int, bytes] = {}
    for number, value in _fields(svids[0]):
        if number in (1, 2, 3):
            if not isinstance(value, bytes) or number in found:
                raise ValueError(f"its field {number} is of the wrong type, or occurs twice")
            found[number] = value
    if set(found) != {1, 2, 3}:
        raise ValueError("its name, certificate or key is missing")
    name = found[1].decode("utf-8")
    if not name.startswith("spiffe://") or not name.isascii() or not name.isprintable():
        raise ValueError("its name is not a SPIFFE ID")
    reader, chain = der.DerReader(found[2]), []
    while reader.tag is not None:
        chain.append(reader.element(der.SEQUENCE))
    return tuple(chain), found[3]


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield number and value of each field of a protobuf message. Raises ValueError."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise ValueError("a field without a number")
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of type {kind}")
        if length > len(message) - at:
            raise ValueError("a truncated message")
        yield number, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a truncated or overlong number")


# -- the separate process -------------------------------------------------------------------------------------------


def _run_child(path: str, seconds: float) -> bytes:
    """Run the separate process and return the first response. Raises ConfigurationError."""
    module, name = "ringfence.evidence.workload_api", "the process that asks the Workload API"
    try:
        return base64.b64decode(own_process.ask(module, path, str(seconds), seconds=seconds + 5, name=name))
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"the Workload API at {path} did not answer within {seconds:.0f} s; {_ADVICE['DEADLINE_EXCEEDED']}"
        ) from None
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def main(path: str, seconds: float) -> None:
    """Ask the Workload API and write its first response to stdout."""
    try:
        own_process.answer(base64.b64encode(_ask(path, seconds)).decode("ascii"))
    except ConfigurationError as error:
        own_process.answer(error=str(error))


def _ask(path: str, seconds: float) -> bytes:
    grpc = load_library()
    options = (("grpc.max_receive_message_length", RESPONSE_BYTES), ("grpc.enable_http_proxy", 0))
    channel = grpc.insecure_channel(f"unix:{path}", options=options)
    call = channel.unary_stream(_METHOD, request_serializer=bytes, response_deserializer=bytes)
    try:
        for response in call(b"", metadata=_METADATA, timeout=seconds):
            return bytes(response)
    except grpc.RpcError as error:
        code = error.code().name
        advice = _ADVICE.get(code, "check the agent's log")
        detail = ascii(error.details() or "")[:200]
        raise ConfigurationError(f"the Workload API at {path} answers {code} ({detail}); {advice}") from None
    raise ConfigurationError(f"the Workload API at {path} returned nothing; check the agent's log")


def load_library() -> Any:
    """Import grpcio, which is needed only for the Workload API. Raises ConfigurationError if it is missing."""
    try:
        import grpc
    except ImportError as error:
        raise ConfigurationError(f"for a SPIFFE Workload API, grpcio is needed ({error}): {INSTALL}") from None
    return grpc


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
