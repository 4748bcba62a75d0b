"""A worker process and its commands: one JSON object a line, in both directions, between the benchmark and each worker."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1

Message = dict[str, Any]


class JsonPipe:
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


def run_worker(make: Callable[[Message], object]) -> NoReturn:
    """Run the process of a worker, whose commands are the methods of what `make` returns for its configuration.

    It ends with its parent: a worker that waits in a collective would not notice otherwise.
    """
    config = json.loads(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != config["parent"]:
        os._exit(1)
    channel = JsonPipe(socket.socket(fileno=config["channel"]))
    try:
        worker = make(config)
        while (message := channel.receive()) is not None:
            command = getattr(worker, message.pop("do"))
            channel.send({"done": command(**message)})
    except Exception as error:
        traceback.print_exc()
        channel.send({"error": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(0)  # nothing that a benchmark leaves behind is worth an orderly goodbye between its ranks
