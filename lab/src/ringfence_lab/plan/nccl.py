"""NCCL in the clear, by its own tuning model: what users of GPUs compare with. Nothing of it is protected.

Formulas and figures are those with which NCCL 2.30.7 chooses an algorithm (src/graph/tuning.cc, 2026): rings and trees, with
the protocols LL128 and Simple. NVLS, CollNet and PAT are left out, and so are collectives that share a GPU with computing.
Bandwidths are the profile's: the devices' own link inside a machine, the network between machines.
"""

from __future__ import annotations

import math
from typing import Final

from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.work import Cost

SOURCE: Final = "tuning model of NCCL 2.30.7 (src/graph/tuning.cc)"
_BASE: Final = (14.0, 8.4)  # µs, as all of these, of LL128 and Simple: of a collective
_NVLINK: Final = {"ring": (1.9, 3.4), "tree": (1.25, 4.0)}  # of a step inside a machine
_NETWORK: Final = {"ring": (4.0, 14.0), "tree": (8.5, 14.0)}  # of a step between machines
_RING: Final = (0.92, 1.0)  # of the bandwidth
_TREE: Final = (0.92 * 120 / 128, 0.92)
_TREE_ALONE: Final = (0.92 * 7 / 9, 0.92)  # on one machine
_PLATEAU: Final = 1.4  # times the latency of a ring's Simple all-reduce between machines
# Of a tree's bandwidth, by the power of two of the bytes, from 1 MiB.
_TREE_BY_SIZE: Final = (
    (0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0),
    (0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9),
)


def collective_cost(hardware: Hardware, operation: str, workers: int, whole: float) -> Cost:
    """Return the cost of an all-reduce, all-gather or reduce-scatter of `whole` bytes among two or more workers."""
    together = min(workers, max(1, int(hardware["node", "workers"])))
    machines = -(-workers // together)
    links = [hardware["inside", "rate"] or hardware["device", "peer_rate"]] if together > 1 else []
    links += [hardware["network", "rate"]] if machines > 1 or not any(links) else []
    rate = min(filter(None, links))
    turns = 2 if operation == "all_reduce" else 1
    found = []
    for protocol, base in enumerate(_BASE):
        between = turns * (machines - 1)
        step = _NETWORK["tree" if together == 1 else "ring"][protocol]  # NCCL's rule: nothing hides it there
        latency = base + (turns * (workers - 1) - between) * _NVLINK["ring"][protocol] + between * step
        latency *= _PLATEAU if turns == 2 and machines > 1 and protocol == 1 else 1.0
        found.append((latency * 1e-6, turns * (workers - 1) / workers * whole / (rate * _RING[protocol])))
        if turns == 2:
            depth = (together - 1) * _NVLINK["tree"][protocol] + int(math.log2(machines)) * _NETWORK["tree"][protocol]
            by_size = _TREE_BY_SIZE[protocol][min(7, max(0, int(math.log2(max(1.0, whole))) - 20))]
            share = (_TREE if machines > 1 else _TREE_ALONE)[protocol] * by_size
            found.append(((base + 2 * depth) * 1e-6, 2 * whole / (rate * share)))
    latency, wire = min(found, key=sum)
    return Cost(latency + wire, {"latency": latency, "wire": wire}, "network", latency + wire)
