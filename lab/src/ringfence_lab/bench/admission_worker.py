"""A worker of `ringfence bench admission`: a process that joins over sockets on command. Needs no torch."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringfence.control import Bye
from ringfence.join import join, listen
from ringfence.settings import Settings
from ringfence_lab.bench.channel import Channel

_PR_SET_PDEATHSIG = 1
_TIMEOUT = 60.0


class FolderStore:
    """A store for workers of one machine: a file for each key, which appears whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str, /) -> None:
        file = self._file(key)
        builder = file.with_suffix(f".{os.getpid()}")
        builder.write_text(value, encoding="ascii")
        builder.replace(file)

    def get(self, key: str, /) -> bytes:
        return self._file(key).read_bytes()

    def check(self, keys: list[str], /) -> bool:
        return all(self._file(key).exists() for key in keys)

    def _file(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


def main() -> None:
    config = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # its parent may be killed
    if os.getppid() != config["parent"]:
        return
    channel = Channel(socket.socket(fileno=config["channel"]))
    settings = Settings.from_environment(os.environ)
    channel.send({"done": {"torch": "torch" in sys.modules}})
    while (command := channel.receive()) is not None:
        channel.send({"done": _join(config, replace(settings, generation=command["generation"]))})


def _join(config: dict[str, Any], settings: Settings) -> dict[str, Any]:
    rank, size = config["rank"], config["size"]
    wall, cpu = time.monotonic(), time.process_time()
    with listen(settings) as listener:
        store, address = FolderStore(Path(config["store"])), settings.link_address(listener.getsockname()[:2])
        member = join(store, rank, size, settings, address, _TIMEOUT, b"")
    spent = {"seconds": time.monotonic() - wall, "cpu": time.process_time() - cpu}
    for edge in member.edges:
        edge.send(Bye(rank))
        edge.close()
    return {**spent, "roster": member.roster.digest.hex(), "workers": len(member.roster.entries)}


if __name__ == "__main__":
    main()
