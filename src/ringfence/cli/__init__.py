"""The `ringfence` command: say who may join, look at this machine, see the protection at work, measure its price."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import Final, TextIO

from ringfence import __version__
from ringfence.errors import RingfenceError

# 128 + SIGPIPE, as a shell shows it when a reader such as `head` has had enough. Not 0, which says that all was well. The
# signal stays ignored: by its own way out a command ends its workers and removes what it made.
UNREAD: Final = 141

# Commands of the lab, with their help. They need the packages of the extra `lab`, so their modules are imported only when
# one of them is called.
LAB: Final = {
    "bench": "measure what sealing costs here",
    "study": "measure a grid of models, workers and networks",
    "report": "make a page with figures out of a study",
    "plan": "predict a training step elsewhere",
}

EXIT_CODES = """\
exit codes:
  0  done, and all was well
  1  it ran, and what it looked at is not in order (the output says what)
  2  it could not run: wrong arguments, files or environment
"""

EXAMPLES = """\
examples:
  ringfence demo                                    see what a network sees, with and without ringfence
  ringfence doctor                                  is this machine ready, and how fast does it seal?
  ringfence bench collectives --workers 2           what does sealing cost here?
  ringfence study --list                            and for whole models, workers and networks?
  ringfence report                                  what a study found, as a page with figures
  ringfence plan --model gpt2-xl --workers 64       and elsewhere, at scales you do not have?
  ringfence secret new run.secret                   what the workers of a run prove knowledge of
  export RINGFENCE_SECRET_FILE=$PWD/run.secret      then train with backend="ringfence"
  ringfence certificate new site node-0 node-1      certificates in place of a secret, and
  ringfence policy new site/policy.toml             a policy that asks for them
  ringfence policy explain site/policy.toml         whom does it admit?

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the returned value is the process's exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a "…" or "µs" that a terminal cannot show is no reason to fail
    try:
        try:
            return _run(arguments)
        finally:  # also when `--help` leaves by SystemExit
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        return _failed(error)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        words = sys.argv[1:] if arguments is None else arguments
        options = _parser(words).parse_args(words)
        code: int = options.run(options)
    except RingfenceError as error:
        print(f"ringfence: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _failed(error: OSError) -> int:
    """What no command has words for: most often the output itself, which is full or has lost its reader."""
    unread = isinstance(error, BrokenPipeError) and any(_has_no_reader(stream) for stream in (1, 2))
    stuck = not _flushed(sys.stdout)
    if not unread:
        where = "cannot write the output" if stuck else error.filename
        said = error.strerror or str(error)
        with contextlib.suppress(OSError):
            print(f"ringfence: {where}: {said}" if where else f"ringfence: {said}", file=sys.stderr)
    _flushed(sys.stderr)
    return UNREAD if unread else 2


def _has_no_reader(descriptor: int) -> bool:
    """Asked of the stream: a command's own pipes and sockets break with the same error."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _flushed(stream: TextIO) -> bool:
    """If not, what is left is dropped: Python would try again at its end, and complain."""
    if stream is None:  # closed by whoever started this
        return True
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def _parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Of the lab's commands only the one that `arguments` call is complete; the others have a line of help each. Without
    `arguments` all commands are complete.
    """
    # late, so that Ctrl-C is heeded while they are imported
    from ringfence.cli import certificate, demo, doctor, evidence, policy, requirements, secret

    parser = argparse.ArgumentParser(
        prog="ringfence",
        description="A torch.distributed backend for networks and clouds you do not trust.",
        epilog=EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ringfence {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, doctor, secret, policy, certificate, evidence):
        command.add_to(commands)
    called = set(LAB) if arguments is None else {next((word for word in arguments if not word.startswith("-")), None)}
    for name, summary in LAB.items():
        if name in called:
            requirements.lab(name)
            importlib.import_module(f"ringfence.cli.{name}").add_to(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser
