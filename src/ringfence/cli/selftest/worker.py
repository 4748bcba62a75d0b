"""One worker of the self-test: joins the group and runs each check that its parent names."""

from __future__ import annotations

import json
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Final

import torch
from torch import distributed

from ringfence.cli.selftest import conformance, device, order
from ringfence.cli.selftest.confidential import signs
from ringfence.cli.selftest.device import Setting
from ringfence.cli.selftest.load import copies, killed_worker, soak, staged
from ringfence.cli.selftest.report import ERROR, Outcome, right

TIMEOUT: Final = timedelta(seconds=30)


def _confidential(at: Setting) -> Outcome:
    return right(signs=asdict(signs(at.device, at.busy)) if at.rank == 0 else {})


CHECKS: Final[dict[str, Callable[[Setting], Outcome]]] = {
    **{name: partial(conformance.check, name) for name in conformance.CHECKS},
    **{name: partial(order.check, name) for name in order.SITUATIONS},
    "returns_early": order.returns_early,
    "soak": soak,
    "copies": copies,
    "staged": staged,
    "killed_worker": killed_worker,
    "confidential": _confidential,
}


def main(wanted: str, rank: int, size: int, quick: bool, store: str, channel: int) -> None:
    """Answer each line from the parent with a line of JSON, until the parent hangs up. The first answer is about the start."""
    with socket.socket(fileno=channel) as parent, parent.makefile("rw") as lines:

        def answer(check: Callable[[], Outcome]) -> Outcome:
            outcome = _guarded(check)
            print(json.dumps(asdict(outcome)), file=lines, flush=True)
            return outcome

        begun: list[Setting] = []

        def begin() -> Outcome:
            begun.append(_begin(wanted, rank, size, quick, store))
            return _described(begun[0])

        if answer(begin).state == ERROR:
            return
        for line in lines:
            answer(partial(CHECKS[json.loads(line)["check"]], begun[0]))


def _begin(wanted: str, rank: int, size: int, quick: bool, store: str) -> Setting:
    chosen = device.open_device(wanted, rank)
    busy = device.long_kernel(chosen)
    distributed.init_process_group(
        "ringfence", store=distributed.FileStore(store, size), rank=rank, world_size=size, timeout=TIMEOUT
    )
    distributed.all_reduce(torch.ones(1, device=chosen))
    return Setting(chosen, rank, size, quick, busy)


def _described(at: Setting) -> Outcome:
    described = device.describe(at.device)
    return right(environment=described, device=str(at.device), kernel=device.measured_kernel(at.busy))


def _guarded(check: Callable[[], Outcome]) -> Outcome:
    try:
        return check()
    except Exception as error:  # is part of the report
        traceback.print_exc()
        kind = type(error).__name__
        return Outcome(ERROR, f"{kind}: {error}".partition("\n")[0], {"kind": kind, "message": str(error)})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "quick", sys.argv[5], int(sys.argv[6]))
