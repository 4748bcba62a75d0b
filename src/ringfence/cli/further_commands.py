"""Commands of other distributions. They enter through the entry point group `ringfence.commands`, as those of the lab do.

An entry point is a function that adds its command to the parser. Only the one of the command that is called is imported.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Final

from ringfence.errors import ConfigurationError

LAB: Final = {
    "bench": "measure what sealing costs here",
    "study": "measure a grid of models, workers and networks",
    "report": "make a page with figures out of a study",
    "plan": "predict a training step elsewhere",
}
INSTALL_LAB: Final = "In a clone of ringfence: pip install . ./lab"


def add_to(commands: Any, called: str | None = None) -> None:
    """Add the further commands: the one that is called, and a line of help for each other. Without `called`: all of them.

    Raises ConfigurationError, which says what to install, if the command is the lab's and the lab is not installed.
    """
    found = (
        () if called in commands.choices else entry_points(group="ringfence.commands")
    )  # 10 ms, which others need not take
    installed = {entry.name: entry for entry in found}
    for name in [*LAB, *sorted(installed.keys() - LAB.keys() - commands.choices.keys())]:
        if called not in (None, name):
            commands.add_parser(name, help=LAB.get(name))
        elif name in installed:
            installed[name].load()(commands)
        else:
            raise ConfigurationError(f"{name} is a command of the lab, which is not installed. {INSTALL_LAB}")
