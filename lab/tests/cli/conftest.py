"""Commands print unwrapped here, as in tests/cli."""

from tests.cli.conftest import wide_terminal

__all__ = ["wide_terminal"]
