"""Messages to users: through `logging` if the program configured it, otherwise as lines on stderr.

Each line on stderr begins with `ringfence:` and the time, which distinguishes it from the output of the script.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

LOGGER: Final = logging.getLogger("ringfence")


def lines(text: str, moment: float) -> str:
    """Format `text` for stderr: a prefix before each line."""
    prefix = f"ringfence: {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(moment))}"
    return "\n".join(f"{prefix} {line}" for line in text.splitlines())


def announce(text: str) -> None:
    """Print a message regardless of the logging level."""
    text = "\n".join(f"ringfence: {line}" for line in text.splitlines()) if _configured() else lines(text, time.time())
    _write(text)


def _write(text: str) -> None:
    """With its newline in one write: other processes write to the same stderr."""
    print(text + "\n", end="", file=sys.stderr, flush=True)


def _configured() -> bool:
    """Whether the program has configured logging."""
    return bool(logging.root.handlers) or any(handler is not _HANDLER for handler in LOGGER.handlers)


class _Handler(logging.Handler):
    """Replaces `logging.lastResort`, which writes no prefix. Does nothing if the program has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if _configured():
            return
        try:
            _write(lines(self.format(record), record.created))
        except Exception:
            self.handleError(record)


_HANDLER: Final = _Handler(logging.WARNING)
LOGGER.addHandler(_HANDLER)
