"""Guard against accidental plaintext: checks every process group of this process and refuses or reports unprotected ones.

``RINGFENCE_REQUIRE=1`` refuses process groups of other backends, and RPC. Without it, creating one while credentials of
ringfence are configured logs a warning. Installed at `import torch` in a process that has any setting of ringfence, else with
the first ringfence group. torch creates all process groups in one function, which is wrapped here; the
constructors of torch's own backends and of its RPC agent are wrapped too, for programs that call them directly. If torch
lacks any of them, `install` raises, and with ``RINGFENCE_REQUIRE=1`` so does ``import torch``. docs/reference/hooks.md says
what is wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ringfence.errors import ConfigurationError
from ringfence.log import LOGGER

REQUIRE: Final = "RINGFENCE_REQUIRE"
AGENT: Final = "RINGFENCE_AGENT"  # the socket of the agent, in workers of `ringfence run`
OURS: Final = "ringfence"
# Setting one of these means that protection is expected. settings.py, which reads them, is too heavy for `import torch`.
CONFIGURED: Final = ("RINGFENCE_SECRET_FILE", "RINGFENCE_POLICY", "RINGFENCE_CERTIFICATE_FILE")

_HARMLESS: Final = "FakeProcessGroup"  # sends nothing
_FIX: Final = 'Pass backend="ringfence", or call ringfence.init() before a framework makes its own group'
_NO_RPC: Final = "ringfence does not protect RPC: do without it, or run it in a process without " + REQUIRE
# Another plug-in may register the same name, and torch asks torchcomms before any plug-in.
_TAKEN: Final = (
    "torch created a {} for the backend ringfence: other code has registered this name. Unset "
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS, and uninstall other packages that register this backend"
)

_allowed: ContextVar[bool] = ContextVar("ringfence_plaintext_allowed", default=False)
_asked: ContextVar[str | None] = ContextVar("ringfence_asked_backend", default=None)
_required_from_start = False


def is_required(environ: Mapping[str, str]) -> bool:
    """Whether the environment requires that every process group is ringfence's.

    Raises:
        ConfigurationError: The variable is neither 1 nor 0. Treating that as 0 would disable a protection.
    """
    value = environ.get(REQUIRE, "0")
    if value not in ("0", "1"):
        raise ConfigurationError(f"{REQUIRE}={value!r}: write 1 to refuse unprotected process groups, or 0")
    return value == "1"


@contextlib.contextmanager
def plaintext_allowed() -> Iterator[None]:
    """Neither refuse nor report what this thread creates in this context."""
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def install(is_ours: Callable[[Any], bool]) -> None:
    """Check all process groups from now on. Unsetting ``RINGFENCE_REQUIRE`` later has no effect.

    Args:
        is_ours: Whether a process group that torch created is ringfence's.

    Raises:
        ConfigurationError: This torch lacks a function to wrap, or RINGFENCE_REQUIRE has an invalid value.
    """
    global _required_from_start
    _required_from_start = is_required(os.environ) or _required_from_start
    from torch._C import _distributed_c10d
    from torch.distributed import distributed_c10d

    if getattr(distributed_c10d._new_process_group_helper, "guarded", False):
        return
    distributed_c10d._new_process_group_helper = _guarded_helper(distributed_c10d, is_ours)
    if hasattr(distributed_c10d, "_new_group_with_tag"):
        distributed_c10d._new_group_with_tag = _with_asked_backend(distributed_c10d)
    backends = {_distributed_c10d.Backend, _distributed_c10d.ProcessGroup}
    for name, kind in vars(_distributed_c10d).items():  # builds of torch differ in their backends
        if isinstance(kind, type) and backends & {*kind.__mro__[1:]} and name != _HARMLESS:
            _guard_constructor(kind)
    rpc = sys.modules.get("torch._C._distributed_rpc")
    if rpc is not None and hasattr(rpc, "TensorPipeAgent"):
        _guard_constructor(rpc.TensorPipeAgent)


def _guarded_helper(distributed_c10d: Any, is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    original = distributed_c10d._new_process_group_helper
    signature = inspect.signature(original)
    if "backend" not in signature.parameters:
        raise ConfigurationError(
            "this version of torch creates process groups in a way that ringfence does not support"
        )

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs).arguments.get("backend")
        names = set(distributed_c10d.BackendConfig(asked).get_device_backend_map().values())
        if names != {OURS}:
            _check(f"a process group of backend {' and '.join(sorted(names))}")
            with plaintext_allowed():  # its constructor was checked above
                return original(*args, **kwargs)
        made = original(*args, **kwargs)
        if made[0] is not distributed_c10d.GroupMember.NON_GROUP_MEMBER and not is_ours(made[0]):
            raise ConfigurationError(_TAKEN.format(type(made[0]).__name__))
        return made

    make.guarded = True  # type: ignore[attr-defined]
    return make


def asked_backend() -> str | None:
    """The backend that `torch.distributed.new_group` was asked for, within its call; None: none, or unknown."""
    return _asked.get()


def _with_asked_backend(distributed_c10d: Any) -> Callable[..., Any]:
    """Remember which backend a new group is asked for: torch 2.13 does not pass it to the default group's `new_group`.

    A group that says so is listed under its own backend, not under that one.
    """
    original = distributed_c10d._new_group_with_tag
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs).arguments.get("backend")
        token = _asked.set(None if asked is None else str(asked))
        try:
            made = original(*args, **kwargs)
        finally:
            _asked.reset(token)
        backend = getattr(made, "registered_as", None)
        if backend is not None:
            world = distributed_c10d._world
            world.pg_map[made] = (backend, world.pg_map[made][1])
            world.pg_backend_config[made] = str(distributed_c10d.BackendConfig(distributed_c10d.Backend(backend)))
        return made

    return make


def _guard_constructor(kind: Any) -> None:
    original = kind.__init__

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        _check(f"a {kind.__name__}")
        original(self, *args, **kwargs)

    kind.__init__ = construct


def _check(what: str) -> None:
    """Raise or warn about an unprotected group, unless protection is neither required nor configured."""
    if _allowed.get():
        return
    refuse = _required_from_start or is_required(os.environ)
    configured = [name for name in CONFIGURED if os.environ.get(name)]
    if not refuse and not configured:
        return
    called, place = _call()
    fix = _NO_RPC if called == "init_rpc()" or what.endswith("Agent") else _FIX
    if refuse:
        raise ConfigurationError(
            f"{called} at {place} asks for {what}, which is not protected, and {REQUIRE}=1 refuses it. {fix}"
        )
    LOGGER.warning(
        "%s at %s makes %s: its traffic is NOT protected, although %s is set. %s. %s=1 makes this an error",
        *(called, place, what, configured[0], fix, REQUIRE),
    )


def _call() -> tuple[str, str]:
    """The function of torch that was called, and the caller; for a call in a framework also where the script called that."""
    import torch

    inside = f"{Path(str(torch.__file__)).parent}{os.sep}"
    called, frame = "a call", inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((inside, __file__)):
        if frame.f_code.co_filename != __file__ and frame.f_code.co_name != "wrapper":  # of torch's decorators
            called = f"{frame.f_code.co_name}()"
        frame = frame.f_back
    if frame is None:
        return called, "an unknown place"
    place, program = _place(frame), _program(frame)
    return called, place if program in (None, place) else f"{place}, called from {program},"


def _program(frame: FrameType | None) -> str | None:
    """Where the script itself made the call."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__":
            return _place(frame)
        frame = frame.f_back
    return None


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
