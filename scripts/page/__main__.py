"""`scripts/figures`: draw the pictures and write the tables, or say with --check what is stale."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.page.documents import FIGURES, RESULTS, ROOT, documents, filled, stale
from scripts.page.edition import read
from scripts.page.series import SERIES


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: docs/results")
    parser.add_argument("--only-pictures", type=Path, metavar="DIR", help="into this folder; leave the documents alone")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if anything is stale")
    options = parser.parse_args()
    edition = read(options.results)
    if not edition.results:
        print(f"{options.results} holds no samples; scripts/measure makes them", file=sys.stderr)
        return 2
    if options.check:
        print("\n".join(found := stale(edition)) or "all is fresh")
        return 1 if found else 0
    if options.only_pictures is None:
        for path in documents(edition):
            path.write_text(filled(path.read_text(), edition))
            print(f"wrote {path.name}")
    vectors, pixels = options.only_pictures or FIGURES, options.only_pictures or ROOT / "build" / "figures"
    from scripts.page.draw import draw  # late: --check needs no matplotlib

    for folder in (vectors, pixels):
        folder.mkdir(parents=True, exist_ok=True)
    for name, series in SERIES.items():
        if numbers := series(edition):
            draw(name, numbers, vectors, pixels)
            print(f"drew {name}: {vectors / name}.svg, {pixels / name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
