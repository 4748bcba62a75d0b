"""The checks of the self-test: what each looks at, and what it means if it fails. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WRONG_NUMBERS: Final = "Do not train on this device: results may be wrong without an error."


@dataclass(frozen=True)
class SelftestCheck:
    """One check. `meaning` completes the sentence "If it fails, …"."""

    name: str
    title: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """Checks that belong together. `advice` says what to do if one of them fails."""

    name: str
    title: str
    checks: tuple[SelftestCheck, ...]
    advice: str


START: Final = Section(
    "start",
    "Start",
    (
        SelftestCheck(
            "begin",
            "workers find the device and form a group",
            "workers cannot use this device with ringfence at all",
        ),
    ),
    "The error says what is missing; `ringfence doctor` checks the installation.",
)


def _collective(name: str, title: str) -> SelftestCheck:
    return SelftestCheck(name, title, f"{title} deliver other numbers than the same calls computed on the host")


COLLECTIVES: Final = Section(
    "collectives",
    "Collectives, compared with results computed on the host",
    (
        _collective("all_reduce", "all_reduce: sum, max, average"),
        _collective("broadcast", "broadcast and reduce"),
        _collective("all_gather", "all_gather, all_gather_into_tensor"),
        _collective("reduce_scatter", "reduce_scatter, reduce_scatter_tensor"),
        _collective("all_to_all", "all_to_all, all_to_all_single"),
        _collective("scatter", "scatter and gather"),
        _collective("point_to_point", "send and recv, batch_isend_irecv"),
        _collective("coalesced", "coalesced calls and device objects"),
    ),
    WRONG_NUMBERS,
)

ORDER: Final = Section(
    "order",
    "Order of streams, with long kernels",
    (
        SelftestCheck(
            "producer",
            "the kernel that produces the input still runs",
            "a collective reads its input before the kernel that produces it has ended",
        ),
        SelftestCheck(
            "own_stream",
            "the same on a stream of the caller",
            "a collective does not wait for the stream that it is called on",
        ),
        SelftestCheck(
            "slow_download",
            "copies to the host are late",
            "bytes are sealed and sent before they have been copied from the device",
        ),
        SelftestCheck(
            "consumer",
            "a kernel follows wait() while results are copied",
            "wait() does not order the current stream after the copies to the device, so the next kernel reads old values",
        ),
        SelftestCheck(
            "receive_in_use",
            "an earlier kernel still reads what recv writes",
            "recv overwrites its tensor while an earlier kernel of the caller still reads it",
        ),
        SelftestCheck(
            "broadcast_in_use",
            "the same for a broadcast",
            "a broadcast overwrites its tensor while an earlier kernel of the caller still reads it",
        ),
        SelftestCheck(
            "reused_slots",
            "more data than pinned memory, copies are late",
            "pinned memory is used again before its content has been copied to the device",
        ),
        SelftestCheck(
            "chained",
            "two calls on one tensor without wait()",
            "the second call reads its input before the results of the first one are in it",
        ),
        SelftestCheck(
            "callback",
            "a callback of the future uses the result",
            "callbacks of futures run before the results are on the device: DDP's communication hooks use them",
        ),
        SelftestCheck(
            "strided",
            "a tensor that is not contiguous",
            "the temporary copy of a tensor that is not contiguous is written before its memory is free",
        ),
        SelftestCheck(
            "lifetime",
            "the tensor and the Work are dropped early",
            "memory of a dropped tensor is allocated again while the collective still writes to it",
        ),
        SelftestCheck(
            "mixed",
            "calls on host and device tensors alternate",
            "calls on host tensors and on device tensors of one group disturb each other",
        ),
        SelftestCheck(
            "returns_early",
            "an asynchronous call returns behind a kernel",
            "an asynchronous call waits for the kernels before it, so communication and computing do not overlap",
        ),
    ),
    WRONG_NUMBERS,
)

MEMORY: Final = Section(
    "memory",
    "Memory, over many random collectives on random streams",
    (
        SelftestCheck(
            "soak",
            "right results, no growth of memory",
            "results are wrong under load, or memory of the device, of the host or pinned memory is not given back",
        ),
    ),
    "A long run would fail or run out of memory on this device.",
)

SPEED: Final = Section(
    "speed",
    "Speed",
    (
        SelftestCheck("copies", "copies between host and device", "copies between host and device fail"),
        SelftestCheck(
            "staged", "all-reduce on the device and on host tensors", "an all-reduce fails while it is measured"
        ),
    ),
    "The other checks say whether results are right.",
)

FAILURE: Final = Section(
    "failure",
    "A worker is killed during a collective",
    (
        SelftestCheck(
            "killed_worker",
            "the others raise within 5 s and keep their device",
            "the loss of a worker leaves others waiting, or their device unusable",
        ),
    ),
    "A run on this device may hang, or need a restart of the machine, when a worker is lost.",
)

SECTIONS: Final = (START, COLLECTIVES, ORDER, MEMORY, SPEED, FAILURE)
CONFIDENTIAL: Final = "confidential"  # what workers are asked beside the checks: signs of confidential mode
CHOICES: Final = tuple(section.name for section in SECTIONS[1:])
