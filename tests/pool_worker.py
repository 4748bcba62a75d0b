"""The process of a `tests.pool.Worker`: runs commands from a pipe, one at a time, until the pipe is closed."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.pool import Failure, resolve

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """End this process with its parent. A worker that is stuck in a collective would not notice that pytest has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def join(backend: str, rank: int, world: int, path: str, seconds: float, variables: Mapping[str, str | None]) -> None:
    for name in [name for name in os.environ if name.startswith("RINGFENCE_") and name != "RINGFENCE_DATAPLANE"]:
        del os.environ[name]
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    store = dist.FileStore(path, world)  # a file is reachable from every network namespace
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds), group_name="pool"
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        # A Gloo group that is garbage here must not be collected in a forked loader: there its destructor waits for
        # threads that the child does not have. So collect now, and keep the rest out of the children's collections.
        gc.collect()
        gc.freeze()


def is_member() -> bool:
    """Whether this worker has a group that still works: a test may have destroyed it, or ended its session."""
    if not dist.is_initialized():
        return False
    session = getattr(dist.group.WORLD, "_session", None)  # ringfence's
    return session is None or not (session.over or session.engine.failure)


def run(path: list[str], module: str, qualname: str, args: tuple[Any, ...]) -> Any:
    sys.path[:] = path
    return resolve(module, qualname)(*args)


COMMANDS: dict[str, Callable[..., Any]] = {
    "join": join,
    "leave": leave,
    "is_member": is_member,
    "run": run,
}


def perform(command: tuple[Any, ...]) -> bytes:
    """Run a command; return the pickled result or Failure."""
    name, *arguments = command
    try:
        return pickle.dumps(COMMANDS[name](*arguments))
    except Exception as error:
        bases = tuple(kind.__name__ for kind in type(error).__mro__)
        return pickle.dumps(Failure(type(error).__name__, str(error), traceback.format_exc(), bases))


def main() -> None:
    descriptor, stacks, parent = sys.argv[1:]
    end_with_parent(int(parent))
    with open(stacks, "w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        torch.set_num_threads(1)
        pipe = Connection(int(descriptor))
        while True:
            try:
                command = pickle.loads(pipe.recv_bytes())
            except EOFError:
                break
            pipe.send_bytes(perform(command))
    # Not sys.exit: destructors of a broken group may wait for peers that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
