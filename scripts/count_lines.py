"""Counts the lines of the product, the lab, the scripts and the tests, and of what a security reviewer must trust."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PARTS: Final = {"product": ("src",), "lab": ("lab/src",), "scripts": ("scripts",), "tests": ("tests", "lab/tests")}

# What a security reviewer must trust: docs/concepts/architecture.md says why.
TRUSTED: Final = (
    "keys.py",
    "guard.py",
    "backend/inside.py",
    "link/*.py",
    "runtime/link_keys.py",
    "admission/*.py",
    "dataplane/*.py",
    "dataplane/csrc/*.[ch]",
    "transport/*.py",
)


def count(folders: tuple[str, ...], patterns: tuple[str, ...], comment: str) -> tuple[int, int, int]:
    """Return what `measured` does of all files in these folders, and below them, that match one of the patterns."""
    files = [file for folder in folders for pattern in patterns for file in (ROOT / folder).rglob(pattern)]
    return measured(files, comment)


def measured(files: list[Path], comment: str) -> tuple[int, int, int]:
    """Return files, lines, and lines that are neither empty nor a comment."""
    lines = [line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return len(files), len(lines), sum(bool(line) and not line.startswith(comment) for line in lines)


def main() -> None:
    """Print the table."""
    rows = {f"{part}, Python": count(folders, ("*.py",), "#") for part, folders in PARTS.items()}
    rows["product, C"] = count(PARTS["product"], ("*.c", "*.h"), "//")
    rows["lab, C++"] = count(PARTS["lab"], ("*.cpp", "*.hpp"), "//")
    trusted = [file for pattern in TRUSTED for file in (ROOT / "src" / "ringfence").glob(pattern)]
    rows["to be trusted"] = measured(trusted, "#")
    print(f"{'':16} {'files':>6} {'lines':>8} {'code':>8}")
    for name, (files, lines, code) in rows.items():
        print(f"{name:16} {files:>6,} {lines:>8,} {code:>8,}")


if __name__ == "__main__":
    main()
