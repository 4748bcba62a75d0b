"""What choice.py uses of csrc/; the types are those of run.py, ends.py and memory.py."""

from typing import Any

LAYOUT: tuple[int, ...]
End: Any
Piece: Any
Pool: Any
Program: Any
Run: Any
Segment: Any

def compile(*parts: Any) -> Any: ...
def send(end: Any) -> None: ...
def receive(end: Any) -> bytes | None: ...
def stages(on: bool) -> dict[str, int]: ...
def events(on: bool) -> list[tuple[str, int, int, int]]: ...
