"""The page of figures: what a folder of samples says, put between markers; nothing in it is older than its samples."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ringfence.cli import _parser
from ringfence_lab.bench.samples import FILE
from ringfence_lab.report.figure import digest
from scripts import campaign, chaos_runs
from scripts.page import RESULTS, costs
from scripts.page.__main__ import filled, stale
from scripts.page.costs import PAGES, TABLES, pictures
from scripts.page.edition import CALLS, MACHINES, read
from tests import measure

PAGE, _, README, _ = PAGES
SIZES = (4 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20)
FACTS = {
    "cpu": "A CPU", "features": "aes vaes", "cores": 2, "caches": {"L2": "2M"}, "memory_gib": 8, "kernel": "Linux 6.18-x",
    "python": "3.11",
    "versions": {"torch": "2.13.0+cpu"}, "openssl": "OpenSSL 4", "source": "abc", "gloo": {"threads": 2, "devices": 1},
}  # fmt: skip
AROUND = {"hosts": 0, "rate": None, "variants": ["gloo-a", "gloo-b", "ringfence", "tls"]}


def one(seconds: float) -> dict[str, float]:
    return {"seconds": seconds, "cpu": 2 * seconds, "sent": 100, "repeats": 1}


def write(folder: Path, machine: str, run: str, ratio: float, rounds: int) -> None:
    """An all-reduce of all sizes in which sealed takes `ratio` of Gloo's second, appended as one run."""
    lines: list[dict[str, Any]] = [
        {"run": run, "machine": FACTS, "command": f"ringfence bench {run}", "date": "2026-01-02T03:04:05+00:00"}
    ]
    for workers in (2, 4):
        for size in SIZES:
            case = {"kind": "collective", "operation": "all_reduce", "size": size, "workers": workers, "busy": False}
            samples = {"gloo-a": one(1), "gloo-b": one(1), "ringfence": one(ratio), "tls": one(3)}
            lines += [
                {"run": run, "case": {**case, **AROUND, "machine": machine}, "round": number, "samples": samples}
                for number in range(rounds)
            ]
    with (folder / FILE).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_only_the_last_code_that_was_measured_is_shown(tmp_path: Path) -> None:
    write(tmp_path, "old", "first", 5.0, 15)
    write(tmp_path, "new", "second", 0.5, 15)
    edition = read(tmp_path)
    assert edition.commands == ["ringfence bench second"]
    text = TABLES["all-reduce"](edition)
    assert "0.50 [0.50, 0.50]" in text
    assert "5.00" not in text


def write_calls(folder: Path) -> None:
    """Single calls of two sizes, with a mean that a few slow calls of Gloo's dominate."""

    def figures(median: float, slow: float) -> dict[str, float]:
        return {"median_after_barrier": median, "p95_after_barrier": slow, "mean_back_to_back": slow}

    sizes = [
        {"size": 4 << 10, "gloo": figures(0.0004, 0.0016), "ringfence": figures(0.0003, 0.0001)},
        {"size": 25 << 20, "gloo": figures(0.020, 0.020), "ringfence": figures(0.022, 0.022)},
    ]
    about = {"command": "ringfence bench latency", "date": "2026-01-02T03:04:05+00:00", "rounds": 15}
    (folder / CALLS).write_text(json.dumps({**about, "machine": FACTS, "sizes": sizes}))


