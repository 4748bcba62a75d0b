"""Measure every figure that README and the pages show, on this tree and this machine, into docs/results.

    scripts/campaign             all parts that are missing, one after another; then run scripts/figures
    scripts/campaign --list      the parts with their minutes on 2 cores, and when they were measured
    scripts/campaign PART ...    only these
    scripts/campaign --quick DIR 3 rounds of everything into another folder, to try the instrument

Nothing else may run on the machine meanwhile. Stopped, the same command goes on where it was. After a change of the code, or
on another CPU, it begins anew; each part first deletes its figures of other trees. Needs root, iproute2, wireguard-go,
wireguard-tools and openvpn.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ringfence_lab.bench import machine
from ringfence_lab.bench.samples import FILE as SAMPLES
from scripts.page import LOG, RESULTS, ROOT, printed

SAME: Final = ("source", "cpu", "features")  # of what is combined
SHOWING: Final = ("ringfence/cli", "ringfence_lab/cli", "ringfence_lab/report")  # what is not measured
QUICK_ROUNDS: Final = 3
SEALED: Final = "--variants ringfence"
BOTH: Final = "--variants ringfence,ringfence-unsealed"
FOUR: Final = "--ops all_gather,reduce_scatter,broadcast,all_to_all --sizes 25MiB"
LARGE: Final = "--sizes 25MiB,100MiB"
INT8: Final = "--sizes 25MiB --variants ringfence,int8"
RIVALS: Final = "gloo-a,gloo-b,ringfence,hop-by-hop,tls,gloo-wireguard,gloo-openvpn"


class Step(NamedTuple):
    """A command. `{rounds}` is its number of rounds."""

    command: str
    rounds: int = 0
    file: str = ""  # of the results, for what it prints
    kept: str = ""  # a file or a folder of the results that it goes on with by itself


def _bench(what: str, rounds: int, folder: str = "") -> Step:
    return Step(
        f"ringfence bench {what} --rounds {{rounds}} --results {{results}}/{folder}", rounds, kept=folder or SAMPLES
    )


def _study(grid: str, folder: str) -> Step:
    return Step(f"ringfence study --grid {grid} --results {{results}}/{folder}", kept=folder)


def _admission(what: str, name: str) -> Step:
    return Step(f"ringfence bench admission --json {what}", 0, f"{name}.json")


def _chaos(what: str, name: str) -> Step:
    return Step(f"scripts/chaos {what} --json {{results}}/{name}.jsonl", kept=f"{name}.jsonl")


def _printed(part: str, command: str, rounds: int = 0) -> list[Step]:
    return [Step(f"python -m {command}", rounds, printed.SHOWN[part][0])]


PARTS: Final[dict[str, tuple[int, list[Step]]]] = {  # minutes, steps
    "latency": (1, [Step("ringfence bench latency --json --rounds {rounds}", 9, "call-latency.json")]),
    "bounds": (
        1,
        [
            Step("ringfence bench bounds --json", 0, "bounds.json"),
            Step("ringfence bench bounds --without-vaes --json", 0, "bounds-without-vaes.json"),
        ],
    ),
    "collectives": (
        10,
        [
            _bench("collectives --workers 2", 15),
            _bench("collectives --workers 4", 15),
            _bench(f"collectives --workers 8 {BOTH}", 9),
            _bench(f"collectives --workers 2,4 {FOUR}", 15),
            _bench("collectives --workers 2 --busy", 11),
            _bench(f"collectives --workers 4 --busy {SEALED}", 11),
            _bench(f"collectives --workers 2,4 {LARGE} --profile {SEALED}", 11),
            _bench(f"collectives --workers 2 {FOUR} --profile {SEALED}", 11),
        ],
    ),
    "training": (
        19,
        [
            _bench("train --workers 2 --models resnet50,bert-base,gpt2", 5),
            _bench("train --workers 4 --models resnet50,bert-base,gpt2", 3),
            _bench("train --workers 2 --models gpt2 --strategy fsdp2", 5),
            _bench("train --workers 4 --models gpt2 --strategy fsdp2", 3),
            _bench("train --workers 2 --models gpt2 --bucket-cap-mb 5,50,100,400", 3),
        ],
    ),
    "networks": (
        5,
        [
            _bench(f"collectives --workers {hosts} --hosts {hosts} --rate {rate} {LARGE} {BOTH}", 9)
            for hosts in (2, 4)
            for rate in ("1gbit", "2.5gbit", "10gbit")
        ],
    ),
    "tunnels": (1, [_bench(f"collectives --workers 2 --hosts 2 --sizes 1MiB,25MiB --variants {RIVALS}", 11)]),
    "int8": (
        5,
        [
            _bench(f"collectives --workers {hosts} --hosts {hosts} {rate} {INT8}", 5, "int8")
            for hosts in (2, 4)
            for rate in ("--rate 100mbit", "--rate 1gbit", "--rate 2.5gbit", "")
        ]
        + [_bench(f"collectives --workers 2 --hosts 2 --rate 1gbit --delay 50ms {INT8}", 5, "int8")],
    ),
    "memory": (2, [_bench("memory", 3)]),
    "machines": (13, [_study("machines", "machines")]),
    "study": (22, [_study("default", "study")]),
    "gpu-tee": (26, [_study(grid, grid) for grid in ("gpu-tee", "gpu-tee-ringfence", "gpu-tee-published")]),
    "admission": (
        13,
        [
            _admission("--workers 64,256,1024,4096", "admission"),
            _admission("--workers 64,256,1024 --proof certificate --verifiers 24", "admission-certificate"),
            _admission("--workers 4096 --verifiers 0", "admission-everybody"),
            _admission("--workers 4096 --proof certificate --verifiers 6", "admission-agreement"),
        ],
    ),
    "checkpoints": (1, _printed("checkpoints", "tests.integration.checkpoint_cost --rounds {rounds}", 9)),
    "record": (5, _printed("record", "tests.integration.record_cost step")),
    "private": (1, _printed("private", "tests.integration.private_cost --rounds {rounds}", 15)),
    "sites": (3, _printed("sites", "tests.integration.across_regions")),
    "forwarded": (2, _printed("forwarded", "tests.integration.forward_cost --rounds {rounds}", 9)),
    "costs": (4, _printed("costs", "tests.fuzz --cpu all --seconds 20")),
    "crowd": (1, _printed("crowd", "tests.attack.crowd all --rounds 6 --nice 0")),
    "recovery": (
        17,
        [
            _chaos("--runs 8 --seed 21", "recovery"),
            _chaos("--runs 8 --seed 22 --spares", "recovery"),
            _chaos("--runs 8 --seed 23 --spares --rejoin", "recovery"),
            _chaos("--runs 2 --seed 24 --cases node --spares", "recovery"),
            _chaos("--runs 8 --seed 21 --launcher torchrun", "recovery-stock"),
        ],
    ),
}  # fmt: skip


def log_of(results: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of the log on this tree and this kind of CPU: one when a part begins, one with its `seconds` when it ends."""
    log = results / LOG
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [each for each in lines if all(each[name] == facts[name] for name in SAME)]


