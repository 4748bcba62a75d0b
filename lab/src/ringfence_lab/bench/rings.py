"""Other implementations of a ring over TCP for comparison: plaintext, sealed hop by hop, and through TLS 1.3.

All three exchange whole chunks with their two neighbours, one step after the other. `HopByHopRing` is the scheme whose
price the published studies of encrypted collectives measured: each message is sealed as a whole, sent, received as a
whole, opened, reduced, and sealed again for the next hop; no segments, no overlap, nothing forwarded as it came.
"""

from __future__ import annotations

import secrets
import select
import socket
import ssl
from pathlib import Path
from typing import Any, Final

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ringfence.dataplane.buffers import as_bytes
from ringfence.keys import IV_BYTES, KEY_BYTES, TAG_BYTES

_WAIT: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_HANDSHAKE_SECONDS: Final = 30.0


class Ring:
    """A plaintext ring. Subclasses replace `exchange`."""

    def __init__(self, store: Any, name: str, rank: int, size: int, host: str, folder: Path) -> None:
        self.rank = rank
        self.size = size
        self._background = self._sums = torch.empty(0)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            listener.settimeout(_HANDSHAKE_SECONDS)
            store.set(f"{name}/{rank}", f"{host} {listener.getsockname()[1]}")
            there, port = store.get(f"{name}/{(rank + 1) % size}").decode().split()
            self._out = socket.create_connection((there, int(port)), timeout=_HANDSHAKE_SECONDS)
            self._in, _ = listener.accept()
        for stream in (self._out, self._in):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.settimeout(_HANDSHAKE_SECONDS)
        self._secure(store, name, folder)
        for stream in (self._out, self._in):
            stream.setblocking(False)

    def _secure(self, store: Any, name: str, folder: Path) -> None:
        """Agree on keys over the connections to the next rank and from the previous one."""

    def close(self) -> None:
        self._out.close()
        self._in.close()

    # -- moving bytes ------------------------------------------------------------------------------------------------

    def exchange(self, sent: memoryview, received: memoryview) -> None:
        """Send one chunk to the next rank while receiving one from the previous."""
        self._move(sent, received)

    def _move(self, unsent: memoryview, missing: memoryview) -> None:
        while unsent or missing:
            moved = False
            if unsent:
                try:
                    unsent = unsent[self._out.send(unsent) :]
                    moved = True
                except _WAIT:
                    pass
            if missing:
                try:
                    got = self._in.recv_into(missing)
                except _WAIT:
                    pass
                else:
                    if not got:
                        raise ConnectionResetError(f"rank {(self.rank - 1) % self.size} of the ring is gone")
                    missing = missing[got:]
                    moved = True
            if not moved:
                self._wait(bool(unsent), bool(missing))

    def _wait(self, writing: bool, reading: bool) -> None:
        poll = select.poll()
        if writing:
            poll.register(self._out, select.POLLOUT)
        if reading:
            poll.register(self._in, select.POLLIN)
        poll.poll()

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> None:
        chunks = list(tensor.tensor_split(self.size))
        self._reduce_scatter(chunks)
        self._all_gather(chunks, owned=(self.rank + 1) % self.size)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Reduce-scatter; chunks are shifted by one, so that each rank ends with the chunk of its own number."""
        if self._sums.shape != tensor.shape:
            self._sums = torch.empty_like(tensor)
        chunks = list(self._sums.copy_(tensor).tensor_split(self.size))
        self._reduce_scatter(chunks[-1:] + chunks[:-1])
        output.copy_(chunks[self.rank])

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        chunks = list(output.tensor_split(self.size))
        chunks[self.rank].copy_(tensor)
        self._all_gather(chunks, owned=self.rank)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast from rank 0 along the chain, the whole message at each hop."""
        whole, nothing = as_bytes(tensor), memoryview(bytearray())
        if self.rank > 0:
            self.exchange(nothing, whole)
        if self.rank < self.size - 1:
            self.exchange(whole, nothing)

    def _reduce_scatter(self, chunks: list[torch.Tensor]) -> None:
        """Reduce around the ring. Afterwards rank r has the sum of chunk r + 1."""
        if self._background.numel() < chunks[0].numel() or self._background.dtype != chunks[0].dtype:
            self._background = torch.empty_like(chunks[0])
        for step in range(self.size - 1):
            out, into = chunks[(self.rank - step) % self.size], chunks[(self.rank - step - 1) % self.size]
            received = self._background[: into.numel()]
            self.exchange(as_bytes(out), as_bytes(received))
            into.add_(received)

    def _all_gather(self, chunks: list[torch.Tensor], owned: int) -> None:
        for step in range(self.size - 1):
            out, into = chunks[(owned - step) % self.size], chunks[(owned - step - 1) % self.size]
            self.exchange(as_bytes(out), as_bytes(into))


class HopByHopRing(Ring):
    """A ring that seals each chunk as a whole for each hop. The key is fixed: only the time matters here."""

    def _secure(self, store: Any, name: str, folder: Path) -> None:
        if self.rank == 0:
            store.set(f"{name}/key", secrets.token_hex(KEY_BYTES))
        self._cipher = AESGCM(bytes.fromhex(store.get(f"{name}/key").decode()))
        self._sealed_out = self._sealed_in = memoryview(bytearray())
        self._sent = self._received = 0

    def exchange(self, sent: memoryview, received: memoryview) -> None:
        room = max(len(sent), len(received)) + TAG_BYTES
        if len(self._sealed_out) < room:
            self._sealed_out, self._sealed_in = memoryview(bytearray(room)), memoryview(bytearray(room))
        out = self._sealed_out[: len(sent) + TAG_BYTES if len(sent) else 0]
        into = self._sealed_in[: len(received) + TAG_BYTES if len(received) else 0]
        if len(out):
            self._cipher.encrypt_into(_nonce(self.rank, self._sent), sent, None, out)
            self._sent += 1
        self._move(out, into)
        if len(into):
            self._cipher.decrypt_into(_nonce((self.rank - 1) % self.size, self._received), into, None, received)
            self._received += 1


class TlsRing(Ring):
    """A ring over TLS 1.3 through Python's ssl, with certificates that both endpoints verify."""

    def _secure(self, store: Any, name: str, folder: Path) -> None:
        """Rank 0 connects to the next rank first, the others accept first: otherwise all would wait."""
        client, server = _context(ssl.PROTOCOL_TLS_CLIENT, folder), _context(ssl.PROTOCOL_TLS_SERVER, folder)
        if self.rank == 0:
            self._out = client.wrap_socket(self._out)
        self._in = server.wrap_socket(self._in, server_side=True)
        if self.rank != 0:
            self._out = client.wrap_socket(self._out)

    def _wait(self, writing: bool, reading: bool) -> None:
        """Return whether TLS has decrypted data, for which the socket is not readable."""
        assert isinstance(self._in, ssl.SSLSocket)
        if not (reading and self._in.pending()):
            super()._wait(writing, reading)


def _context(protocol: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "ring.pem", folder / "ring.key")
    context.load_verify_locations(folder / "ca.pem")
    return context


def _nonce(rank: int, counter: int) -> bytes:
    return rank.to_bytes(4, "big") + counter.to_bytes(IV_BYTES - 4, "big")
