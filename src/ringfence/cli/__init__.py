"""The `ringfence` command: write policies and credentials, check this machine, see the protection work, measure its cost.

run.py                     `run`: the launcher
secret.py, certificate.py  commands for credentials; dev_ca.py, a small authority
policy.py                  `policy`; templates.py, weak_rules.py, revocation_views.py
evidence.py                `evidence`; evidence_views.py
checkpoint.py              `checkpoint`; checkpoint_convert.py, checkpoint_views.py
audit.py                   `audit`: verifies signed records
audit_run.py               `audit` of a folder: what the logs of a run show, printed or as a page
record.py                  `record`: manifests of data sets, statements of runs; signed_file.py
doctor.py, checks/         `doctor` and its checks; one_worker.py, the process that it starts
demo/, selftest/           two commands that start workers (worker_process.py); requirements.py checks that they can
further_commands.py        commands of other distributions, as the lab
terminal.py                lines, colours and progress on a terminal; __main__.py
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import Final, TextIO

from ringfence import __version__
from ringfence.cli import terminal
from ringfence.errors import RingfenceError

# 128 + SIGPIPE, as a shell reports it when a reader such as `head` closes the pipe; not 0, which means success. The signal
# itself stays ignored, so that a command leaves normally: it ends its workers and removes its temporary files.
UNREAD: Final = 141

EXIT_CODES = """\
exit codes:
  0  success
  1  the command ran and found a fault, which the output describes
  2  the command could not run: wrong arguments, files or environment
"""

EXAMPLES = """\
examples:
  ringfence demo                             see what a network sees
  ringfence doctor                           check this machine
  ringfence selftest                         test collectives on its GPU
  ringfence secret new run.secret            make the secret of a run, then
  export RINGFENCE_SECRET_FILE=$PWD/run.secret
  ringfence run --nproc-per-node 2 train.py  train, with the script unchanged
  ringfence certificate new site node-0      certificates instead of it,
  ringfence policy new site/policy.toml      a policy that requires them,
  ringfence policy explain site/policy.toml  and whom it admits
  ringfence checkpoint show run/step-100     read a sealed checkpoint
  ringfence record data corpus               list a data set by digests
  ringfence audit h100.json --key h100.pem   verify a signed record
  ringfence bench collectives --workers 2    measure what sealing costs here
  ringfence study --list                     measure models, workers, networks
  ringfence report                           show the results of a study
  ringfence plan --model gpt2-xl             predict the cost elsewhere

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the returned value is the process's exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a "…" or "µs" that a terminal cannot show is replaced, not an error
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
        if words[:1] == ["run"]:  # has torchrun's flags, and torchrun's parser
            from ringfence.cli import run

            return run.run(words[1:])
        options = _parser(words).parse_args(words)
        code: int = options.run(options)
    except RingfenceError as error:
        terminal.complain(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _failed(error: OSError) -> int:
    """Report an error that no command handles: most often of the output, which is full or has lost its reader."""
    unread = isinstance(error, BrokenPipeError) and any(_has_no_reader(stream) for stream in (1, 2))
    stuck = not _flushed(sys.stdout)
    if not unread:
        where = "cannot write the output" if stuck else error.filename
        said = error.strerror or str(error)
        with contextlib.suppress(OSError):
            terminal.complain(f"{where}: {said}" if where else said)
    _flushed(sys.stderr)
    return UNREAD if unread else 2


def _has_no_reader(descriptor: int) -> bool:
    """Whether nobody reads a stream. The error does not tell: a command's own pipes and sockets raise the same."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _flushed(stream: TextIO) -> bool:
    """Flush a stream; if that fails, drop the rest and return False. Python would flush again when it exits, and complain."""
    if stream is None:  # closed by the parent process
        return True
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def _parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Of further commands only the one that `arguments` call is complete; the others have a line of help each. Without
    `arguments` all commands are complete.
    """
    # imported here, so that Ctrl-C during these imports is handled
    from ringfence.cli import (
        audit,
        certificate,
        checkpoint,
        demo,
        doctor,
        evidence,
        further_commands,
        policy,
        record,
        run,
        secret,
        selftest,
    )

    parser = terminal.Parser(
        prog="ringfence",
        description="A torch.distributed backend for networks and clouds you do not trust.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"ringfence {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (run, demo, doctor, selftest, secret, policy, certificate, evidence, checkpoint, record, audit):
        command.add_to(commands)
    called = None if arguments is None else next((word for word in arguments if not word.startswith("-")), "")
    further_commands.add_to(commands, called)
    return parser
