"""Counts the lines of the product, the lab, the scripts and the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PARTS: Final = {"product": ("src",), "lab": ("lab/src",), "scripts": ("scripts",), "tests": ("tests", "lab/tests")}


def count(folders: tuple[str, ...], patterns: tuple[str, ...], comment: str) -> tuple[int, int, int]:
    """Return files, lines, and lines that are neither empty nor a comment."""
    files = [file for folder in folders for pattern in patterns for file in (ROOT / folder).rglob(pattern)]
    lines = [line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return len(files), len(lines), sum(bool(line) and not line.startswith(comment) for line in lines)


def main() -> None:
    """Print the table."""
    rows = {f"{part}, Python": count(folders, ("*.py",), "#") for part, folders in PARTS.items()}
    rows["product, C"] = count(PARTS["product"], ("*.c", "*.h"), "//")
    rows["lab, C++"] = count(PARTS["lab"], ("*.cpp", "*.hpp"), "//")
    print(f"{'':16} {'files':>6} {'lines':>8} {'code':>8}")
    for name, (files, lines, code) in rows.items():
        print(f"{name:16} {files:>6,} {lines:>8,} {code:>8,}")


if __name__ == "__main__":
    main()
