"""Measures how long a run takes to form, with and without a flood of expensive proofs at rank 0.

    python -m tests.attack.crowd certificate --rounds 10

Workers and attackers are processes of one machine. Each of the 56 connections sends a valid hello and the most expensive
proof that a peer without credentials can make (tests/attack/hostile.py), waits until it is rejected, and connects again. 40
of them come from three addresses, 16 from the children's own address. The attackers have the lowest priority, as if they
were other machines; `--nice 0` lets them compete with the workers for the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ringfence import keys
from ringfence.admission.binding import Role
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import HANDSHAKE, Hello, MessageSplitter, Proof, encode
from ringfence.config.settings import Settings
from ringfence.errors import PeerLostError, ProtocolError, RingfenceError
from ringfence.session.join import join
from ringfence.transport.tls import Credentials, Tls
from tests.attack.hostile import KINDS, RUN, Kind
from tests.attack.unauthenticated_peer import channel_of
from tests.integration.admitted_worker import FolderStore

SIZE = 8
SECONDS = 240.0  # for one join, and the longest attack; four seconds are many
OWN_ADDRESS = "127.0.0.1"
OTHER_ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
CROWD = tuple(OTHER_ADDRESSES[count % 3] for count in range(40)) + (OWN_ADDRESS,) * 16


# -- the attack -----------------------------------------------------------------------------------------------------


class HostileClient:
    """One connection after the other, from one address."""

    def __init__(self, crowd: Crowd, source: str) -> None:
        self._crowd = crowd
        self._source = source
        self.dial()

    def dial(self) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.bind((self._source, 0))
        with contextlib.suppress(BlockingIOError):
            self.socket.connect(self._crowd.address)
        self._tls = Tls(self._crowd.credentials, server=False)
        self._frames = MessageSplitter(HANDSHAKE, keys.ADMISSION_BYTES)
        self._unsent = bytearray(self._tls.outgoing())
        self._crowd.selector.register(self.socket, selectors.EVENT_WRITE | selectors.EVENT_READ, self)

    def serve(self) -> None:
        try:
            self._serve()
        except (OSError, ProtocolError, PeerLostError):
            self._crowd.turned_away += 1
            self._crowd.selector.unregister(self.socket)
            self.socket.close()
            self.dial()

    def _serve(self) -> None:
        if self._unsent:
            with contextlib.suppress(BlockingIOError):
                del self._unsent[: self.socket.send(self._unsent)]
            if not self._unsent:
                self._crowd.selector.modify(self.socket, selectors.EVENT_READ, self)
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(65536)
            if not data:
                raise PeerLostError("rejected")
            self._frames.feed(self._tls.receive(data))
            while (message := self._frames.next()) is not None:
                if isinstance(message, Hello):
                    self._tls.send(self._crowd.answer(self._tls, message))
                    self._crowd.shown += 1
            self._unsent += self._tls.outgoing()
            if self._unsent:
                self._crowd.selector.modify(self.socket, selectors.EVENT_WRITE | selectors.EVENT_READ, self)


class Crowd:
    """Attackers in one process."""

    def __init__(self, kind: Kind, number: int, address: tuple[str, int]) -> None:
        self.kind = kind
        self.address = address
        self.credentials = Credentials()
        self.selector = selectors.DefaultSelector()
        self.turned_away = self.shown = 0
        self._number = number

    def answer(self, tls: Tls, theirs: Hello) -> bytes:
        """Return a valid hello, made from the parent's, and a proof for this connection."""
        entry = replace(theirs.entry, rank=1 + self.shown % 4, tls_key_digest=self.credentials.key_digest)
        hello = replace(theirs, entry=entry)
        handshake = Handshake(Role.CHILD, hello, frozenset({0}), None, None)
        handshake.begin(channel_of(tls))
        handshake.receive(theirs)
        assert handshake.state is State.COLLECT
        return encode(hello) + encode(Proof(self._number, self.kind.hostile(handshake.own_binding)))

    def attack(self, sources: tuple[str, ...], pipe: Connection) -> None:
        """Attack until a message arrives on the pipe."""
        callers = [HostileClient(self, source) for source in sources]
        self.selector.register(pipe, selectors.EVENT_READ, None)
        end, ready = time.monotonic() + SECONDS, False
        while time.monotonic() < end:
            for key, _ in self.selector.select(1.0):
                if key.data is None:
                    pipe.recv()
                    for caller in callers:
                        caller.socket.close()
                    self.selector.close()
                    return
                key.data.serve()
            if not ready and self.turned_away >= len(sources):
                ready = True
                pipe.send("the attack is under way")


