"""A SPIFFE Workload API for tests: a gRPC server on a Unix socket, which issues X.509-SVIDs under a test authority.

Messages are made by Google's protobuf library from SPIFFE's definition, which is a second reading of the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from ringfence.admission.proofs.certificate import Credential
from tests.certificates import Authority, spiffe

ID = "spiffe://example.org/trainer/7"


def _message_class() -> Any:
    """X509SVIDResponse of workload.proto, as far as X.509-SVIDs go."""
    file = descriptor_pb2.FileDescriptorProto(name="workload.proto", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    svid = file.message_type.add(name="X509SVID")
    for number, name in enumerate(("spiffe_id", "x509_svid", "x509_svid_key", "bundle", "hint"), 1):
        kind = kinds.TYPE_STRING if name in ("spiffe_id", "hint") else kinds.TYPE_BYTES
        svid.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    response = file.message_type.add(name="X509SVIDResponse")
    response.field.add(
        name="svids", number=1, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_REPEATED, type_name=".X509SVID"
    )
    response.field.add(name="crl", number=2, type=kinds.TYPE_BYTES, label=kinds.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("X509SVIDResponse"))


Response = _message_class()


def response_of(credential: Credential, authority: Authority, name: str = ID) -> Any:
    key = credential.key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    made = Response()
    made.svids.add(
        spiffe_id=name, x509_svid=b"".join(credential.chain), x509_svid_key=key, bundle=authority.der, hint="internal"
    )
    return made


class WorkloadApi:
    """The server. `answer` makes the response to each request; it may raise, or block."""

    def __init__(self, path: Path, answer: Callable[[], bytes] | None = None) -> None:
        self.authority = Authority()
        self.answer = answer or self.issue
        self.requests = 0
        self.code: grpc.StatusCode | None = None
        self.socket = f"unix://{path}"
        self._server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.unary_stream_rpc_method_handler(self._fetch)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("SpiffeWorkloadAPI", {"FetchX509SVID": handler}),)
        )
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()

    def issue(self) -> bytes:
        """A new certificate and a new key for each request, below an intermediate authority, as SPIRE does it."""
        between = Authority("intermediate", issuer=self.authority)
        encoded: bytes = response_of(between.issue(spiffe("trainer/7")), self.authority).SerializeToString()
        return encoded

    def _fetch(self, request: bytes, context: Any) -> Iterator[bytes]:
        self.requests += 1
        if dict(context.invocation_metadata()).get("workload.spiffe.io") != "true" or request:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "security header missing from request")
        if self.code is not None:
            context.abort(self.code, "no identity issued")
        yield self.answer()
        yield self.answer()  # the stream goes on with rotated ones, which nobody reads
