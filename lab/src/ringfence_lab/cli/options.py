"""What the commands of the lab share: types of their options, and the choice between JSON and text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from ringfence.errors import ConfigurationError


def parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the type of an option, whose error is that of `parse`."""

    def parsed_text(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, ConfigurationError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed_text


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return the type of an option that takes values separated by commas."""
    return parsed(lambda text: [parse(each.strip()) for each in text.split(",")])


def positive(text: str) -> float:
    """Parse a positive number. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option that `show` looks at."""
    parser.add_argument("--json", action="store_true", help="print as JSON")


def show(options: argparse.Namespace, document: Any, text: str) -> int:
    """Print a result as text or, with --json, as JSON; return the exit code."""
    print(json.dumps(document, indent=2) if options.json else text)
    return 0
