"""Export of a profiler's trace with rows for ringfence's collectives and the stages of its data plane.

torch writes a collective's range into the row of the calling thread, where it overlaps what that thread does meanwhile;
viewers show ranges of one row only if they nest. The profiler does not record the progress thread. So the ranges are moved
to their own rows, and the stages that the data plane recorded are added below them.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

from torch.autograd import profiler

from ringfence.runtime import stages

_FIRST_ROW = 1 << 30  # larger than any thread id: Linux's limit is 2**22


def export_chrome_trace(profile: Any, path: str | os.PathLike[str]) -> None:
    """Write the trace of a `torch.profiler.profile` that has ended, as its `export_chrome_trace` does, with ringfence's rows.

    Rows "ringfence collectives" have one range for each collective, from the call to its result. The row "ringfence stages"
    has the stages of the data plane: seal, open, lock, reduce, send, receive, and wait; each with its peer. Only the
    compiled data plane records stages. A path that ends in `.gz` is compressed.
    """
    if not profiler._is_profiler_enabled:
        stages.stop()
    target = Path(path)
    profile.export_chrome_trace(str(target))
    opener = gzip.open if target.suffix == ".gz" else open
    with opener(target, "rt") as file:
        trace = json.load(file)
    _add_rows(trace)
    with opener(target, "wt") as file:
        json.dump(trace, file)


def _add_rows(trace: dict[str, Any]) -> None:
    events = trace["traceEvents"]
    ranges = [event for event in events if _is_range(event)]
    if not ranges:
        return
    process = ranges[0]["pid"]
    rows = _spread(ranges)
    names = ["ringfence collectives" if row == 0 else f"ringfence collectives {row + 1}" for row in range(rows)]
    shown = _stages_within(trace, process, _FIRST_ROW + rows)
    if shown:
        names.append("ringfence stages")
    events += shown
    for row, name in enumerate(names):
        place = {"ph": "M", "pid": process, "tid": _FIRST_ROW + row, "ts": ranges[0]["ts"]}
        events.append({**place, "name": "thread_name", "args": {"name": name}})
        events.append({**place, "name": "thread_sort_index", "args": {"sort_index": _FIRST_ROW + row}})


def _is_range(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") == "user_annotation" and event["name"].startswith("ringfence:")


def _spread(ranges: list[dict[str, Any]]) -> int:
    """Assign each range to the first row that is free when it begins. Returns the number of rows."""
    free: list[float] = []  # when each row becomes free
    for event in sorted(ranges, key=lambda each: each["ts"]):
        row = next((row for row, end in enumerate(free) if end <= event["ts"]), len(free))
        free[row : row + 1] = [event["ts"] + event["dur"]]
        event["tid"] = _FIRST_ROW + row
    return len(free)


def _stages_within(trace: dict[str, Any], process: Any, row: int) -> list[dict[str, Any]]:
    """The stages within the profile, in the trace's time: microseconds since its base."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    complete = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    first = min(event["ts"] for event in complete)
    last = max(event["ts"] + event["dur"] for event in complete)
    shown = []
    for stage in stages.recorded():
        start = (stage.start - base) / 1000
        length = (stage.end - stage.start) / 1000
        if first <= start and start + length <= last:
            about = {} if stage.worker < 0 else {"worker": stage.worker}
            place = {"ph": "X", "cat": "ringfence", "pid": process, "tid": row}
            shown.append({**place, "name": stage.stage, "ts": start, "dur": length, "args": about})
    return shown
