"""`ringfence bench admission`: the cost of admitting workers, measured and predicted for larger numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringfence.cli.terminal import Commands, number, table, wrap
from ringfence_lab.cli.options import add_json, listed, show

if TYPE_CHECKING:
    from ringfence_lab.bench.admission import AdmissionCost

DESCRIPTION = """\
Measure what admission costs each worker. Groups in memory have real TLS, real proofs and a real roster, but no network:
they give CPU time, bytes and handshakes per worker. From two or more groups the cost of a larger one is predicted, stage by
stage. Needs no torch.
"""

EXAMPLES = """\
examples:
  ringfence bench admission                                     64, 256 and 1,024 workers
  ringfence bench admission --workers 64,256,1024,4096          a minute or two
  ringfence bench admission --workers 4096 --verifiers 0           every worker verifies all others: many minutes
  ringfence bench admission --workers 64,256 --proof certificate
  ringfence bench admission --workers 64,256 --json
"""

_STAGES = ("keys", "handshakes", "entries", "roster", "check", "agreement")
_MOST_WORKERS = 1 << 16
_PREDICTED = 16_384


def add_to(kinds: Commands) -> None:
    """Add `bench admission` to the command line."""
    parser = kinds.add_parser(
        "admission",
        help="the admission of workers, and a prediction for thousands",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    workers = listed(number(2, _MOST_WORKERS))
    parser.add_argument("--workers", type=workers, default="64,256,1024", metavar="N,…", help="default: 64,256,1024")
    proofs = ("secret", "certificate")
    parser.add_argument("--proof", choices=proofs, default="secret", help="default: secret")
    parser.add_argument(
        "--verifiers",
        type=number(0, _MOST_WORKERS),
        default=64,
        metavar="N",
        help="workers of each group that parse and verify the whole roster; the others compare bytes. 0: all; default: 64",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `ringfence bench admission`."""
    from ringfence_lab.bench import machine  # late, so that `doctor` starts where cryptography is missing
    from ringfence_lab.bench.admission import admit, predict
    from ringfence_lab.bench.result_table import machine_text
    from ringfence_lab.progress import Progress

    costs = []
    sizes = sorted(set(options.workers))
    with Progress(len(sizes)) as progress:
        for size in sizes:
            costs.append(admit(size, options.verifiers or None, options.proof, say=progress.say))
            progress.step()
    predicted = [predict(costs, _PREDICTED)] if len(costs) > 1 else []
    checked = predict(costs[:-1], costs[-1].workers) if len(costs) > 2 else None
    facts = machine.facts()
    document = {
        "machine": facts,
        "date": machine.now()[:10],
        "proof": options.proof,
        "groups": [cost.as_json() for cost in costs],
        "predicted": [cost.as_json() for cost in predicted],
        "last_group_predicted_from_the_others": checked.as_json() if checked else None,
    }
    return show(options, document, f"{machine_text(facts)}\n{_costs_text(costs, predicted, checked)}")


def _costs_text(
    costs: Sequence[AdmissionCost], predicted: Sequence[AdmissionCost], checked: AdmissionCost | None
) -> str:
    from ringfence_lab.bench.units import size_text, time_text

    every = [*costs, *predicted]
    totals = []
    for cost in every:
        what = (f"{cost.workers:,}{' *' if cost in predicted else ''}", str(cost.depth), f"{cost.handshakes_mean:.2f}")
        times = (cost.cpu, sum(cost.cpu_root.values()), cost.critical_path)
        totals.append((*what, *map(size_text, (cost.bytes_mean, cost.bytes_max)), *map(time_text, times)))
    header = ("workers", "depth", "handshakes", "sent, mean", "sent, most", "CPU, mean", "CPU, rank 0", "critical path")
    stages = [(f"{cost.workers:,}", *(time_text(cost.cpu_mean[stage]) for stage in _STAGES)) for cost in every]
    verifiers = ", ".join(f"{cost.verifiers:,} of {cost.workers:,}" for cost in costs)
    notes = [
        "Per worker; bytes include TLS. Critical path: the CPU time of the longest chain of workers that wait for each "
        "other, without the network.",
        f"Every handshake was made and verified; {verifiers} workers verified the whole roster, and their mean is shown.",
    ]
    largest = costs[-1]
    if largest.cpu_mean["agreement"] > 0 and largest.bytes_go_mean:
        notes.append(
            f"The agreed roster of {largest.workers:,} workers (digests, and signatures of workers with certificates): "
            f"{size_text(largest.bytes_go_mean)} of what a worker sends, {size_text(largest.bytes_go_max)} at most, in "
            "messages that are sent anyway: no further round trip."
        )
    if predicted:
        notes.append("* predicted from the groups that were measured.")
    if checked is not None:
        notes.append(
            f"Check of the fit with {largest.workers:,} workers: predicted from the smaller groups {time_text(checked.cpu)} "
            f"of CPU and {size_text(checked.bytes_mean)} a worker; measured {time_text(largest.cpu)} and "
            f"{size_text(largest.bytes_mean)}."
        )
    by_stage = table([("workers", *(f"CPU, {stage}" for stage in _STAGES)), *stages])
    return "\n".join(["", table([header, *totals]), "", by_stage, "", *map(wrap, notes)])
