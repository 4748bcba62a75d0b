"""The two call signatures of a group's methods: lists with an options object, or a tensor and plain values.

torch's functions use the first; scripts and older libraries also use the second, which torch's own groups accept.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def options_of(kind: Any, given: Any, op: Any = None, root: Any = None, timeout: timedelta | None = None) -> Any:
    """Return the options of a call: the given object, or one built from a positional value and keywords."""
    if isinstance(given, kind):  # what torch's functions pass: the other tests take as long as a small send
        return given
    if isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        given, op = None, given
    elif isinstance(given, timedelta):
        given, timeout = None, given
    elif hasattr(given, "__index__"):
        given, root = None, given
    if given is not None:
        return given
    made = kind()
    if op is not None:
        made.reduceOp = op
    if root is not None:
        made.rootRank = root
    if timeout is not None:
        made.timeout = timeout
    return made


def listed(tensors: Any) -> Any:
    """Wrap a single tensor in a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def listed_with(lists: Any, tensors: Any) -> tuple[Any, Any]:
    """Wrap a single tensor and its list of tensors in a list each; the latter may be None or empty on some ranks."""
    if isinstance(tensors, torch.Tensor):
        return [lists], [tensors]
    return lists, tensors
