"""`ringfence plan regions`: which way to train between sites pays, by the rate and the delay of the links."""

from __future__ import annotations

import argparse
import math

from ringfence.cli.terminal import table, wrap
from ringfence.errors import ConfigurationError
from ringfence_lab.cli.options import show
from ringfence_lab.plan import regions

ABOUT = (
    "Seconds of a step between sites, on average over a round; * is less than a tenth above computing. float32 and int8 "
    "average gradients in each step, DiLoCo averages models once in a round. A site counts as one worker that always "
    "has the link's rate: what a slow start of TCP, the site's own network and quantising take is not in it."
)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--elements", type=float, default=1e9, metavar="N", help="parameters (default: 1e9)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="of a step's computing (default: 1)")
    parser.add_argument("--sites", type=int, default=2, metavar="N", help="2 to 64 (default: 2)")
    parser.add_argument("--round", type=int, default=100, metavar="H", help="steps in a round of DiLoCo (default: 100)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    asked = options.elements, options.seconds
    if not all(0 < each < math.inf for each in asked) or options.round < 1 or not 2 <= options.sites <= 64:
        raise ConfigurationError("--elements, --seconds and --round are above zero, and --sites is 2 to 64")
    what = regions.Run(int(options.elements) or 1, options.seconds, options.sites, options.round)
    found = regions.table(what)
    rows = [
        (
            f"{row['rate'] / 1e9:g} Gbit/s",
            f"{row['delay'] * 1e3:g} ms",
            *(f"{row[way]:.3g}{' *' if row[way] < 1.1 * what.compute else ''}" for way in regions.WAYS),
        )
        for row in found
    ]
    return show(options, found, f"{table([('link', 'one way', *regions.WAYS), *rows])}\n\n{wrap(ABOUT)}")
