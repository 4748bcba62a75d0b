"""`ringfence plan counts`: what a collective costs one worker, by the number of workers, counted in the schedules."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from ringfence.cli.terminal import table, wrap
from ringfence.collectives import Collective
from ringfence.collectives.counts import Counts, count
from ringfence_lab.bench.units import bytes_of, size_text
from ringfence_lab.cli.options import parsed, show
from ringfence_lab.plan.recommend import WORKERS
from ringfence_lab.plan.schedules import machines_of

KINDS: Final = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all")
HEADER: Final = ("workers", "rounds", "messages", "seals", "opens", "sent", "over least", "links", "scratch", "copies")
_HALVES: Final = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
ABOUT: Final = (
    "rounds: messages that wait for each other, in a pass. seals, opens: segments. sent: bytes between machines, as frames. "
    "over least: above the fewest possible. copies: to and from a device, if the tensors are on one."
)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--collective", choices=KINDS, default=KINDS[0], metavar="OP", help=f"{', '.join(KINDS)}; default: {KINDS[0]}"
    )
    parser.add_argument(
        "--size", type=parsed(bytes_of), default=25 << 20, metavar="SIZE", help="of its tensor; default: 25MiB"
    )
    parser.add_argument("--workers-per-machine", type=int, default=1, metavar="N", help="default: 1")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    found = counted(options.collective, options.size, options.workers_per_machine)
    text = table([HEADER, *rows(options.collective, options.size, options.workers_per_machine, found)])
    document = [{"workers": workers, **each._asdict()} for workers, each in found]
    return show(options, document, f"{text}\n\n{wrap(ABOUT)}")


def counted(collective: str, size: int, per_machine: int, workers: Sequence[int] = WORKERS) -> list[tuple[int, Counts]]:
    """Return the counts of one worker on a device, for each number of workers."""
    kind = Collective[collective.upper()]
    return [
        (
            each,
            count(
                kind, each, size // (4 * each) * 4 * each or size, machines=machines_of(each, per_machine), device=True
            ),
        )
        for each in workers
        if each >= per_machine
    ]


def rows(collective: str, size: int, per_machine: int, found: Sequence[tuple[int, Counts]]) -> list[list[str]]:
    """Return the rows of the table as text."""
    shown = []
    for workers, each in found:
        machines = workers // per_machine
        least = _HALVES.get(collective, 0) * size / per_machine * (machines - 1) / machines
        over = f"{each.wire / least - 1:.2%}" if least else "-"
        figures = (each.rounds, each.messages, each.seals, each.opens)
        last = (f"{each.links}", size_text(each.scratch), f"{each.device_copies:,}")
        shown.append([f"{workers:,}", *(f"{figure:,}" for figure in figures), size_text(each.wire), over, *last])
    return shown
