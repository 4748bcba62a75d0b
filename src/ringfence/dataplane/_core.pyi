"""The functions and types of csrc/ that choice.py uses. The types match those of execution.py, endpoint.py and buffers.py."""

from typing import Any

LAYOUT: tuple[int, ...]
Endpoint: Any
Execution: Any
Pool: Any
Program: Any
Segment: Any
SegmentSlice: Any

def compile(*parts: Any) -> Any: ...
def send(endpoint: Any) -> None: ...
def receive(endpoint: Any) -> bytes | None: ...
def stages(on: bool) -> dict[str, int]: ...
def events(on: bool) -> list[tuple[str, int, int, int]]: ...
