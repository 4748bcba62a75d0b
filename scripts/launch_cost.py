"""`scripts/launch-cost`: CPU time of the agent that hosts the store, for the start of a run with many nodes.

A host in a process of its own admits agents over TLS, forms a round and serves what torchrun's agents write and read to
assign ranks. The cost of rounds with the full number of nodes, which grows faster than their number, is measured in memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

NODES: Final = 2048
SAMPLE: Final = 64
_SECONDS: Final = 120
# Agents that dial at a time: all have the address of this machine, and the host drops connections beyond 16 of one address.
_DIALLING: Final = threading.Semaphore(8)
_POLL_SECONDS: Final = 0.002


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/launch-cost", description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES, help="of the run (default: %(default)s)")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="agents that are started (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    each = admissions(options.sample)
    rounds = in_memory(options.nodes) - in_memory(options.sample) * options.nodes / options.sample
    total = each * options.nodes + max(0.0, rounds)
    found = {
        "nodes": options.nodes,
        "sample": options.sample,
        "host_cpu_per_agent_ms": each * 1e3,
        "rounds_beyond_linear_s": max(0.0, rounds),
        "host_cpu_s": total,
    }
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"host, for each of {options.sample} agents: {each * 1e3:.2f} ms of CPU (TLS, admission, a round, ranks)")
        print(f"rounds with {options.nodes} nodes, beyond linear: {max(0.0, rounds):.2f} s")
        print(f"host, for {options.nodes} nodes: {total:.1f} s of CPU")
    return 0


def admissions(agents: int) -> float:
    """CPU seconds of the host for each agent that is admitted and starts its workers."""
    from ringfence.private_files import new_secret_file

    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        new_secret_file(secret)
        os.environ["RINGFENCE_SECRET_FILE"] = str(secret)
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        host = context.Process(target=_host, args=(there, agents + 1))
        host.start()
        port = _received(here)
        threads = [threading.Thread(target=_agent, args=(int(port), rank, agents + 1)) for rank in range(1, agents + 1)]
        for thread in threads:
            thread.start()
        seconds = _received(here)
        for thread in threads:
            thread.join(_SECONDS)
        here.send("done")
        host.join(_SECONDS)
    return seconds / agents


def _received(pipe: Connection) -> float:
    if not pipe.poll(_SECONDS):
        raise TimeoutError("the host does not answer")
    return float(pipe.recv())


def _host(pipe: Connection, nodes: int) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    agent = _rendezvous(port, 0, nodes)
    before = time.process_time()
    pipe.send(port)
    _assign(agent, 0, nodes)
    pipe.send(time.process_time() - before)
    pipe.recv()


def _agent(port: int, rank: int, nodes: int) -> None:
    with _DIALLING:
        agent = _rendezvous(port, rank, nodes)
        while agent._notice() is None:  # the first one comes once it is admitted
            time.sleep(_POLL_SECONDS)
    _assign(agent, rank, nodes)


def _rendezvous(port: int, rank: int, nodes: int):  # type: ignore[no-untyped-def]
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from ringfence.launch.handler import create

    return create(RendezvousParameters("ringfence", f"127.0.0.1:{port}", "cost", nodes, nodes, None, rank=rank))


def _assign(agent, rank: int, nodes: int) -> None:  # type: ignore[no-untyped-def]
    """What torchrun's agents do with the store of a round."""
    store = agent.next_rendezvous().store
    store.set(f"torchelastic/role_info/{rank}", "{}")
    if rank == 0:
        store.multi_get([f"torchelastic/role_info/{each}" for each in range(nodes)])
        store.multi_set([f"torchelastic/assigned_ranks/{each}" for each in range(nodes)], ["[0, 0, 0, 0]"] * nodes)
    store.get(f"torchelastic/assigned_ranks/{rank}")


def in_memory(nodes: int) -> float:
    """CPU seconds of a round's state alone, without connections."""
    import torch.distributed as dist

    from ringfence.launch.messages import Call, Operation, to_json
    from ringfence.launch.rounds import RoundLimits
    from ringfence.launch.store_state import StoreState

    began = time.process_time()
    state = StoreState("incarnation", RoundLimits(nodes, nodes), dist.HashStore)
    for rank in range(nodes):
        state.call(rank, Call(1, Operation.ATTACH, parts=(to_json({"agent": str(rank), "rank": rank}),)), 0.0)
    for rank in range(nodes):
        state.call(rank, Call(2, Operation.JOIN, milliseconds=600_000), 0.0)
        state.next_at()
    for rank in range(nodes):
        parts = (f"role_info/{rank}".encode(), b"{}")
        state.call(rank, Call(3, Operation.SET, "incarnation.1", 0, parts), 0.0)
        state.call(rank, Call(4, Operation.GET, "incarnation.1", 60_000, (f"assigned/{rank}".encode(),)), 0.0)
        state.next_at()
    values = tuple(part for rank in range(nodes) for part in (f"assigned/{rank}".encode(), b"[0, 0, 0, 0]"))
    woken = state.call(0, Call(5, Operation.SET, "incarnation.1", 0, values), 0.0)
    if len(woken) != nodes + 1:
        raise AssertionError(f"{len(woken)} answers")
    return time.process_time() - began


if __name__ == "__main__":
    raise SystemExit(main())
