"""The project's own pages of figures: tables and pictures from recorded results, so that no figure is typed by hand.

    docs/results ─► read ─┬► TABLES ──► between markers in the PAGES of a module
                          └► pictures ─► docs/figures/*.svg

Each module is one kind of marker: costs (`figures`), gpu_tee, admission, recovery, plan and printed. It is a script and no
command of ringfence, because it writes this repository's documents; its charts are those of `ringfence report`. Every picture
has a digest of the numbers it was drawn from, so that a stale one is found without drawing it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "docs" / "results"
LOG: Final = "campaign.jsonl"  # in results: lines of scripts/campaign, when a part begins and when it ends
FIGURES: Final = ROOT / "docs" / "figures"
