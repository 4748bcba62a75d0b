"""What the cover of forwarded data costs (`forwarded` in a policy): CPU time a byte, with it and without. Prints figures.

    python -m tests.integration.forward_cost [--rounds N]

With and without in turns; on a CPU with VAES once more without it and vector PCLMULQDQ, which OPENSSL_ia32cap hides from
OpenSSL.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ringfence_lab.bench.machine import facts
from tests.attack.forgery import EVERY_HOP
from tests.pool import Pool

WORKERS, CALLS = 4, 6
BYTES = 25 << 20  # of the tensor, or of all outputs of an all-gather
PARTS = 256 * 1024
NO_VAES = ":~0x60000000000"  # bits 9 and 10 of ECX in leaf 7 of CPUID
TURNS = ("without", "with", "without, again")
COLLECTIVES = ("all_reduce", "all_gather", "broadcast")


def nanoseconds(calls: int) -> list[float]:
    """CPU time of this worker for a byte, all its threads, of each collective."""
    whole = torch.ones(BYTES // 4)
    part = torch.ones(len(whole) // WORKERS)
    found = []
    for run in (
        lambda: dist.all_reduce(whole),
        lambda: dist.all_gather_into_tensor(whole, part),
        lambda: dist.broadcast(whole, 0),
    ):
        run()
        dist.barrier()
        before = time.process_time_ns()
        for _ in range(calls):
            run()
        dist.barrier()
        found.append((time.process_time_ns() - before) / calls / BYTES)
    return found


def cipher(seconds: float = 0.3) -> float:
    """Nanoseconds of CPU time to seal a byte of a segment."""
    sealer, data, target = AESGCM(bytes(32)), bytes(PARTS), bytearray(PARTS + 16)
    before, count = time.process_time(), 0
    while time.process_time() < before + seconds:
        sealer.encrypt_into(bytes(12), data, None, target)
        count += 1
    return (time.process_time() - before) * 1e9 / count / PARTS


def measure(rounds: int) -> None:
    """Print sums over the workers: medians, and ratios to the mean of the turns before and after."""
    print(f"  sealing: {cipher():.3f} ns a byte", flush=True)
    figures: dict[tuple[str, str], list[float]] = {(each, turn): [] for each in COLLECTIVES for turn in TURNS}
    with tempfile.TemporaryDirectory() as folder, Pool() as pool:
        policies = {name: Path(folder) / f"{name}.toml" for name in ("every_hop", "origin")}
        policies["every_hop"].write_text(EVERY_HOP)
        policies["origin"].write_text(EVERY_HOP.replace("every_hop", "origin"))
        for number in range(rounds):
            for turn in TURNS if number % 2 else reversed(TURNS):
                policy = policies["every_hop" if turn == "with" else "origin"]
                env = {"RINGFENCE_POLICY": str(policy)}
                sums = zip(*pool.check(nanoseconds, WORKERS, args=(CALLS,), env=env, renew=True), strict=True)
                for each, times in zip(COLLECTIVES, sums, strict=True):
                    figures[each, turn].append(sum(times))
                pool.leave()
    for each in COLLECTIVES:
        before, with_it, after = (figures[each, turn] for turn in TURNS)
        ratios = [2 * b / (a + c) for a, b, c in zip(before, with_it, after, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"  {each:10}  without {statistics.median(before + after):.3f} ns a byte, with {statistics.median(with_it):.3f}, "
            f"ratio {middle:.3f} [{low:.3f}, {high:.3f}]",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.integration.forward_cost", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=9, help="of three turns each (default: 9)")
    options = parser.parse_args()
    # A process of its own, which reads the variable, and whose workers find this module under its name.
    command = [sys.executable, "-c", f"import {__spec__.name} as cost; cost.measure({options.rounds})"]
    ways: list[tuple[str, dict[str, str]]] = [("all instructions", {})]
    if "vaes" in facts()["features"].split():
        ways.append(("without VAES", {"OPENSSL_ia32cap": NO_VAES}))
    for text, env in ways:
        print(f"{WORKERS} workers, {BYTES >> 20} MiB, {text}:", flush=True)
        if code := subprocess.run(command, env={**os.environ, **env}, check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
