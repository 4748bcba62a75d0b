"""Measurements that decide no test, because a busy machine changes them: they print figures and have no limits.

    python -m tests.measure --list
    python -m tests.measure speed crowd

The exit code is that of a command that failed to run. scripts/nightly keeps what is printed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = (sys.executable, "-m")
RINGFENCE = (*PYTHON, "ringfence.cli")
RESULTS = "{results}"  # a new folder

MEASUREMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "speed": (
        "a sealed all-reduce of 25 MiB beside plaintext Gloo",
        (
            *(*RINGFENCE, "bench", "collectives", "--workers", "2", "--ops", "all_reduce", "--sizes", "25MiB"),
            *("--variants", "gloo-a,gloo-b,ringfence", "--rounds", "11", "--results", RESULTS),
        ),
    ),
    "record": (
        "CPU time of a training step with a record and without; a large audit and a manifest: `audit`, `manifest`",
        (*PYTHON, "tests.integration.record_cost", "step"),
    ),
    "forwarded": (
        "CPU time a byte of collectives with link tags that cover what is forwarded, and without; with VAES and without",
        (*PYTHON, "tests.integration.forward_cost"),
    ),
    "private": (
        "private sums of 25 MiB by the number of masks: their parts, beside the sealed all-reduce, and a DDP step",
        (*PYTHON, "tests.integration.private_cost"),
    ),
    "crowd": (
        "seconds in which a run forms, alone and while peers send expensive proofs",
        (*PYTHON, "tests.attack.crowd", "all", "--rounds", "3"),
    ),
    "costs": (
        "CPU time of the dearest input that a search finds for what a peer sends before it is authenticated",
        (*PYTHON, "tests.fuzz", "--cpu", "all", "--seconds", "10", "--finds", RESULTS),
    ),
    "again": (
        "CPU time of verification again for each interval: 8 workers with certificates, and 4,096 by the model",
        (*PYTHON, "tests.integration.verified_cost"),
    ),
    "agents": (
        "CPU time and memory of the host of a launch with 512 and 2,048 agents",
        (*PYTHON, "tests.integration.launch_host_cost", "512", "2048"),
    ),
    "regions": (
        "seconds after which a site trains on when the other one is killed or cut off, and both do when it is back",
        (*PYTHON, "tests.integration.across_regions"),
    ),
    "diloco": (
        "time, bytes and loss of DiLoCo over a link of 100 Mbit/s and 100 ms, beside no limit and DDP",
        (*PYTHON, "tests.integration.diloco_cost"),
    ),
    "hostile": (
        "how long calls of an admitted agent take while others send hostile messages",
        (*PYTHON, "tests.attack.launch_attacks", "--messages", "3000"),
    ),
}


def measure(name: str) -> int:
    """Run a measurement; return the exit code of its command."""
    text, command = MEASUREMENTS[name]
    print(f"{name}: {text}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ringfence-measure-") as folder:
        return subprocess.run([word.replace(RESULTS, folder) for word in command], cwd=ROOT, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say what can be measured")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    options = parser.parse_args()
    if unknown := set(options.names) - MEASUREMENTS.keys():
        parser.error(f"there is no measurement {', '.join(sorted(unknown))}; --list has them")
    if options.list:
        print("\n".join(f"{name}: {text}" for name, (text, _) in MEASUREMENTS.items()))
        return 0
    codes = [measure(name) for name in options.names or MEASUREMENTS]
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
