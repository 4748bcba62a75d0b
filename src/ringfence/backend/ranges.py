"""Ranges for torch.profiler: one for each collective, with the fields of NCCL's traces.

A range begins when the collective is called and ends when its result is available, on any thread. The profiler records
the threads it was started on, not the progress thread, so torch gets each range together with a future, which the
progress thread completes. This code runs only while a profiler is active.

A range that is open when its profile ends stays open: torch frees its event then, and would write to it at the range's end.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import profiler
from torch.futures import Future

from ringfence.dataplane.request import Request
from ringfence.log import LOGGER as _log
from ringfence.runtime import stages

_broken = False
_lock = threading.RLock()  # a range begins or ends either before its profile does, or after
_open: set[Any] = set()  # the futures of ranges
_left_open: list[Any] = []  # never deleted, which would end the range too
_disable_profiler: Any = None  # torch's own, once it is wrapped


def record(
    group: Any, name: str, request: Request, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Record a request that is about to be submitted."""
    global _broken
    stages.start(group._session.network)
    if _broken:
        return
    try:
        _open_range(name, request, inputs)
        with torch._C._profiler._RecordFunctionFast(
            "ringfence.call", list(inputs), _about(group, name, inputs, outputs)
        ):
            pass
    except Exception:  # private interface of torch: a change must not end the run
        _broken = True
        _log.warning("torch.profiler cannot show ringfence's collectives with this version of torch", exc_info=True)


def _open_range(name: str, request: Request, inputs: Sequence[torch.Tensor]) -> None:
    _watch_profiles()
    ended: Any = Future()
    with _lock:
        opened = torch._C._autograd._record_function_with_args_enter(f"ringfence:{name}", *inputs)
        torch.ops.profiler._call_end_callbacks_on_jit_fut(opened, ended)
        _open.add(ended)

    def end() -> None:  # completes the future once, although an interrupted end is repeated
        with _lock:
            if ended in _open:
                _open.remove(ended)
                ended.set_result(None)

    request.on_end = end


def _watch_profiles() -> None:
    """Wrap the function by which a profile ends, once."""
    global _disable_profiler
    with _lock:
        if _disable_profiler is None:
            _disable_profiler = profiler._disable_profiler
            profiler._disable_profiler = _leave_ranges_open


def _leave_ranges_open(*args: Any, **kwargs: Any) -> Any:
    with _lock:
        _left_open.extend(_open)
        _open.clear()
        return _disable_profiler(*args, **kwargs)


def _about(
    group: Any, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> dict[str, str | int]:
    """The fields of NCCL's traces, which tools read, and the bytes."""
    tensors = [*inputs, *outputs]
    return {
        "Collective name": name,
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        "In msg nelems": sum(tensor.numel() for tensor in inputs),
        "Out msg nelems": sum(tensor.numel() for tensor in outputs),
        "In msg bytes": sum(tensor.numel() * tensor.element_size() for tensor in inputs),
        "Out msg bytes": sum(tensor.numel() * tensor.element_size() for tensor in outputs),
        "Group size": group.size(),
        "Rank": group.rank(),
        "Process Group Name": group.getGroupName(),
        "Process Group Description": group.getGroupDesc(),
        "Process Group Ranks": str(list(group._session.default_ranks(group._ranks))),
    }
