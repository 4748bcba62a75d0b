"""Which release this is, and where its documentation is."""

from __future__ import annotations

from typing import Final

RELEASE: Final = "0.1.0"
PAGES: Final = "https://ringfence.github.io/ringfence"