def files_of(part: str) -> set[str]:
    """What a part writes; parts share the file of samples."""
    return {step.file or step.kept for step in PARTS[part][1]} - {""}


def clear(part: str, begun: set[str], results: Path) -> None:
    """Delete what another tree left of a part, before it begins on this one."""
    for path in (results / name for name in files_of(part).difference(*map(files_of, begun))):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write(results: Path, entry: dict[str, Any]) -> None:
    """Append a line to the log."""
    with (results / LOG).open("a") as log:
        log.write(json.dumps(entry) + "\n")


def command_of(step: Step, results: Path, rounds: int | None = None) -> str:
    """Return the command line of a step, with another number of rounds if one is given."""
    return step.command.format(results=results, rounds=rounds or step.rounds)


def run(step: Step, results: Path, rounds: int | None) -> None:
    """Run one command of a part; what it prints is kept only if it has succeeded."""
    command = command_of(step, results, rounds)
    print(f"  {command}", flush=True)
    words = shlex.split(command)
    starts = {"ringfence": [sys.executable, "-m", "ringfence.cli"], "python": [sys.executable]}
    words[:1] = starts.get(words[0], words[:1])
    done = subprocess.run(  # noqa: S603 (our own commands)
        words, cwd=ROOT, check=True, stdout=subprocess.PIPE if step.file else None, text=True
    )
    if step.file:
        (results / step.file).write_text(done.stdout)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--list", action="store_true", help="measure nothing")
    parser.add_argument("--quick", type=Path, metavar="DIR")
    options = parser.parse_args(given)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; --list has them")
    results = options.quick or RESULTS
    facts = machine.facts() | {"source": machine.source_digest(without=SHOWING)}
    log = log_of(results, facts)
    done = {each["part"]: each for each in log if "seconds" in each}
    chosen = options.parts or list(PARTS)
    if options.list:
        for name in chosen:
            print(f"{name:12} {PARTS[name][0]:4} min   {done[name]['date'] if name in done else 'missing'}")
        return 0
    results.mkdir(parents=True, exist_ok=True)
    begun = {each["part"] for each in log} & PARTS.keys()
    for name in (name for name in chosen if name not in done):
        print(f"{name}: about {PARTS[name][0]} minutes on 2 cores", flush=True)
        entry = {"part": name, "date": machine.now()} | {same: facts[same] for same in SAME}
        if name not in begun:
            clear(name, begun, results)
            begun.add(name)
            write(results, entry)
        load, began = os.getloadavg()[0], time.monotonic()
        for step in PARTS[name][1]:
            run(step, results, QUICK_ROUNDS if options.quick else None)
        write(results, entry | {"seconds": round(time.monotonic() - began), "load_before": load})
    print("now: scripts/figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
