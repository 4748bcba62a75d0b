"""Spare workers: processes that have imported torch and wait for a script, so that a restart does not wait for the import.

torchrun's agent starts a worker as `python -u SCRIPT`. A spare of the same local rank and with the same environment, apart from
the variables of a round, takes the place of such a process. It is a child of the agent like any worker, and ends with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ringfence import own_process
from ringfence.launch.tied import tied

# What differs between the rounds of one worker. Other changes of the environment may matter to an import.
OF_A_ROUND: Final = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_ERROR_FILE",
        "RINGFENCE_GENERATION",
    }
)

# What the first step of a training imports.
PRELOADED: Final = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "ringfence.backend.process_group",
)


class Spares:
    """The spares of one agent, by local rank."""

    def __init__(self) -> None:
        self._spares: dict[str, _Spare] = {}
        self._last: dict[str, dict[str, str]] = {}  # the environment of the worker that was started last

    def popen(self, arguments: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Give a worker's command to a spare. Returns its process, or None if there is no spare for it."""
        place = environ.get("LOCAL_RANK", "")
        self._last[place] = dict(environ)
        spare = self._spares.pop(place, None)
        if spare is None:
            return None
        if [*arguments[:2]] != [sys.executable, "-u"] or not spare.take(arguments[2:], environ):
            spare.close()
            return None
        return spare.process

    def prepare(self) -> None:
        """Start a spare for each worker that has none."""
        for place, environ in self._last.items():
            if place not in self._spares:
                self._spares[place] = _Spare(environ)

    def close(self) -> None:
        for spare in self._spares.values():
            spare.close()
        self._spares.clear()
        self._last.clear()


class _Spare:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        reader, self._order = os.pipe()
        try:
            self.process = subprocess.Popen(  # noqa: S603
                tied(own_process.command(__name__, str(reader), unbuffered=True)),
                env=dict(environ),
                pass_fds=(reader,),
                start_new_session=True,  # as torchrun's agent starts its workers
            )
        finally:
            os.close(reader)

    def take(self, arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
        """Run a script in this process. Returns False if it cannot: it has ended, or its environment is another."""
        changed = {name for name in {*environ, *self._environ} if environ.get(name) != self._environ.get(name)}
        if self.process.poll() is not None or not changed <= OF_A_ROUND:
            return False
        try:
            with open(self._order, "wb") as pipe:
                pipe.write(json.dumps({"arguments": [*arguments], "environ": dict(environ)}).encode())
        except OSError:
            return False
        finally:
            self._order = -1
        return True

    def close(self) -> None:
        if self._order >= 0:
            os.close(self._order)
            self._order = -1
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


def main(descriptor: int) -> None:
    """Import what the first step of a training needs, wait for an order, and become that script."""
    for name in PRELOADED:
        importlib.import_module(name)
    with open(descriptor, "rb") as pipe:
        data = pipe.read()
    if not data:  # the agent has ended, or needs this process no more
        return
    order: dict[str, Any] = json.loads(data)
    os.environ.clear()
    os.environ.update(order["environ"])
    arguments = order["arguments"]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())  # as the interpreter does for a script that it is given
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]))