def attacker(pipe: Connection, kind: Kind, sources: tuple[str, ...], nice: int) -> None:
    os.nice(nice)
    while (address := pipe.recv()) is not None:
        crowd = Crowd(kind, kind.number, address)
        crowd.attack(sources, pipe)
        pipe.send((crowd.turned_away, crowd.shown))


# -- the workers ----------------------------------------------------------------------------------------------------


def worker(pipe: Connection, kind: Kind, rank: int, folder: str) -> None:
    while (generation := pipe.recv()) is not None:
        settings = Settings(run_id=RUN, generation=generation)
        store = FolderStore(Path(folder))
        try:
            admission = kind.admission(rank)
            member = join(store, rank, SIZE, settings, (OWN_ADDRESS, 1), SECONDS, b"", admission=admission)
        except RingfenceError as error:
            pipe.send(f"{type(error).__name__}: {error}")
            continue
        pipe.send("")
        pipe.recv()
        for edge in member.edges:
            edge.close()


class Run:
    """Eight workers and the attackers."""

    def __init__(self, name: str, nice: int = 19) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ringfence-crowd-")
        self._store = FolderStore(Path(self._folder.name))
        self._generation = 0
        context = multiprocessing.get_context("fork")  # all have the keys that are made here
        kind = KINDS[name]()
        self._workers, self._attackers = [], []
        self._processes: list[Any] = []

        def start(target: Callable[..., None], *arguments: object) -> Connection:
            near, far = context.Pipe()
            process = context.Process(target=target, args=(far, kind, *arguments), daemon=True)
            process.start()
            far.close()
            self._processes.append(process)
            return near

        self._workers = [start(worker, rank, self._folder.name) for rank in range(SIZE)]
        self._attackers = [start(attacker, tuple(part), nice) for part in (CROWD[:40], CROWD[40:])]

    def form(self, attacked: bool) -> tuple[float, int]:
        """Return the seconds from the start of ranks 1 to 7 until all have joined, and the number of rejections."""
        self._generation += 1
        for file in Path(self._folder.name).iterdir():
            file.unlink()
        self._workers[0].send(str(self._generation))
        address = self._wait_for_address()
        if attacked:
            for pipe in self._attackers:
                pipe.send(address)
            for pipe in self._attackers:
                assert pipe.poll(SECONDS) and pipe.recv() == "the attack is under way"
        began = time.monotonic()
        for pipe in self._workers[1:]:
            pipe.send(str(self._generation))
        said = [self._hear(pipe) for pipe in self._workers]
        seconds, count = time.monotonic() - began, 0
        assert not any(said), said
        if attacked:
            for pipe in self._attackers:
                pipe.send("stop")
                count += pipe.recv()[0]
        for pipe in self._workers:
            pipe.send("leave")
        return seconds, count

    def _wait_for_address(self) -> tuple[str, int]:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for file in Path(self._folder.name).glob("*_0"):
                host, _, port = file.read_text().rpartition(":")
                return host, int(port)
        raise TimeoutError("rank 0 published no address")

    def _hear(self, pipe: Connection) -> str:
        assert wait([pipe], SECONDS + 20), "a worker hangs"
        said: str = pipe.recv()
        return said

    def close(self) -> None:
        for pipe in (*self._workers, *self._attackers):
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()


def measure(kind: str, rounds: int, nice: int = 19) -> dict[str, object]:
    run = Run(kind, nice)
    try:
        run.form(False)  # modules are imported, caches are filled
        alone, attacked, turned_away = [], [], []
        for _ in range(rounds):
            alone.append(run.form(False)[0])
            seconds, count = run.form(True)
            attacked.append(seconds)
            turned_away.append(count)
    finally:
        run.close()
    return {
        "kind": kind,
        "alone": statistics.median(alone),
        "attacked": statistics.median(attacked),
        "worst": max(attacked),
        "turned_away": statistics.median(turned_away),
    }


def table(path: Path) -> str:
    """Return the results of a file as a Markdown table."""
    rows = ["| kind of proof | alone, s | attacked, s | the slowest, s | turned away |", "|---|---:|---:|---:|---:|"]
    for line in map(json.loads, path.read_text().splitlines()):
        seconds = " | ".join(f"{line[name]:.2f}" for name in ("alone", "attacked", "worst"))
        rows.append(f"| {line['kind']} | {seconds} | {line['turned_away']:.0f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.attack.crowd", description=__doc__)
    parser.add_argument("kind", choices=[*KINDS, "all"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--nice", type=int, default=19, help="of the attackers (default: %(default)s)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print what was written to FILE as a table")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.table))
        return
    for kind in KINDS if arguments.kind == "all" else [arguments.kind]:
        print(json.dumps(measure(kind, arguments.rounds, arguments.nice)), flush=True)


if __name__ == "__main__":
    main()
