"""Measure how fast one worker seals and sends over one channel and over two, into a sink.

    python -m scripts.channel_rate [--rounds N] [--mebibytes N]

The sender is a worker's runtime: engine, progress loop and channels, over TCP on the loopback interface. The other process
completes the handshakes and a first broadcast, checks it, and from then on discards what arrives (MSG_TRUNC), which takes
little CPU time. Each round broadcasts the same tensor in every variant, in random order. "busy": the caller runs pure Python
meanwhile, instead of waiting.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import select
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence.backend.binding import bytes_of, dtype_code, parts_of
from ringfence.collectives import Buffer, Collective, Table, choose
from ringfence.dataplane import native
from ringfence.dataplane.request import CollectiveRequest
from ringfence.keys import Secret
from ringfence.link.frames import Call
from ringfence.runtime.channels import ChannelEngine
from ringfence.runtime.communicator import Communicator
from ringfence.runtime.engine import Engine
from ringfence.runtime.link_keys import LinkKeys
from ringfence.runtime.progress import ProgressLoop
from ringfence.transport.tcp import TcpNetwork
from ringfence_lab.bench.machine import facts

_CHANNELS = 2
_MIB = 1 << 20
_WARM = 16 * _MIB
_NEVER = 1 << 60  # channel_bytes with which one channel is used
VARIANTS = ("1 channel", "2 channels", "1 channel, busy", "2 channels, busy")


class Worker(NamedTuple):
    """The runtime of one worker, without admission: both processes derive the same keys from constants."""

    engine: Engine
    loop: ProgressLoop
    loops: list[ProgressLoop]
    communicator: Communicator

    @classmethod
    def start(cls, rank: int, listener: socket.socket, ports: list[int]) -> Worker:
        addresses = [("127.0.0.1", port) for port in ports]
        private = [X25519PrivateKey.from_private_bytes(hashlib.sha256(b"%d" % each).digest()) for each in range(2)]
        public = [each.public_key().public_bytes_raw() for each in private]
        network = TcpNetwork(listener, addresses)
        engine = Engine(
            *(rank, 2, LinkKeys(Secret(bytes(range(32))), private[rank], public)),
            network,
            Table(channels=_CHANNELS),
        )
        networks = [TcpNetwork(None, addresses) for _ in range(1, _CHANNELS)]
        channels = [ChannelEngine(engine, number, each) for number, each in enumerate(networks, 1)]
        engine.open_channels(channels)
        native.release_gil()
        loops = [ProgressLoop(each, its, ()) for each, its in zip(channels, networks, strict=True)]
        communicator = engine.add_communicator("world", (0, 1))
        return cls(engine, ProgressLoop(engine, network, ()), loops, communicator)

    def broadcast(self, tensor: torch.Tensor) -> CollectiveRequest:
        """Submit a broadcast from rank 0."""
        schedule = choose(
            *(Collective.BROADCAST, 2, self.engine.rank, 0, bytes_of(tensor), self.engine.table),
        )
        call = Call(Collective.BROADCAST, 0, dtype_code(tensor.dtype), schedule.identifier, 0, tensor.numel())
        parts = {Buffer.DATA: parts_of(schedule, Buffer.DATA, [tensor])}
        request = CollectiveRequest(call, self.engine.clock() + 60, tensor, schedule, parts, tensor.dtype, None)
        self.loop.call_soon_threadsafe(lambda: self.engine.submit(self.communicator, request))
        return request

    def wait(self, request: CollectiveRequest) -> None:
        self.loop.wait(request)
        if request.error is not None:
            raise request.error

    def leave(self) -> None:
        for loop in (self.loop, *self.loops):
            loop.leave(0.0)


def _warm(rank: int) -> torch.Tensor:
    return (
        torch.arange(_WARM, dtype=torch.int64).to(torch.uint8) if rank == 0 else torch.zeros(_WARM, dtype=torch.uint8)
    )


def sink(port: int) -> None:
    """The other process: receive and check one broadcast, then discard bytes until standard input ends."""
    listener = _listen()
    print(listener.getsockname()[1], flush=True)
    worker = Worker.start(1, listener, [port, listener.getsockname()[1]])
    tensor = _warm(1)
    worker.wait(worker.broadcast(tensor))
    if not torch.equal(tensor, _warm(0)):
        raise SystemExit("the first broadcast has arrived wrong")
    links = [
        *worker.communicator.links(),
        *(link for each in worker.engine.channels for link in each.communicators.links()),
    ]
    found: list[Any] = [each.stream for each in links if each.stream is not None]
    streams = {stream.fileno(): stream for stream in found}
    waiting = select.poll()
    for descriptor in (*streams, sys.stdin.fileno()):
        waiting.register(descriptor, select.POLLIN)
    buffer = bytearray(_MIB)
    print(len(streams), flush=True)
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor not in streams:
                worker.leave()
                return
            try:
                while streams[descriptor].recv_into(buffer, len(buffer), socket.MSG_TRUNC):
                    pass
                waiting.unregister(descriptor)  # the sender has closed it
            except BlockingIOError:
                continue
            except ConnectionResetError:
                waiting.unregister(descriptor)


def _listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener


def _gigabytes_per_second(worker: Worker, tensor: torch.Tensor, variant: str) -> tuple[float, float]:
    """Return GB/s, and nanoseconds of CPU time for each byte."""
    several = variant.startswith("2")
    worker.communicator.table = replace(worker.engine.table, channel_bytes=0 if several else _NEVER)
    native.release_gil(several)
    cpu, start = time.process_time(), time.perf_counter()
    request = worker.broadcast(tensor)
    if variant.endswith("busy"):
        worker.loop.wake()
        while not request.done:
            sum(range(100))
    worker.wait(request)
    seconds, size = time.perf_counter() - start, bytes_of(tensor)
    return size / seconds / 1e9, (time.process_time() - cpu) / size * 1e9


def measure(rounds: int, mebibytes: int) -> dict[str, Any]:
    """Return the rates of all rounds by variant."""
    listener = _listen()
    command = [sys.executable, "-m", "scripts.channel_rate", "--sink", str(listener.getsockname()[1])]
    far = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
    assert far.stdin is not None and far.stdout is not None
    worker = Worker.start(0, listener, [listener.getsockname()[1], int(far.stdout.readline())])
    rates: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    costs: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    try:
        worker.wait(worker.broadcast(_warm(0)))
        connections = int(far.stdout.readline())
        assert connections == 2 * _CHANNELS, connections  # of each channel one forth and one back
        tensor = torch.randint(256, (mebibytes * _MIB,), dtype=torch.uint8)
        for variant in VARIANTS:
            _gigabytes_per_second(worker, tensor, variant)
        for number in range(rounds):
            for variant in random.Random(number).sample(VARIANTS, len(VARIANTS)):  # noqa: S311
                rate, cost = _gigabytes_per_second(worker, tensor, variant)
                rates[variant].append(round(rate, 3))
                costs[variant].append(round(cost, 4))
    finally:
        far.stdin.close()
        worker.leave()
        far.wait(30)
    return {"GB/s": rates, "ns of CPU per byte": costs}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.channel_rate", description="Measure channels.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--sink", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sink is not None:
        sink(options.sink)
        return
    found = measure(options.rounds, options.mebibytes)
    rates = {variant: statistics.median(each) for variant, each in found["GB/s"].items()}
    ratios = [two / one for one, two in zip(found["GB/s"][VARIANTS[0]], found["GB/s"][VARIANTS[1]], strict=True)]
    record = {
        "machine": facts(),
        "date": time.strftime("%Y-%m-%d"),
        "mebibytes": options.mebibytes,
        "rounds": options.rounds,
        "median GB/s": rates,
        "2 channels over 1, median of the rounds": round(statistics.median(ratios), 3),
        **found,
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
