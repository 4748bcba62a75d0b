"""Exclude the process group from torch.compile, which would trace its methods when compiled code calls a collective."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

_CALLED_BY_TORCH = (
    "_allgather_base",
    "_reduce_scatter_base",
    "_start_coalescing",
    "_end_coalescing",
    "_get_backend",
    "_set_default_timeout",
    "_source_rank",
)


def outside_dynamo(cls: type) -> None:
    """Disable tracing of every method that torch calls, and thereby of what they call."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, types.FunctionType) and (not name.startswith("_") or name in _CALLED_BY_TORCH):
            setattr(cls, name, _outside_dynamo(value))


def _outside_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `torch._dynamo.disable`, but without importing the compiler, which takes seconds, in programs that do not
    use it.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            dynamo = sys.modules.get("torch._dynamo")
            if dynamo is None or not hasattr(dynamo, "disable"):
                return function(*args, **kwargs)
            disabled = dynamo.disable(function)
        return disabled(*args, **kwargs)

    return inner
