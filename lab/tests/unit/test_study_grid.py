"""Grids: what they multiply to, what is refused and how it is said, and that the ones built in hold what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.errors import ConfigurationError
from ringfence_lab.bench import names
from ringfence_lab.study import grid, runner
from ringfence_lab.study.cells import SETTINGS
from ringfence_lab.study.estimate import total
from ringfence_lab.study.summary_table import listing
from tests.unit.test_imports import ALLOWED

TRAINING = '[[cells]]\nkind = "training"\nmodels = ["gpt2", "resnet50"]\nworkers = [2, 4]\n'
COLLECTIVE = '[[cells]]\nkind = "collective"\nsizes = ["4KiB"]\nworkers = [2]\n'
TRACE = '[[cells]]\nkind = "trace"\nmodels = ["gpt2-xl"]\ndevices = ["gpu"]\nflops = 1e14\nworkers = [2]\n'


def test_the_lists_of_a_block_multiply() -> None:
    cells = grid.read(f'{TRAINING}buckets = ["default", 50]\nwires = ["float32", "bfloat16"]\n', "a test")
    assert len(cells) == len({cell.name for cell in cells}) == 2 * 2 * 2 * 2
    assert {cell.settings["bucket_mb"] for cell in cells} == {None, 50.0}
    assert all(set(SETTINGS) <= set(cell.settings) for cell in cells)
    assert all(cell.rounds == 7 for cell in cells)
    assert all(cell.settings["variants"][:2] == list(names.BASELINE) for cell in cells)


def test_names_are_of_settings_and_not_of_rounds() -> None:
    few, many = (grid.read(f"rounds = {rounds}\n{TRAINING}", "a test") for rounds in (2, 9))
    assert [cell.name for cell in few] == [cell.name for cell in many]
    assert few[0].name.startswith("gpt2-ddp-2w-")


def test_a_trace_is_cut_and_says_so() -> None:
    (whole,) = grid.read(TRACE, "a test")
    (short,) = grid.read(f'{TRACE}most = "512MiB"\n', "a test")
    (half,) = grid.read(f'{TRACE}most = "512MiB"\nwires = ["bfloat16"]\n', "a test")
    assert sum(size for size, _ in whole.trace) <= 2 << 30
    assert 1 < whole.settings["scaled"] < short.settings["scaled"]
    assert whole.settings["compute"] == short.settings["compute"] == pytest.approx(3 * 3.5067e12 / 1e14, rel=1e-3)
    assert sum(compute for _, compute in short.trace) == pytest.approx(
        short.settings["compute"] / short.settings["scaled"], rel=1e-6
    )
    assert [(2 * size, compute) for size, compute in half.trace] == list(short.trace)
    assert len({cell.settings["trace"] for cell in (whole, short, half)}) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at least one block"),
        ("cells = 3", "at least one block"),
        ("[[cells]]", "block 1, kind: is missing"),
        ("kind = ", "Invalid value"),
        (f"round = 3\n{COLLECTIVE}", "unknown key round"),
        (f"rounds = true\n{COLLECTIVE}", "rounds: True is no whole number"),
        (f"{COLLECTIVE}modles = []", "block 1, modles: is unknown here; known are busy, hosts"),
        (f'{COLLECTIVE}models = ["gpt2"]', "models: is unknown here"),
        (f"{COLLECTIVE}{COLLECTIVE}", "all_reduce-4KiB-2w-.* is there twice"),
        (COLLECTIVE.replace("[2]", "[1]"), "at least two"),
        (COLLECTIVE.replace("[2]", "2"), "workers: write a list"),
        (COLLECTIVE.replace("4KiB", "4KB"), "4KiB or 25MiB"),
        (COLLECTIVE.replace("collective", "collect"), "none of collective, training, trace"),
        (f'{COLLECTIVE}rates = ["1gbit"]', "say how many with `hosts`"),
        (f'{COLLECTIVE}hosts = 2\nrates = ["fast"]', "write a rate"),
        (f"{COLLECTIVE}hosts = 3", "one for each host"),
        (f'{COLLECTIVE}variants = ["nccl"]', "'nccl' is none of gloo-a"),
        (f'{COLLECTIVE}variants = ["alone"]', "'alone' is none of gloo-a"),
        (f'{COLLECTIVE}busy = true\noperations = ["broadcast"]', "is for all_reduce"),
        (f'{COLLECTIVE}wires = ["float16"]', "none of float32, bfloat16"),
        (f"{TRAINING}buckets = [0]", "no number above zero"),
        (f'{TRAINING}strategy = "fsdp2"', "FSDP2 needs process groups: leave out hop-by-hop"),
        (f'{TRAINING}strategy = "fsdp2"\nvariants = ["ringfence"]\nbuckets = [5]', "neither buckets nor wire"),
        (TRACE.replace("flops = 1e14\n", ""), "flops: is missing"),
        (TRACE.replace("gpt2-xl", "gpt-5"), "'gpt-5' is none of"),
        (TRACE.replace('"gpu"', '"tpu"'), "none of cpu, gpu"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        grid.read(text, "a test")


def test_the_default_grid_covers_what_a_report_needs_in_half_an_hour() -> None:
    cells = grid.built_in("default")
    settings = [cell.settings for cell in cells]
    assert total(cells, cores=2) < 33 * 60
    assert {each["workers"] for each in settings} == {2, 4, 8}
    assert len({each["model"] for each in settings if each["model"]} - {"gpt2-tiny"}) >= 5
    everyone = {name for each in settings for name in each["variants"]}
    assert everyone >= {
        *names.BASELINE,
        "ringfence",
        "ringfence-unsealed",
        "hop-by-hop",
        "tls",
        "alone",
        names.PROFILED,
    }
    buckets: dict[tuple[str, str], set[float | None]] = {}
    for each in settings:
        if each["model"]:
            buckets.setdefault((each["kind"], each["model"]), set()).add(each["bucket_mb"])
    assert max(len(sizes) for sizes in buckets.values()) >= 5
    assert {each["wire"] for each in settings if each["kind"] == "training"} == set(names.WIRES)
    assert {each["wire"] for each in settings if each["kind"] == "trace"} == set(names.WIRES)
    assert {(each["hosts"], each["rate"]) for each in settings} >= {
        (2, "1gbit"),
        (2, "2.5gbit"),
        (4, "1gbit"),
        (0, None),
    }
    assert all(names.PROFILED in each["variants"] for each in settings if each["kind"] == "trace")


@pytest.mark.parametrize(("name", "minutes"), [("machines", 20), ("machines-few", 8)])
def test_the_grids_of_machines_vary_machines_and_workers(name: str, minutes: int) -> None:
    settings = [cell.settings for cell in grid.built_in(name)]
    assert total(grid.built_in(name), cores=2) < minutes * 60
    reduced = [each for each in settings if each["operation"] == "all_reduce" and not each["rate"]]
    for size in (4 << 10, 1 << 20, 25 << 20, 100 << 20):
        places = {(each["hosts"], each["workers"] // each["hosts"]) for each in reduced if each["size"] == size}
        assert places >= {(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1)}
    limited = {(each["hosts"], each["workers"], each["rate"]) for each in settings if each["rate"]}
    assert limited == {(2, workers, rate) for workers in (2, 4, 8) for rate in ("10gbit", "2.5gbit")}
    assert {each["operation"] for each in settings if each["kind"] == "collective"} == set(names.OPERATIONS)
    tried = [each for each in settings if each["kind"] == "trace"]
    assert tried and all((each["hosts"], each["workers"]) == (2, 8) for each in tried)


def test_the_quick_grid_has_every_kind_in_little_time() -> None:
    cells = grid.built_in("quick")
    assert {cell.settings["kind"] for cell in cells} == {"collective", "training", "trace"}
    assert total(cells, cores=2) < 90
    assert "9 cells, about" in listing(cells, 2)


def test_rooms_whose_code_samples_outlive_are_not_used_while_something_is_timed() -> None:
    """What the timed rooms import is named by the digest; admission and its kin are done by then.

    The runtime encodes its control messages as admission does; none is sent while something is timed.
    """
    timed = {"backend", "collectives", "dataplane", "link", "runtime", "transport"}
    outlived = {room.removeprefix("ringfence/") for room in runner.UNMEASURED}
    assert not timed & outlived
    for room in timed:
        assert not (ALLOWED[room] - {"admission"}) & outlived, room
    root = Path(grid.__file__).parents[4]
    assert all((root / "src" / room).exists() or (root / "lab/src" / room).exists() for room in runner.UNMEASURED)
