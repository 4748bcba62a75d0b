"""Measure what peer verification costs two workers.

    python -m scripts.peer_verification > docs/results/peer-verification.json


Two engines in memory open their first link, once under a policy that asks for evidence and once without: the difference is
the CPU time of both ends, verifying included, and the bytes on the wire in both directions. Evidence is minted under the tests'
roots. On a network a connection and two round trips come on top.
"""

from __future__ import annotations

import datetime
import json
import statistics
import time

import torch

from ringfence.admission.peer_verification import PeerVerifier
from ringfence_lab.bench.machine import facts
from tests.in_memory_network import Pipe
from tests.memory_cluster import World, broadcast
from tests.unit.peer_verification_samples import TECHNOLOGIES, Technology, circle

ROUNDS = 31
SIZE = 3  # ranks 1 and 2 never met: both are children of rank 0


def first_link(technology: Technology | None) -> tuple[float, int]:
    """CPU seconds and bytes until rank 2 has what rank 1 sent."""

    def verify_peers(public: list[bytes]) -> list[PeerVerifier]:
        made = circle(public, technology)
        return [made.peer_verifier(rank) for rank in range(SIZE)]

    world = World(SIZE, verify_peers=verify_peers if technology else None)
    communicators = world.add_communicator("siblings", (1, 2))
    carried = 0

    def count(pipe: Pipe, data: bytes) -> bytes:
        nonlocal carried
        carried += len(data)
        return data

    tensors = {rank: torch.ones(1) for rank in (1, 2)}
    began = time.process_time()
    sent = [world.submit(communicators[rank], broadcast(communicators[rank], tensors[rank])) for rank in (1, 2)]
    world.run(sent, count)
    seconds = time.process_time() - began
    assert all(request.error is None for request in sent)
    return seconds, carried


def main() -> None:
    plain = [first_link(None) for _ in range(ROUNDS)]
    found = {}
    for name, made in TECHNOLOGIES.items():
        technology = made()
        rounds = [first_link(technology) for _ in range(ROUNDS)]
        extra = sorted(seconds - statistics.median(each for each, _ in plain) for seconds, _ in rounds)
        found[name] = {
            "cpu_seconds": statistics.median(extra),
            "cpu_seconds_quartiles": [extra[ROUNDS // 4], extra[3 * ROUNDS // 4]],
            "bytes": round(statistics.median(sent for _, sent in rounds)) - plain[0][1],
        }
    link = {"cpu_seconds": statistics.median(each for each, _ in plain), "bytes": plain[0][1]}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    print(json.dumps({"machine": facts(), "date": date, "first_link": link, "peer_verification": found}, indent=1))


if __name__ == "__main__":
    main()