def write_machines(folder: Path) -> None:
    """A study in which two machines of one worker take twice Gloo's time, and two of four workers 0.9 of it."""
    raw = folder / MACHINES / "raw"
    raw.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {"run": "study", "machine": FACTS, "command": "ringfence study", "date": "2026-01-03T03:04:05+00:00"}
    ]
    for workers, ratio in ((2, 2.0), (8, 0.9)):
        case = {"kind": "collective", "operation": "all_reduce", "size": 25 << 20, "workers": workers, "busy": False}
        samples = {"gloo-a": one(1), "gloo-b": one(1), "ringfence": one(ratio), "tls": one(3)}
        lines.append(
            {"run": "study", "case": {**case, **AROUND, "hosts": 2, "machine": "s"}, "round": 0, "samples": samples}
        )
    (raw / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_headline_is_the_median_call_and_the_study_of_machines(tmp_path: Path) -> None:
    write(tmp_path, "m", "run", 0.5, 15)
    write_calls(tmp_path)
    write_machines(tmp_path)
    edition = read(tmp_path)
    headline = " ".join(TABLES["headline"](edition).split())
    assert (
        "all-reduce takes 1.10 times as long as plaintext Gloo** on a CPU with VAES (two workers with a core"
        in headline
    )
    assert "median call: 22.00 ms and 20.00 ms). Between network namespaces" in headline
    assert "it takes 2.00 times as long; between two machines of four workers each **0.90 times**" in headline
    assert "| 4 KiB | 400 µs | 300 µs | 0.75 | 1.60 ms | 100 µs |" in TABLES["two-workers"](edition)


def test_two_workers_have_one_ratio_on_every_page(tmp_path: Path) -> None:
    """The batches of the benchmark say 0.50 here: no table or picture shows that for two workers."""
    write(tmp_path, "m", "run", 0.5, 15)
    write_calls(tmp_path)
    edition = read(tmp_path)
    assert "2 workers" not in TABLES["all-reduce"](edition)
    drawn = {figure.name: figure.numbers for figure in pictures(edition)}
    points = [(name, point) for name, groups in drawn.items() for point in groups.get("2 workers", ())]
    assert not [name for name, point in points if point["ratio"][1] == 0.5]
    assert [point["ratio"][1] for point in drawn["all-reduce"]["2 workers, median call"]["ringfence"]] == [
        0.75,
        1.1,
    ]


def test_filling_replaces_what_stands_between_markers_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "m", "run", 0.5, 15)
    write_calls(tmp_path)
    write_machines(tmp_path)
    edition = read(tmp_path)
    text = "before\n<!-- figures: headline -->\nold\n<!-- end of figures -->\nafter\n"
    once = filled(costs, text, edition)
    assert once.startswith("before\n<!-- figures: headline -->\n**A sealed")
    assert once.endswith("<!-- end of figures -->\nafter\n")
    assert "old" not in once
    assert filled(costs, once, edition) == once
    with pytest.raises(KeyError):
        filled(costs, text.replace("headline", "nothing"), edition)


def test_no_measured_figure_stands_outside_of_the_markers() -> None:
    """The page says that a script writes them. What is not measured may be: a unit of the table, a protocol's version."""
    prose = re.sub(r"<!-- (figures|printed): .*?<!-- end of \1 -->", "", PAGE.read_text(), flags=re.DOTALL)
    assert len(prose) < len(PAGE.read_text()) / 2
    figures = r"\b\d+\.\d+|\d+ ?%|\d+ (?:s|ms|µs|ns|GB/s|times)\b|\ba (?:third|quarter|fifth|tenth)\b|\bhalf\b"
    assert set(re.findall(figures, prose)) == {"1.00", "95 %", "1.3"}


def test_a_digest_changes_with_the_numbers(tmp_path: Path) -> None:
    digests: set[str] = set()
    for ratio in (0.5, 0.6):
        folder = tmp_path / str(ratio)
        folder.mkdir()
        write(folder, "m", "run", ratio, 2)
        digests |= {digest(figure.numbers) for figure in pictures(read(folder)) if figure.name == "all-reduce"}
    assert len(digests) == 2


@pytest.mark.slow
def test_the_documents_show_the_samples_that_lie_beside_them() -> None:
    """`scripts/figures` makes it so."""
    edition = read(RESULTS)
    assert edition.results
    assert stale(costs, edition) == []


def test_every_picture_of_the_page_is_one_that_is_drawn() -> None:
    shown = set(re.findall(r"\(\.\./figures/([a-z-]+)\.svg\)", PAGE.read_text()))
    first = set(re.findall(r"\(docs/figures/([a-z-]+)\.svg\)", README.read_text()))
    assert first == {"headline", "demo"}  # the other was recorded once, from `ringfence demo`
    assert shown | first - {"demo"} == {figure.name for figure in pictures(read(RESULTS))}


