"""The cost of one collective in closed form: fast enough for 16,384 workers, tested against the simulation for up to 64.

Two bounds. The *chain*: messages that wait for each other, each of which takes its overheads, its first segment's work at both
ends, its wire and its latency. The *work*: what the busiest of the workers' threads, the nodes' cores, cards and memory has
to do in all: a thread has the heaviest worker's work, and what a node's workers share has the mean worker's, as often as there
are workers. In a schedule in which all workers do the same all the time, the longer one is the cost. In a tree, a worker's
work begins when the chain has reached it, so both add up.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

from ringfence.collectives import ScheduleId
from ringfence.collectives.passes import PASS_BYTES
from ringfence.keys import SHARED_FROM_BYTES
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.schedules import (
    RINGS,
    ChainMessage,
    busiest,
    chain,
    chain_shares,
    copied,
    near_share,
    usual,
)
from ringfence_lab.plan.work import (
    CLEAR,
    FREE,
    ON_THE_WIRE,
    Cost,
    Load,
    StageCosts,
    Terms,
    Variant,
    added,
    load,
    lost,
    passes,
    scaled,
    segments,
    stage_costs,
)

_SHARP: Final = 6
_SLOTS: Final = 8  # of a device, each with one pass of staging
GIVEN_BACK: Final = 32 << 20  # bytes from which the C library gives freed memory back to the system, at the latest


def collective_cost(
    hardware: Hardware,
    variant: Variant,
    identifier: ScheduleId,
    size: int,
    whole: float,
    threads: float = 1.0,
    per_node: int | None = None,
    at_once: int = 1,
    memory: float | None = None,
    narrow: bool = False,
    per_machine: int | None = None,
) -> Cost:
    """Return the cost of one collective of `whole` bytes among `size` workers.

    `threads`: a worker's, times the rate of one. `per_node`: workers that share cores and a network card, `per_machine`:
    workers that share memory, if not as the hardware says; 0: it is not known where machines end, and all is sealed.
    `at_once`: how many run at the same time, so that a thread has others to turn to. `memory`: bytes that a worker goes
    through before it comes back to these, if not the whole. `narrow`: it adds bfloat16.
    """
    if size < 2:
        return FREE
    together = min(size, max(1, int(hardware["node", "workers"]) if per_node is None else per_node))
    machine = min(size, shared_by(hardware) if per_machine is None else per_machine)
    if machine > 1:
        threads = 1.0  # the runtime has channels only where no two members share a machine
    path_links = chain(identifier, size, max(1, machine))
    piece = max((segments(variant, link.part * whole)[0] for link in path_links), default=0.0)
    spent = stage_costs(hardware, variant).met(lost(variant, whole if memory is None else memory, piece), narrow)
    loads, mean, alike = _loads(variant, identifier, size, whole, machine)
    heaviest = max(loads, key=lambda each: sum(each.terms(spent, variant).values()))
    cpu = mean.terms(spent, variant)
    cores = min(max(1.0, hardware["node", "cores"]), together * threads)
    # In a tree bytes flow in one direction: no worker waits for an answer.
    waits = spent.idle**at_once if alike else 0.0
    at_work = 1 - waits ** max(1.0, together / cores)  # a core rests while all its workers wait
    bounds: dict[str, Terms] = {
        "thread": scaled(heaviest.thread(spent, variant, threads), 1 / (1 - waits)),
        "cores": scaled(cpu, together / cores / at_work),
        "memory": {
            "memory": max(heaviest.touched(variant), together * mean.touched(variant)) / hardware["memory", "rate"]
        },
        "network": {
            "wire": _leaving(identifier, size, together, loads, mean, machine)
            * ON_THE_WIRE
            / hardware["network", "rate"]
        },
    }
    bound = max(bounds, key=lambda name: sum(bounds[name].values()))
    work = bounds[bound]
    near = near_share(identifier, size, machine) if machine > 1 and variant.shares else 0.0
    in_pass = whole / passes(variant, whole)  # passes overlap: the chain is that of one
    links = [
        (link, _message(hardware, variant, spent, link, in_pass, size, together, identifier, machine, near))
        for link in path_links
    ]
    path: Terms = {}
    for link, terms in links:
        path = added(path, scaled(terms, link.times))
    if alike or not all(link.by_segment for link, _ in links):
        terms, bound = _joined(path, work, bound)
    else:
        direct = identifier.name.endswith("_DIRECT")
        terms, bound = _in_turn(path, work, bound, heaviest.messages if direct else segments(variant, whole)[1])
    found = Cost(sum(terms.values()), terms, bound, sum(work.values()), sum(cpu.values()))
    if not hardware["device", "copy_rate"]:
        return found
    if hardware["device", "peer_rate"] and together >= size and (variant.each_hop or variant.name == "plaintext"):
        return _between_devices(hardware, variant, identifier, size, whole, heaviest)
    if variant.each_hop or variant.name == "gloo":
        return found.plus(_copied_between(hardware, variant, copied(identifier, size, whole), heaviest))
    return staged(hardware, variant, identifier, size, whole, found)


def shared_by(hardware: Hardware) -> int:
    """Return how many workers share a machine and its memory; 0 if all seal inside machines, too."""
    return 0 if hardware["inside", "sealed"] else int(hardware["node", "workers"])


def _joined(path: Terms, work: Terms, bound: str) -> tuple[Terms, str]:
    """Combine the bounds of workers that are always busy: the longer one, and a little more where both are similar.

    Then a segment sometimes finds its worker at work on another one. The smooth maximum agrees with the simulation.
    """
    slow, busy = sum(path.values()), sum(work.values())
    longer, terms, name = (slow, path, "chain") if slow >= busy else (busy, work, bound)
    together = (slow**_SHARP + busy**_SHARP) ** (1 / _SHARP)
    return scaled(terms, together / longer) if longer else terms, name


def _in_turn(path: Terms, work: Terms, bound: str, pieces: float) -> tuple[Terms, str]:
    """The first piece goes from end to end; the others follow as fast as the busiest worker can."""
    rest = scaled(work, 1 - 1 / pieces)
    return added(path, rest), bound if sum(rest.values()) > sum(path.values()) else "chain"


@lru_cache(maxsize=4096)
def _loads(
    variant: Variant, identifier: ScheduleId, size: int, whole: float, machine: int
) -> tuple[tuple[Load, ...], Load, bool]:
    counted, alike = busiest(identifier, size, machine, variant.shares)
    loads = [load(variant, each, whole) for each in counted]
    mean = load(variant, usual(identifier, size, machine, variant.shares), whole)
    if not machine:  # on the loopback, or all is as between machines
        loads, mean = (
            [each._replace(far_sent=0.0, far_received=0.0) for each in loads],
            mean._replace(far_sent=0.0, far_received=0.0),
        )
    return tuple(loads), mean, alike


def _leaving(
    identifier: ScheduleId, size: int, together: int, loads: tuple[Load, ...], mean: Load, machine: int
) -> float:
    """Return the bytes that the busiest node sends or receives over its network card."""
    if together >= size:
        return 0.0
    if machine:
        most = max(max(each.far_sent, each.far_received) for each in loads)
        return max(most, machine * max(mean.far_sent, mean.far_received))
    most = max(max(each.sent, each.received) for each in loads)
    if identifier in RINGS:
        return most  # neighbours sit together: one of a node's workers talks to another node
    all_of_them = max(most, together * max(mean.sent, mean.received))
    return all_of_them * (size - together) / (size - 1)  # any worker may send to any other


def _message(
    hardware: Hardware,
    variant: Variant,
    spent: StageCosts,
    link: ChainMessage,
    whole: float,
    size: int,
    together: int,
    identifier: ScheduleId,
    machine: int,
    near: float,
) -> Terms:
    """Return the terms of one message of the chain: of its first segment, or of all if the next one waits for all.

    `near`: the share of such messages that stay inside a machine.
    """
    length, pieces = segments(variant, link.part * whole)
    far = 0.0 if together >= size else (1 / together if identifier in RINGS else 1.0)
    if machine > 1 and variant.shares:
        if "_TWO_LEVELS" in identifier.name:
            near = float(link.near)
        far = 0.0 if together >= size else 1 - near
    sealed = 1 - near  # the share that passes through the network stack
    near_message = spent.near_message if length >= SHARED_FROM_BYTES else spent.message
    between = 1 + (spent.between - 1) * (machine > 0)
    sharing = max(0.0, together / max(1.0, hardware["node", "cores"]) - 1)
    sealing, adding = chain_shares(identifier, variant.forwards, size)
    # Of a parent's two children in a tree one is served second.
    turns = 1.5 if identifier.name.endswith("_TREE") and size > 2 else 1.0
    one = {
        "per-message overhead": turns * 2 * (sealed * spent.message + near * near_message),
        "latency": far * hardware["network", "latency"] + spent.switch * sharing,
        "wire": turns * far * length * ON_THE_WIRE / hardware["network", "rate"],
        "stack": turns * length * (spent.send + spent.receive) * sealed * between,
        "copy": turns * length * 2 * spent.near_copy * near,
        "reduce": turns * length * spent.reduce * adding,
    }
    framing = turns * length * (spent.seal * sealing + spent.open) * sealed
    one = added(one, {"crypto" if variant.sealed else "copy": framing})
    if link.by_segment or pieces == 1:
        return one
    slowest = max((one["per-message overhead"] + one["stack"] + framing) / 2, one["wire"])
    return added(one, {"stack" if slowest > one["wire"] else "wire": (pieces - 1) * slowest})


def _copy_figures(hardware: Hardware, variant: Variant) -> tuple[float, float]:
    """Return the rate and the overhead of a host-device copy."""
    plain = "plain_" if variant.name in CLEAR else ""
    return hardware["device", f"{plain}copy_rate"], hardware["device", f"{plain}copy_overhead"]


def _copied_between(hardware: Hardware, variant: Variant, moved: tuple[float, float], done: Load) -> Cost:
    """The cost of copies that overlap nothing: of whole tensors, before and after, or for each hop."""
    rate, overhead = _copy_figures(hardware, variant)
    copies, length = (done.messages, done.sent + done.received) if variant.each_hop else (2.0, sum(moved))
    seconds = copies * overhead + length / rate
    return Cost(seconds, {"host-device copy": seconds}, "host-device copy", seconds)


def _between_devices(
    hardware: Hardware, variant: Variant, identifier: ScheduleId, size: int, whole: float, done: Load
) -> Cost:
    """Return the cost among devices of one node, which copy at the same time; the host seals, sends and adds nothing.

    A message goes over the devices' own link in the clear. In confidential mode it is copied to the host, and then from it.
    """
    term, bound, copies = ("host-device copy", "host-device copy", 2) if variant.each_hop else ("wire", "network", 1)
    kind = "copy" if variant.each_hop else "peer"
    rate, overhead = hardware["device", f"{kind}_rate"], hardware["device", f"{kind}_overhead"]
    path = sum(link.times * copies * (overhead + link.part * whole / rate) for link in chain(identifier, size))
    seconds = max(path, max(done.sent, done.received) / rate)
    return Cost(seconds, {term: seconds}, bound, seconds)


def staged(hardware: Hardware, variant: Variant, identifier: ScheduleId, size: int, whole: float, found: Cost) -> Cost:
    """Return the cost of a collective on device tensors that costs `found` on host tensors.

    It is executed in passes. One copy brings a pass to the host and another one back, however many workers there are. Passes
    overlap, so the slowest of the stages determines the cost, and what the others take for one pass is added: the first pass
    is copied to the host, and the last one back, beside nothing. Copies in the two directions run beside each other, except
    in a confidential mode in which copies serialise: each blocks the thread that issues it, and that thread fills all slots
    before it hands over the first.
    """
    rate, overhead = _copy_figures(hardware, variant)
    number = max(1, math.ceil(whole / PASS_BYTES))
    reading, writing = (number * overhead + length / rate for length in copied(identifier, size, whole))
    if variant.name == "plaintext" or hardware["device", "overlap"]:
        copying = max(reading, writing)
        seconds = (reading + writing + found.seconds + (number - 1) * max(copying, found.seconds)) / number
    else:
        copying = reading + writing
        filled = reading * min(1.0, _SLOTS / number)
        seconds = filled + max(found.seconds + writing / number, found.seconds / number + copying - filled)
    terms = added(found.terms, {"host-device copy": seconds - found.seconds})
    bound = found.bound if found.seconds >= copying else "host-device copy"
    return Cost(seconds, terms, bound, max(found.work, copying), found.cpu)


def staging(hardware: Hardware, variant: Variant, size: int, whole: float, per_node: int) -> Cost:
    """Return the cost of torch's own copies in a gather or scatter of Gloo: of all of it, and of a worker's part."""
    spent = stage_costs(hardware, variant)
    each = whole * ((1 + 1 / size) * spent.staged + (spent.fresh if whole > GIVEN_BACK else 0.0))
    together = min(size, max(1, per_node))
    seconds = each * max(1.0, together / max(1.0, hardware["node", "cores"]))
    return Cost(seconds, {"copy": seconds}, "cores", seconds, each)
