"""Counts the lines of the product and of the lab.

The commands of the lab (`ringfence bench`, `study`, `report` and `plan`) count as the lab.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ringfence.cli.lab_commands import LAB

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "src" / "ringfence"


def part_of(file: Path) -> str:
    """`lab` or `product`."""
    place = file.relative_to(PACKAGE)
    command = place.parts[0] == "cli" and place.name.removesuffix(".py").partition("_")[0] in LAB
    return "lab" if place.parts[0] == "lab" or command else "product"


def count(files: list[Path], comment: str) -> tuple[int, int, int]:
    """Return files, lines, and lines that are neither empty nor a comment."""
    lines = [line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return len(files), len(lines), sum(bool(line) and not line.startswith(comment) for line in lines)


def main() -> None:
    """Print the table."""
    python = sorted(PACKAGE.rglob("*.py"))
    rows = {
        f"{part}, Python": count([file for file in python if part_of(file) == part], "#") for part in ("product", "lab")
    }
    rows["product, C"] = count(sorted([*PACKAGE.rglob("*.c"), *PACKAGE.rglob("*.h")]), "//")
    rows["lab, C++"] = count(sorted([*PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.hpp")]), "//")
    print(f"{'':16} {'files':>6} {'lines':>8} {'code':>8}")
    for name, (files, lines, code) in rows.items():
        print(f"{name:16} {files:>6,} {lines:>8,} {code:>8,}")
    ours = {part: rows[f"{part}, Python"][1] for part in ("product", "lab")}
    print(f"The lab is {ours['lab'] / sum(ours.values()):.0%} of the Python.")


if __name__ == "__main__":
    main()
