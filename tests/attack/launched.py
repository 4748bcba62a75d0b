"""Runs on two machines, as network namespaces, with a capture of all their traffic; and what their listeners answer."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from OpenSSL import SSL

from ringfence.config.private_files import new_secret_file
from tests.attack.eavesdrop import Capture, within
from tests.integration.netns import ADDRESSES, Hosts
from tests.integration.test_readme import environment

SCRIPT = Path(__file__).parent.parent / "integration" / "launch_script.py"
RUN_ID = "launched-job-4711"
PORT = 29400
SECONDS = 240.0  # for a run to form and to train
ANSWER_SECONDS = 3.0  # for a listener to answer
SILENCE_SECONDS = 0.5
RINGFENCE = [sys.executable, "-m", "ringfence.cli"]
ENDPOINT = ["--rdzv-endpoint", f"{ADDRESSES['near']}:{PORT}", "--rdzv-id", RUN_ID]
SEALED = [*RINGFENCE, "run", *ENDPOINT]
STOCK = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", *ENDPOINT]
OF_NODE = {
    "sealed": {side: ["--node-rank", str(rank)] for rank, side in enumerate(ADDRESSES)},
    "stock": {
        side: ["--rdzv-conf", f"is_host={int(side == 'near')}", "--local-addr", address]
        for side, address in ADDRESSES.items()
    },
}


@dataclass(frozen=True)
class Listener:
    """What a listener on one of the machines answers to an unauthenticated client."""

    address: tuple[str, int]
    to_query: bytes  # of torch's client of a TCPStore
    to_garbage: bytes = b""  # and to silence
    to_tls: bytes = b""  # application data for a client without a certificate


@dataclass
class Run:
    """A run that has ended."""

    weights: bytes
    captures: list[Capture] = field(default_factory=list)
    listeners: list[Listener] = field(default_factory=list)

    def contains(self, pattern: bytes) -> bool:
        return any(capture.contains([pattern]) for capture in self.captures)


def launched(kind: str, hosts: Hosts, folder: Path, *, garbage: bool) -> Run:
    """Run the script with 2 workers on each machine; ask every listener of the machines once it has trained."""
    new_secret_file(folder / "secret")
    weights = folder / f"weights of {kind}"
    with contextlib.ExitStack() as stack:
        places = [(hosts.names[side], interface) for side in ADDRESSES for interface in ("lo", "cable")]
        captures = [stack.enter_context(Capture(*place)) for place in places]
        with _agents(kind, hosts, folder, weights) as (output, proceed):
            _wait_for(output, b"trained", folder)
            found = _listeners(hosts, garbage=garbage)
            os.write(proceed, b"\n")
    for capture in captures:
        capture.assert_complete()
    return Run(weights.read_bytes(), captures, found)


@contextlib.contextmanager
def _agents(kind: str, hosts: Hosts, folder: Path, weights: Path) -> Iterator[tuple[int, int]]:
    """Start both agents; wait at the end until they have succeeded. Yields their output and the end of their input."""
    settings = {
        **environment(folder),
        "RINGFENCE_SECRET_FILE": str(folder / "secret"),
        "GLOO_SOCKET_IFNAME": "cable",
    }
    command = SEALED if kind == "sealed" else STOCK
    output, theirs = os.pipe()
    line, proceed = os.pipe()
    agents: list[subprocess.Popen[bytes]] = []
    try:
        for side in ADDRESSES:
            with open(folder / f"{kind} {side}", "wb") as errors:
                words = [*hosts.prefix(side), *command, *OF_NODE[kind][side], "--nnodes", "2", "--nproc-per-node", "2"]
                process = subprocess.Popen(
                    [*words, str(SCRIPT), str(weights)], stdin=line, stdout=theirs, stderr=errors, env=settings
                )
                agents.append(process)
        yield output, proceed
        for side, agent in zip(ADDRESSES, agents, strict=True):
            assert agent.wait(SECONDS) == 0, (folder / f"{kind} {side}").read_text()[-3000:]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        for descriptor in (output, theirs, line, proceed):
            os.close(descriptor)


def _wait_for(output: int, word: bytes, folder: Path) -> None:
    seen = b""
    while word not in seen:
        ready, _, _ = select.select([output], [], [], SECONDS)
        said = "\n".join(each.read_text()[-2000:] for each in folder.glob("* *ar"))
        assert ready, f"the run did not train within {SECONDS:g} s\n{said}"
        seen += os.read(output, 4096)


# -- listeners --------------------------------------------------------------------------------------------------------


def _listeners(hosts: Hosts, *, garbage: bool) -> list[Listener]:
    places = [(hosts.names[side], address) for side in ADDRESSES for address in listening(hosts, side)]
    query = store_query()

    def ask(address: tuple[str, int]) -> Listener:
        to_query = answer_to(query, address)
        if not garbage:
            return Listener(address, to_query)
        to_garbage = answer_to(b"", address, SILENCE_SECONDS) + answer_to(os.urandom(4096), address)
        return Listener(address, to_query, to_garbage, _to_tls(address))

    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(lambda place: within(place[0], lambda: ask(place[1])), places))


def listening(hosts: Hosts, side: str) -> list[tuple[str, int]]:
    """Return where a machine listens on TCP."""
    command = [*hosts.prefix(side), "ss", "-tlnH"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [line.split()[3].rpartition(":") for line in lines]
    wildcards = ("*", "0.0.0.0", "[::]")
    return [(ADDRESSES[side] if host in wildcards else host.strip("[]"), int(port)) for host, _, port in found]


@functools.cache
def store_query() -> bytes:
    """Return what torch's client sends to a TCPStore until that answers: a real one is asked, through a relay."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        client = threads.submit(_connect_to_store, listener.getsockname()[1])
        with listener.accept()[0] as asking, socket.create_connection(("127.0.0.1", store.port)) as asked:
            sent = b""
            while asked not in select.select([asking, asked], [], [])[0]:
                sent += (piece := asking.recv(4096))
                assert piece, "the client has gone"
                asked.sendall(piece)
        listener.close()
        client.result()
    return sent


def _connect_to_store(port: int) -> None:
    with contextlib.suppress(dist.DistError, RuntimeError):
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)


def answer_to(sent: bytes, address: tuple[str, int], seconds: float = ANSWER_SECONDS) -> bytes:
    """Return what a listener answers within some seconds, and shortly after its first bytes."""
    received = b""
    with socket.create_connection(address, timeout=seconds) as connection, contextlib.suppress(OSError):
        connection.sendall(sent)
        while piece := connection.recv(4096):
            received += piece
            connection.settimeout(SILENCE_SECONDS)
    return received


def _to_tls(address: tuple[str, int]) -> bytes:
    """What a TLS client without a certificate can read once its handshake is done."""
    plain = b""
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(ANSWER_SECONDS), 0))
        tls = SSL.Connection(SSL.Context(SSL.TLS_CLIENT_METHOD), connection)
        tls.set_connect_state()
        with contextlib.suppress(SSL.Error):
            tls.do_handshake()
            while piece := tls.recv(4096):
                plain += piece
    return plain


def says_nothing(answer: bytes) -> bool:
    """Whether an answer is empty, or one unencrypted TLS alert, which says no more than that the connection is refused."""
    return not answer or (len(answer) == 7 and answer[0] == 21)
