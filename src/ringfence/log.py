"""What ringfence says to people: through `logging`, or, where a program has not configured that, as lines of its own on stderr.

Each of these begins with `ringfence:` and the time, so that it can be told from what a script and other workers print.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

LOGGER: Final = logging.getLogger("ringfence")


def lines(text: str, moment: float) -> str:
    """`text` as it stands on stderr: the prefix before each line."""
    prefix = f"ringfence: {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(moment))}"
    return "\n".join(f"{prefix} {line}" for line in text.splitlines())


def announce(text: str) -> None:
    """Say what people are told in any case, whatever the level of logging."""
    said = "\n".join(f"ringfence: {line}" for line in text.splitlines()) if _configured() else lines(text, time.time())
    print(said, file=sys.stderr, flush=True)


def _configured() -> bool:
    """Whether the program has said where messages go."""
    return bool(logging.root.handlers) or any(handler is not _HANDLER for handler in LOGGER.handlers)


class _Handler(logging.Handler):
    """Takes the place of logging's last resort, which writes the bare message; silent once the program has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if _configured():
            return
        try:
            print(lines(self.format(record), record.created), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


_HANDLER: Final = _Handler(logging.WARNING)
LOGGER.addHandler(_HANDLER)
