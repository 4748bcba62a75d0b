"""`ringfence run`: torchrun with a protected rendezvous and store."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ringfence.cli import requirements, terminal
from ringfence.errors import ConfigurationError

_SPARES_AFTER: Final = 5.0  # seconds of a round, so that spares do not delay its first step
_REJOIN_WITHIN: Final = 10.0  # seconds

_HELP: Final = {  # where torchrun's own does not apply
    "rdzv_backend": "ringfence, which is also the default.",
    "standalone": "One node, on which nothing listens.",
}

SUMMARY: Final = "start a training script on one or several nodes"

_EXAMPLES: Final = """\
The flags are torchrun's. Agents prove themselves to node 0's agent, which hosts
the store, under the policy of the workers; the script needs no change: process
groups of "gloo", "nccl" or no backend are ringfence's.

examples:
  export RINGFENCE_SECRET_FILE=$PWD/run.secret
  ringfence run --nproc-per-node 2 train.py
  ringfence run --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29400 \\
      --rdzv-id job1 --nproc-per-node 8 --max-restarts 3 train.py
                                             on node 1: --node-rank 1
  ringfence run --nnodes 2:4 ...             between 2 and 4 nodes
  ringfence run --spares ...                 faster restarts
  ringfence run --rejoin ...                 none where the script can rejoin
  ringfence run --record FOLDER ...          a signed record of the run

--rdzv-conf: join_timeout=600 seconds until enough nodes must have come;
last_call_timeout=30 to wait for more than the smallest number.
"""


def add_to(commands: Any) -> None:
    """Add the help of `run`. Its flags are torchrun's, and torchrun's parser reads them."""
    commands.add_parser(
        "run",
        help=SUMMARY,
        description=f"{SUMMARY[0].upper()}{SUMMARY[1:]}. `ringfence run --help` lists torchrun's flags.",
        usage="ringfence run [FLAGS] SCRIPT [ARGUMENTS]",
        epilog=_EXAMPLES,
        add_help=False,
    )


def run(words: Sequence[str]) -> int:
    """Run a script under an agent of this machine; return the exit code."""
    requirements.workers()
    requirements.backend()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    options = prepared(_parser(torchrun).parse_args(list(words)), torchrun)
    if options.record:
        _record_to(Path(options.record).absolute())
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        print(error.format_msg(), file=sys.stderr)
        return 1
    except RendezvousError as error:
        terminal.complain(str(error))
        return 1
    return 0


def _record_to(folder: Path) -> None:
    """Let the workers record, if they can. Raises ConfigurationError now rather than in each of them."""
    from ringfence.record.log_file import open_folder

    open_folder(folder)
    os.environ["RINGFENCE_RECORD"] = str(folder)


def _parser(torchrun: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = torchrun.get_args_parser()
    parser.prog = "ringfence run"
    parser.description = SUMMARY[0].upper() + SUMMARY[1:] + "."
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--spares",
        action="store_true",
        help="Keep a process for each worker that has imported torch, so that a restart takes seconds less. Each needs "
        "the memory of an idle Python process with torch.",
    )
    parser.add_argument(
        "--rejoin",
        action="store_true",
        help="When a worker or a node is lost, let the others call ringfence.rejoin(), which joins the next round in "
        f"place. Those that do not within {_REJOIN_WITHIN:g} s are started again.",
    )
    parser.add_argument(
        "--record",
        metavar="FOLDER",
        help="Let each worker write a signed record of the run to this folder of its machine. `ringfence audit FOLDER` "
        "verifies it.",
    )
    for action in parser._actions:
        if action.dest == "node_rank" and action.default == 0:
            action.default = None  # not given, neither as a flag nor as PET_NODE_RANK
        action.help = _HELP.get(action.dest, action.help)
    return parser


def prepared(options: Any, torchrun: Any) -> Any:
    """Return torchrun's options with our rendezvous. Raises ConfigurationError for another one."""
    if options.rdzv_backend not in ("static", "ringfence"):
        raise ConfigurationError(
            f"--rdzv-backend={options.rdzv_backend} has no authentication: omit it, or use torchrun without protection"
        )
    _, nodes = torchrun.parse_min_max_nnodes(options.nnodes)
    if options.standalone:
        options.nnodes, options.standalone, nodes = "1", False, 1
    if nodes == 1:
        options.rdzv_endpoint = "localhost:0"  # nothing listens there
        if options.rdzv_id == "none":
            options.rdzv_id = uuid.uuid4().hex
    elif not options.rdzv_endpoint:
        if options.master_port is None and options.master_addr == "127.0.0.1":
            raise ConfigurationError(
                "several nodes need --rdzv-endpoint HOST:PORT, an address of node 0, on every node"
            )
        options.rdzv_endpoint = f"{options.master_addr}:{options.master_port or 29500}"
    conf = [options.rdzv_conf] if options.rdzv_conf else []
    if options.node_rank is not None and nodes > 1:
        conf.append(f"rank={options.node_rank}")
    if options.spares and "spares=" not in options.rdzv_conf:
        conf.append(f"spares={_SPARES_AFTER:g}")
    if options.rejoin and "rejoin=" not in options.rdzv_conf:
        conf.append(f"rejoin={_REJOIN_WITHIN:g}")
    options.rdzv_conf = ",".join(conf)
    options.node_rank = 0  # torchrun's own use of it is for its static rendezvous
    options.rdzv_backend = "ringfence"
    return options
