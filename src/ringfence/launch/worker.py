"""Hooks in the workers of `ringfence run`: an unmodified script gets our store and our backend, and ends with its agent.

`import torch` runs `install` through the entry point of `autoload.py`. Where torch lacks a function to replace, it raises, and
because agents set RINGFENCE_REQUIRE=1, so does `import torch`.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

from ringfence.errors import ConfigurationError
from ringfence.guard import AGENT, OURS
from ringfence.launch.agent_client import AgentClient
from ringfence.launch.tied import end_with
from ringfence.log import announce
from ringfence.release import PAGES
from ringfence.transport.unix import connected_to_own, peer_process

_KEPT: Final = frozenset({OURS, "fake"})  # the fake backend sends nothing
_STORE_ARGUMENTS: Final = ("hostname", "port", "rank", "world_size", "timeout")


def install() -> None:
    """Replace torch's store and backends in this process, and end it with its agent.

    Raises ConfigurationError if the agent is gone, or if this torch lacks a function to replace.
    """
    from torch.distributed import distributed_c10d

    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")  # the attribute of this name is a function
    if getattr(distributed_c10d._new_process_group_helper, "substitutes", False):
        return
    _end_with_agent(os.environ[AGENT])
    _check_arguments(getattr(rendezvous, "_create_c10d_store", None), _STORE_ARGUMENTS)
    _check_arguments(getattr(distributed_c10d, "_new_process_group_helper", None), ("backend", "backend_options"))
    rendezvous._create_c10d_store = _create_store
    distributed_c10d._new_process_group_helper = _substituting(distributed_c10d)
    _refuse_listening_stores()
    _record_exceptions()


def _record_exceptions() -> None:
    """Let the agent know an exception that ends this process, as torch's `@record` does for a function."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    original = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        original(kind, error, traceback)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            try:
                raise error.with_traceback(traceback)  # torch records the traceback of the exception that is handled
            except Exception as handled:
                get_error_handler().record_exception(handled)
            except BaseException:  # an interruption says nothing
                return

    sys.excepthook = report


def _check_arguments(function: Any, names: tuple[str, ...]) -> None:
    if function is None or not set(names) <= set(inspect.signature(function).parameters):
        raise ConfigurationError(
            "this version of torch creates stores or process groups in a way that ringfence run does not support: use a "
            f"version that {PAGES}/reference/compatibility.html lists"
        )


# -- the store --------------------------------------------------------------------------------------------------------


def _create_store(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
) -> Any:
    """Return the store of this generation, whatever address the script names."""
    from ringfence.launch.store import AgentStore

    return AgentStore(AgentClient(os.environ[AGENT]), os.environ["RINGFENCE_GENERATION"], timeout)


def _refuse_listening_stores() -> None:
    """Refuse a TCPStore that listens: it has no authentication."""
    import torch.distributed as dist

    original = dist.TCPStore.__init__

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("is_master", args[3] if len(args) > 3 else False):
            raise ConfigurationError(
                "this script opens a TCPStore, which has no authentication and listens on all interfaces; ringfence run "
                "refuses it. Use the store of the default process group"
            )
        original(self, *args, **kwargs)

    dist.TCPStore.__init__ = construct


# -- the backend ------------------------------------------------------------------------------------------------------


def _substituting(distributed_c10d: Any) -> Callable[..., Any]:
    """Create every process group with our backend. The guard, which is below this, checks the result."""
    original = distributed_c10d._new_process_group_helper
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = distributed_c10d.BackendConfig(call.arguments["backend"]).get_device_backend_map()
        if set(asked.values()) - _KEPT:
            _say(asked)
            call.arguments["backend"] = distributed_c10d.Backend(OURS)
            call.arguments["backend_options"] = None  # of another backend
        return original(*call.args, **call.kwargs)

    make.substitutes = True  # type: ignore[attr-defined]
    return make


@functools.cache
def _say_once(names: str) -> None:
    import torch

    staged = torch.accelerator.is_available()
    copies = "; tensors on accelerators are copied through host memory" if staged else ""
    announce(f"process groups of {names} are ringfence's in this run{copies}")


def _say(asked: dict[str, str]) -> None:
    if os.environ.get("RANK", "0") == "0":
        names = sorted(set(asked.values()) - _KEPT - {"undefined"})
        _say_once(" and ".join(names) or "the default backend")


# -- the end ----------------------------------------------------------------------------------------------------------


def _end_with_agent(path: str) -> None:
    """End this process with its agent, by the kernel if the agent is its parent, otherwise by a thread.

    Raises ConfigurationError if the agent is gone.
    """
    try:
        connection = connected_to_own(path)
        agent = peer_process(connection).pid
    except OSError as error:
        raise ConfigurationError(
            f"the agent that started this process is gone ({path}: {error.strerror}). Unset {AGENT} to run without it"
        ) from error
    if os.getppid() == agent:
        connection.close()
        try:
            end_with(agent)
        except OSError as error:
            raise ConfigurationError(f"prctl failed: {error.strerror}") from error
        return
    threading.Thread(target=_watch, args=(connection,), name="ringfence agent watch", daemon=True).start()


def _watch(connection: socket.socket) -> None:
    """Wait for the end of the agent: it sends nothing on a connection without calls."""
    try:
        while connection.recv(1):
            continue
    except OSError:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
