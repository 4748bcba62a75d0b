"""Layout of everything that a command prints: paragraphs, commands, tables and help, in the terminal's width.

Standard library only: `ringfence doctor` has to print where nothing else is installed. Words are never broken, so that a
path, a hash or a URL can be copied; one that is longer than a line stands on a line of its own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn, TypeAlias

# What a command adds its parser to. The class is private, and takes its type only in annotations.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

FALLBACK: Final = 80  # columns where the output is no terminal, as in a pipe or a log
NARROWEST: Final = 40  # below this, wrapped text is harder to read than a line that the terminal breaks
_GAP: Final = 2  # between two columns
_NUMBER: Final = re.compile(r"[-+±]?\d")
_ENTRY: Final = re.compile(r"( *)(\S.*?) {2,}(\S.*)")  # "  a command   what it does"
_COMMAND: Final = re.compile(r" *(ringfence|export|unset|python|pip|chmod|mv|mount) ")


def columns() -> int:
    """Return the width to lay text out for: of `COLUMNS`, else of the terminal, else 80."""
    return max(NARROWEST, shutil.get_terminal_size((FALLBACK, 24)).columns)


def wrap(text: str, first: str = "", rest: str | None = None, width: int | None = None) -> str:
    """Wrap one paragraph. The first line begins with `first`, the others with `rest` (default: as much space)."""
    rest = " " * len(first) if rest is None else rest
    return textwrap.fill(
        text,
        width or columns(),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def say(text: str, first: str = "", rest: str | None = None) -> None:
    """Print one paragraph, wrapped."""
    print(wrap(text, first, rest))


def complain(text: str, name: str = "ringfence") -> None:
    """Print an error to standard error: the name of the command, then what happened. Line breaks in it are kept."""
    lines = f"{name}: {text}".splitlines()
    print("\n".join(wrap(line, rest="  ") for line in lines), file=sys.stderr)


def command(text: str, indent: str = "  ", width: int | None = None) -> str:
    """Lay out a shell command. One that is too long goes on after a backslash, so that it can be copied as it stands."""
    width = width or columns()
    if len(indent) + len(text) <= width:
        return indent + text
    lines = wrap(text, indent, indent + "    ", width - 2).splitlines()
    return " \\\n".join(lines)


def layout(text: str, width: int | None = None) -> str:
    """Lay out a text of several paragraphs: lines that begin at the margin are filled, indented ones are kept.

    In an indented block whose lines are too long, commands and what is said of them become two columns.
    """
    width = width or columns()
    result: list[str] = []
    for kind, lines in _blocks(text):
        if kind == "filled":
            result.append(wrap(" ".join(lines), width=width))
        elif kind == "kept" and any(len(line) > width for line in lines):
            result.extend(_entries(lines, width))
        else:
            result.extend(lines)
    return "\n".join(result)


def layout_line(line: str, width: int | None = None) -> str:
    """Lay out one line by itself: a command as `command` does, anything else as a paragraph with a hanging indent."""
    width = width or columns()
    indent = " " * (len(line) - len(line.lstrip()))
    if _COMMAND.match(line):
        return command(line.strip(), indent, width)
    return wrap(line.strip(), indent, indent + "  ", width)


def _blocks(text: str) -> Iterable[tuple[str, list[str]]]:
    """Runs of lines that are empty, filled or kept."""
    found: list[tuple[str, list[str]]] = []
    for line in text.rstrip("\n").split("\n"):
        kind = "empty" if not line.strip() else "kept" if line.startswith(" ") else "filled"
        if found and found[-1][0] == kind:
            found[-1][1].append(line)
        else:
            found.append((kind, [line]))
    return found


def _entries(lines: Sequence[str], width: int) -> list[str]:
    """Lines of two columns, the second wrapped, or below the first where that is too long to stand beside it."""
    split = [_ENTRY.fullmatch(line) for line in lines]
    lefts = [len(each[1]) + len(each[2]) for each in split if each]
    column = max((left for left in lefts if left <= width // 2), default=4) + _GAP
    result = []
    for line, each in zip(lines, split, strict=True):
        if each is None:
            result.append(layout_line(line, width))
            continue
        left = each[1] + each[2]
        if len(left) + _GAP <= column:
            result.append(wrap(each[3], left.ljust(column), " " * column, width))
        else:
            result += [layout_line(left, width), wrap(each[3], " " * column, " " * column, width)]
    return result


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Lay out rows, the first of which is the header. Numbers are aligned to the right, text to the left.

    Where the table is too wide, headers are wrapped first, then the widest columns of text.
    """
    width = width or columns()
    cells = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in cells]
    _shrink(widths, [max(map(len, column[1:]), default=0) for column in cells], _least(cells), width)
    right = [index > 0 and all(_is_number(cell) for cell in column[1:] if cell) for index, column in enumerate(cells)]
    result: list[str] = []
    for row in rows:
        wrapped = [_lines(cell, room) for cell, room in zip(row, widths, strict=True)]
        for number in range(max(map(len, wrapped))):
            parts = (lines[number] if number < len(lines) else "" for lines in wrapped)
            padded = (
                part.rjust(room) if numeric else part.ljust(room)
                for part, room, numeric in zip(parts, widths, right, strict=True)
            )
            result.append((" " * _GAP).join(padded).rstrip())
    return "\n".join(result)


