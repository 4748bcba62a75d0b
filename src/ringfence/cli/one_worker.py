"""Forms a group of one worker on the loopback interface, as a training script does. `ringfence doctor` runs this as a process.

`python -P -m ringfence.cli.one_worker` prints the whole traceback of a failure, and its last lines on standard output.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path

SECONDS = 30


def main() -> int:
    """Return exit code 0 if the group works; otherwise 1, with the error on standard output."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            prepare(os.environ, Path(folder))
            form_group()
        except Exception as error:
            traceback.print_exc()
            print(f"{type(error).__name__}: {error}")
            return 1
    return 0


def prepare(environ: MutableMapping[str, str], folder: Path) -> None:
    """Set up a separate run with a new secret."""
    from ringfence.config.private_files import new_secret_file
    from ringfence.config.settings import inherited
    from ringfence.guard import REQUIRE

    for name in environ.keys() - inherited(environ).keys() - {REQUIRE}:
        del environ[name]
    new_secret_file(folder / "secret")
    environ["RINGFENCE_SECRET_FILE"] = str(folder / "secret")


def form_group() -> None:
    """Form two groups, run a collective on each, and leave them."""
    import torch
    from torch import distributed as dist

    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("ringfence", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    for group in groups:
        values = torch.arange(4)
        dist.all_reduce(values, group=group)
        if values.tolist() != [0, 1, 2, 3]:
            raise RuntimeError(f"an all-reduce over one worker gave {values.tolist()} instead of [0, 1, 2, 3]")
        if group.name() != "ringfence":
            raise RuntimeError(f"torch made a group of {group.name()!r}, which is not encrypted")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
