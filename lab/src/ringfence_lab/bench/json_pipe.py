"""A worker process and its commands: JSON objects, in both directions, between the benchmark and each worker."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ringfence.launch.tied import end_with

Message = dict[str, Any]


def send(pipe: Connection, message: Message) -> None:
    pipe.send_bytes(json.dumps(message).encode())


def receive(pipe: Connection) -> Message | None:
    """Return the next message, or None if the other endpoint has closed the connection."""
    try:
        message: Message = json.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return None
    return message


def run_worker(make: Callable[[Message], object]) -> NoReturn:
    """Run the process of a worker, whose commands are the methods of what `make` returns for its configuration.

    It ends with its parent: a worker that waits in a collective would not notice otherwise.
    """
    config = json.loads(sys.argv[1])
    end_with(config["parent"])
    pipe = Connection(config["channel"])
    try:
        worker = make(config)
        while (message := receive(pipe)) is not None:
            command = getattr(worker, message.pop("do"))
            send(pipe, {"done": command(**message)})
    except Exception as error:
        traceback.print_exc()
        send(pipe, {"error": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(0)  # nothing that a benchmark leaves behind is worth an orderly goodbye between its ranks
