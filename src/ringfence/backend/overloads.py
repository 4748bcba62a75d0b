"""The forms in which a group's own methods may be called: lists with an options object, or a tensor and plain values.

torch's functions use the first; scripts and older libraries also call a group by the second, as torch's own groups allow.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def options_of(kind: Any, given: Any, op: Any = None, root: Any = None, timeout: timedelta | None = None) -> Any:
    """The options of a call: the object that was given, or one made of what stands in its place and of keywords."""
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
    """One tensor is a list of one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def listed_with(lists: Any, tensors: Any) -> tuple[Any, Any]:
    """One tensor and the list that goes with it are lists of one each. Where a rank gives no list, there is none to wrap."""
    if isinstance(tensors, torch.Tensor):
        return [lists], [tensors]
    return lists, tensors
