"""What a long link really is: delay, jitter, loss and rate as two hosts see them, against what was set, and its own cost."""

from __future__ import annotations

import ctypes
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

from ringfence.cli.terminal import table
from ringfence_lab.bench.netns import Hosts, bits_per_second
from ringfence_lab.bench.relay import LongLink
from ringfence_lab.progress import Progress

_STAMP: Final = struct.Struct("<QQ")  # number, and nanoseconds when it was sent
_STAMPS: Final = 1500
_STAMP_SECONDS: Final = 0.002  # between two
_COUNTED: Final = 20_000  # small packets whose loss is counted
_COUNTED_TOGETHER: Final = 10
_WARM_SECONDS: Final = 3.0  # of TCP's slow start
_STREAM_SECONDS: Final = 5.0
_LAST_SECONDS: Final = 1.0  # after which nothing is under way, besides the delay
_CLONE_NEWNET: Final = 0x40000000
_SO_RCVBUFFORCE: Final = 33  # socket(7)
_CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class LinkResult:
    """One direction of a link, as measured. The rate is that of one TCP connection, which losses slow down."""

    delay: float  # seconds, median
    jitter: float  # half of the range from the 1st to the 99th percentile
    loss: float
    rate: float  # bits a second of payload
    cpu_seconds_per_gigabyte: float  # of the relay, and of what the kernel does in its name
    dropped: int  # packets that the relay could not keep


def measure(link: LongLink, rate: str | None) -> LinkResult:
    """Measure a link between two hosts. Needs root and iproute2."""
    with Progress(3) as progress, Hosts(2, rate, link) as hosts, ThreadPoolExecutor(1) as other:
        assert hosts.relay is not None
        (here, _), (there, address) = hosts.ends
        source, sink = socket_in(here, socket.SOCK_DGRAM), socket_in(there, socket.SOCK_DGRAM)
        with source, sink:
            sink.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
            sink.bind((address, 0))
            source.connect(sink.getsockname())
            sink.settimeout(_LAST_SECONDS + 2 * link.delay)
            progress.say("delay")
            stamps = other.submit(_delays, sink)
            _send_stamps(source, _STAMPS, 1)
            delays = sorted(stamps.result())
            progress.step("loss")
            counted = other.submit(_delays, sink)
            _send_stamps(source, _COUNTED, _COUNTED_TOGETHER)
            arrived = len(counted.result())
            progress.step("rate")
        before = hosts.relay.counters()
        bits = _stream(here, there, address)
        after = hosts.relay.counters()
        progress.step("rate")
    return LinkResult(
        delay=statistics.median(delays),
        jitter=(delays[len(delays) * 99 // 100] - delays[len(delays) // 100]) / 2,
        loss=1 - arrived / _COUNTED,
        rate=bits,
        cpu_seconds_per_gigabyte=(after.cpu - before.cpu) / (after.bytes - before.bytes) * 1e9,
        dropped=after.dropped,
    )


def socket_in(namespace: str, kind: socket.SocketKind) -> socket.socket:
    """Return an IPv4 socket of a network namespace; the calling thread stays where it is."""

    def make() -> socket.socket:
        inside = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(inside, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"network namespace {namespace}")
        finally:
            os.close(inside)
        return socket.socket(socket.AF_INET, kind)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _send_stamps(source: socket.socket, count: int, together: int) -> None:
    """Send stamped packets, `together` at a time."""
    start = time.monotonic()
    for number in range(0, count, together):
        for each in range(number, min(count, number + together)):
            source.send(_STAMP.pack(each, time.monotonic_ns()))
        time.sleep(max(0.0, start + number // together * _STAMP_SECONDS - time.monotonic()))


def _delays(sink: socket.socket) -> list[float]:
    """Return the delays of stamped packets until none has come for a while."""
    found = []
    try:
        while True:
            data = sink.recv(_STAMP.size)
            found.append((time.monotonic_ns() - _STAMP.unpack(data)[1]) / 1e9)
    except TimeoutError:
        return found


def _stream(here: str, there: str, address: str) -> float:
    """Return the bits a second that one TCP connection delivers, once it has found its rate."""
    listener, source = socket_in(there, socket.SOCK_STREAM), socket_in(here, socket.SOCK_STREAM)
    enough = threading.Event()
    with listener, source:
        listener.bind((address, 0))
        listener.listen(1)
        source.connect(listener.getsockname())
        sender = threading.Thread(target=_send_until, args=(source, enough))
        sender.start()
        try:
            stream, _ = listener.accept()
            with stream:
                buffer = bytearray(_CHUNK)
                begin = time.monotonic() + _WARM_SECONDS
                end, received, first, last = begin + _STREAM_SECONDS, 0, 0.0, 0.0
                while (now := time.monotonic()) < end and (count := stream.recv_into(buffer)):
                    if first:
                        received, last = received + count, time.monotonic()
                    elif now >= begin:
                        first = time.monotonic()
        finally:
            enough.set()
            sender.join()
    return received * 8 / (last - first)


def _send_until(source: socket.socket, enough: threading.Event) -> None:
    chunk = bytes(_CHUNK)
    try:
        while not enough.is_set():
            source.sendall(chunk)
    except OSError:  # the other end has closed
        enough.wait()


def document(link: LongLink, rate: str | None, result: LinkResult) -> dict[str, Any]:
    """Return a result as JSON."""
    return {"set": {**link._asdict(), "rate": bits_per_second(rate) if rate else None}, "measured": asdict(result)}


def result_text(found: Mapping[str, Any]) -> str:
    """Return what was set and what was measured, as a table."""
    wanted, measured = found["set"], found["measured"]
    rate = f"{wanted['rate'] / 1e6:g} Mbit/s" if wanted["rate"] else "none"
    return table(
        [
            ("", "set", "measured"),
            ("delay", f"{wanted['delay'] * 1e3:g} ms", f"{measured['delay'] * 1e3:.2f} ms"),
            ("jitter", f"{wanted['jitter'] * 1e3:g} ms", f"{measured['jitter'] * 1e3:.2f} ms"),
            ("loss", f"{wanted['loss']:.3%}", f"{measured['loss']:.3%}"),
            ("rate, one TCP connection", rate, f"{measured['rate'] / 1e6:.0f} Mbit/s"),
            ("packets that the relay dropped", "0", f"{measured['dropped']}"),
            ("CPU of the relay", "", f"{measured['cpu_seconds_per_gigabyte']:.2f} s/GB"),
        ]
    )