def _least(cells: Sequence[Sequence[str]]) -> list[int]:
    """How narrow each column may become: a number with its unit stays together, text is broken between words."""
    return [max(len(cell) if _is_number(cell) else _longest_word(cell) for cell in column) for column in cells]


def _is_number(cell: str) -> bool:
    """Whether a cell is a number, perhaps with a unit: "1.5 s", "+3 %", "14 of 24"."""
    return len(cell) < 16 and _NUMBER.match(cell) is not None and ", " not in cell


def _longest_word(cell: str) -> int:
    indent = len(cell) - len(cell.lstrip())
    return indent + max(map(len, cell.split()), default=0)


def _shrink(widths: list[int], bodies: Sequence[int], least: Sequence[int], width: int) -> None:
    """Narrow columns until they fit: those that only their header makes wide, then the widest."""
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        able = [index for index, room in enumerate(widths) if room > least[index]]
        if not able:
            return
        by_header = [index for index in able if widths[index] > bodies[index]]
        widths[max(by_header or able, key=lambda index: widths[index])] -= 1


def _lines(cell: str, room: int) -> list[str]:
    if len(cell) <= room:
        return [cell]
    indent = " " * (len(cell) - len(cell.lstrip()))
    return wrap(cell.strip(), indent, indent, room).split("\n")


def printable(value: Any) -> str:
    """Return a value as text without what could control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def size_text(count: int) -> str:
    """Return a number of bytes with its unit."""
    if count < 1 << 10:
        return f"{count} B"
    for shift, unit in ((10, "KiB"), (20, "MiB"), (30, "GiB")):
        if count < 1 << (shift + 10):
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count / (1 << 40):.1f} TiB"


class Progress:
    """A line on standard error that says how much of the bytes is done, where that is a terminal.

    Args:
        what: What is being done.
        total: How many bytes there are.
    """

    _INTERVAL: Final = 0.1  # seconds between two updates

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._lock = threading.Lock()
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        self._began = self._last = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def add(self, count: int) -> None:
        """Count bytes that are done; any thread may call it."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._is_shown and (now - self._last >= self._INTERVAL or self._done >= self._total):
                self._last = now
                sys.stderr.write(f"\r\x1b[K{self._line(now)[: columns() - 1]}")
                sys.stderr.flush()

    def _line(self, now: float) -> str:
        share = min(1.0, self._done / self._total) if self._total else 1.0
        bar = "#" * round(20 * share)
        rate = size_text(round(self._done / max(now - self._began, 1e-3)))
        amount = f"{size_text(self._done)} of {size_text(self._total)}"
        return f"{self._what} [{bar:<20}] {share:4.0%}  {amount}, {rate}/s"


def number(least: int, most: int) -> Callable[[str], int]:
    """Return the type of an argument that is a whole number in a range."""

    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")

    return parse


class HelpFormatter(argparse.HelpFormatter):
    """Help whose descriptions and examples fit the terminal, and whose paths and options are not broken at hyphens."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(layout(text, width - len(indent)), indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width=width).split("\n")


class Parser(argparse.ArgumentParser):
    """A parser, of the command or of a part of it, that lays out help and errors as everything else is."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{**arguments, "formatter_class": HelpFormatter})

    def error(self, message: str) -> NoReturn:
        """Print how the command is used and what is wrong, and exit with code 2."""
        self.print_usage(sys.stderr)
        complain(f"error: {message}", self.prog)
        self.exit(2)
