"""`ringfence bench link`: what a long link between network namespaces is, against what was set; and the options for one."""

from __future__ import annotations

import argparse

from ringfence.cli.terminal import Commands
from ringfence.errors import ConfigurationError
from ringfence_lab.bench.relay import LongLink, seconds_of, share_of
from ringfence_lab.cli.options import add_json, parsed, show

DESCRIPTION = """\
Measure a long link between two network namespaces: delay, jitter, loss and rate against what was set, and the CPU time that the
relay between them takes. Needs root, iproute2 and a C++ compiler.
"""

EXAMPLES = """\
examples:
  ringfence bench link --rate 1gbit --delay 50ms --jitter 5ms
  ringfence bench link --rate 100mbit --delay 10ms --loss 0.1%
"""


def add_to(kinds: Commands) -> None:
    """Add `bench link` to the command line."""
    parser = kinds.add_parser(
        "link",
        help="a long link between network namespaces",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("--rate", metavar="RATE", help="limit what each host sends, such as 1gbit")
    add_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a long link."""
    links = parser.add_argument_group("a long link between hosts (a relay in place of a bridge)")
    links.add_argument("--delay", type=parsed(seconds_of), metavar="TIME", help="in each direction, such as 50ms")
    links.add_argument(
        "--jitter", type=parsed(seconds_of), metavar="TIME", help="by which the delay is shorter or longer"
    )
    links.add_argument(
        "--loss", type=parsed(share_of), metavar="SHARE", help="of packets of 9,000 bytes, such as 0.1%%"
    )


def check(options: argparse.Namespace) -> None:
    """Set `options.link` to the link that these options describe, or to None.

    Raises ConfigurationError if there are no hosts to link.
    """
    given = [getattr(options, name, None) for name in LongLink._fields]
    options.link = None
    if any(each is not None for each in given):
        if not options.hosts:
            raise ConfigurationError("--delay, --jitter and --loss are for the link between hosts: add --hosts")
        options.link = LongLink(*(each or 0.0 for each in given))


def run(options: argparse.Namespace) -> int:
    """Run `ringfence bench link`."""
    from ringfence_lab.bench import link

    wanted = LongLink(*(getattr(options, name) or 0.0 for name in LongLink._fields))
    found = link.document(wanted, options.rate, link.measure(wanted, options.rate))
    return show(options, found, link.result_text(found))
