"""A hostile relay: workers dial it in place of each other; it copies every byte, and flips one bit when told to."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Stands before one worker. Bytes that travel to that worker are where a bit is flipped."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._streams: list[bytearray] = []
        self._sockets: list[socket.socket] = []
        self._armed = threading.Event()
        self.flipped = threading.Event()
        self._listener = socket.create_server((target[0], 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def flip_a_bit(self) -> None:
        """Change one bit, in the middle of the next bytes that travel to the worker."""
        self._armed.set()

    def streams(self) -> list[bytes]:
        """A copy of all that passed, by connection and direction."""
        return [bytes(stream) for stream in self._streams]

    def close(self) -> None:
        """End all connections; the threads end with them."""
        for end in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                dialler, _ = self._listener.accept()
                self._sockets.append(dialler)
                try:
                    worker = socket.create_connection(self._target)
                except OSError:
                    dialler.close()
                    continue
                self._sockets.append(worker)
                for source, sink, hostile in ((dialler, worker, True), (worker, dialler, False)):
                    threading.Thread(target=self._pump, args=(source, sink, hostile), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, hostile: bool) -> None:
        stream = bytearray()
        self._streams.append(stream)
        with contextlib.suppress(OSError):  # either end is gone, and so is the connection
            while chunk := source.recv(1 << 16):
                stream += chunk
                if hostile and self._armed.is_set():
                    self._armed.clear()
                    chunk = flip_middle_bit(chunk)
                    self.flipped.set()
                sink.sendall(chunk)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def flip_middle_bit(chunk: bytes) -> bytes:
    """The same bytes but for one bit."""
    changed = bytearray(chunk)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)
