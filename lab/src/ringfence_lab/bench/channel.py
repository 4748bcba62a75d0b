"""One JSON object a line, in both directions, between the benchmark and each of its workers."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]


class Channel:
    """One endpoint of a socket pair."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._lines = stream.makefile("rb")

    def send(self, message: Message) -> None:
        self._stream.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message | None:
        """Return the next message, or None if the other endpoint has closed the connection."""
        line = self._lines.readline()
        message: Message | None = json.loads(line) if line.endswith(b"\n") else None
        return message

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._lines.close()
        self._stream.close()