def _exists(words: Sequence[str], folder: Path) -> bool:
    """Whether a command line is one that can be called: of `ringfence`, a module, or `scripts/chaos`."""
    if words[0] == "ringfence":
        return callable(_parser().parse_args(words[1:]).run)
    if words[0] == "python":
        return words[1] == "-m" and find_spec(words[2]) is not None
    return words[0] == "scripts/chaos" and chaos_runs.arguments(words[1:]).json.parent == folder


def test_every_step_of_the_campaign_is_a_command_that_exists(tmp_path: Path) -> None:
    for step in (step for _, steps in campaign.PARTS.values() for step in steps):
        assert _exists(shlex.split(campaign.command_of(step, tmp_path)), tmp_path), step


def test_every_measurement_of_the_tests_is_a_command_that_exists(tmp_path: Path) -> None:
    for name, (_, command) in measure.MEASUREMENTS.items():
        words = command[len(measure.PYTHON) :]
        called = ("ringfence", *words[1:]) if words[0] == measure.RINGFENCE[-1] else ("python", "-m", *words)
        assert _exists(called, tmp_path), name


def test_a_campaign_is_listed_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(campaign.PARTS)


@pytest.mark.processes
def test_a_campaign_goes_on_on_the_same_tree_and_begins_anew_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part's figures of another tree stay until it is measured; what it goes on with stays after a stop."""
    version = campaign.Step("ringfence --version", file="printed.json")
    goes_on = campaign.Step("ringfence --version", kept="runs.jsonl")
    fails = campaign.Step("ringfence no-such-command")
    monkeypatch.setattr(campaign, "PARTS", {"one": (1, [version]), "two": (1, [goes_on, fails])})
    runs, printed = tmp_path / "runs.jsonl", tmp_path / "printed.json"
    runs.touch()
    assert campaign.main(["--quick", str(tmp_path), "one"]) == 0
    assert runs.exists()
    written = printed.read_text()
    printed.write_text("not again")
    with pytest.raises(subprocess.CalledProcessError):
        campaign.main(["--quick", str(tmp_path)])
    assert (printed.read_text(), runs.exists()) == ("not again", False)
    runs.touch()
    monkeypatch.setitem(campaign.PARTS, "two", (1, [goes_on]))
    assert campaign.main(["--quick", str(tmp_path)]) == 0
    assert runs.exists()
    log = [json.loads(line) for line in (tmp_path / campaign.LOG).read_text().splitlines()]
    assert [(each["part"], "seconds" in each) for each in log] == [
        ("one", False), ("one", True), ("two", False), ("two", True),
    ]  # fmt: skip
    monkeypatch.setitem(campaign.PARTS, "three", (1, [goes_on]))  # into the same file
    assert campaign.main(["--quick", str(tmp_path)]) == 0
    assert runs.exists()
    changed = (json.dumps(each | {"source": "another"}) + "\n" for each in log)
    (tmp_path / campaign.LOG).write_text("".join(changed))
    assert campaign.main(["--quick", str(tmp_path), "one"]) == 0
    assert (printed.read_text(), runs.exists()) == (written, True)


def test_what_is_inside_a_machine_and_what_is_between_machines_are_kept_apart() -> None:
    """In headlines too: no row of one machine stands under a price of sealing, and none that was sealed under the other."""
    page = PAGE.read_text()
    between, inside = page.index("\n## Between machines\n"), page.index("\n## Inside a machine\n")
    assert (
        between
        < page.index("<!-- figures: machines-between -->")
        < inside
        < page.index("<!-- figures: machines-inside -->")
    )
    edition = read(RESULTS)
    assert edition.machines is not None
    sealed = TABLES["machines-between"](edition)
    assert "| 1 x " not in sealed and "| 2 x 4 |" in sealed
    assert len(TABLES["machines-inside"](edition).splitlines()) > 2
