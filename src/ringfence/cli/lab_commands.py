"""The commands of the lab, with their line of help. The command line imports only the one that is called."""

from __future__ import annotations

from typing import Final

# one of them is called.
LAB: Final = {
    "bench": "measure what sealing costs here",
    "study": "measure a grid of models, workers and networks",
    "report": "make a page with figures out of a study",
    "plan": "predict a training step elsewhere",
}
