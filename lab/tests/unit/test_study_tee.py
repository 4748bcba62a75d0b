"""Cells on simulated GPU TEEs: what a grid makes of them, how dilations are chosen, and what the layers say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringfence.errors import ConfigurationError
from ringfence_lab.accelerator import tee
from ringfence_lab.bench import names
from ringfence_lab.bench.samples import Samples
from ringfence_lab.bench.tee_variants import figures_of, tee_of
from ringfence_lab.report import study
from ringfence_lab.study import grid, summary_table, tee_cost, tee_grid
from ringfence_lab.study.cells import TEE, Cell, label
from ringfence_lab.study.estimate import total
from ringfence_lab.study.folder import Folder
from ringfence_lab.study.summary import summarise
from scripts.page import RESULTS

BLOCK = '[[cells]]\nkind = "gpu-tee"\npresets = ["h100"]\nworkers = [4]\n'
STEP = f'{BLOCK}models = ["gpt2-xl"]\nflops = 4e14\nsamples = 4\nmost = "80MiB"\n'
MIB = 1 << 20


def one(text: str) -> Cell:
    (found,) = grid.read(text, "a test")
    return found


def test_a_step_has_the_inputs_of_its_preset_and_all_variants() -> None:
    cell = one(STEP)
    settings = cell.settings
    assert settings["variants"] == list(names.TEE_VARIANTS)
    assert settings["tee"] == figures_of(tee.load("h100"))
    assert settings["all_reduces"] == 145
    assert settings["scaled"] == pytest.approx(76, rel=0.01)
    assert sum(size for size, _ in cell.trace) <= 80 * MIB
    assert (settings["hosts"], settings["workers"], settings["device"]) == (4, 4, "sim")
    assert cell.name.startswith("gpt2-xl-tee-h100-4d-")
    assert label(settings) == "gpt2-xl, h100"


def test_the_baseline_is_always_there_twice() -> None:
    assert one(f'{STEP}variants = ["all"]\n').settings["variants"] == ["plain", "plain-again", "all"]


def test_each_input_is_halved_and_doubled_and_nothing_else_changes() -> None:
    base = one(STEP)
    cells = grid.read(f'{STEP}vary = ["cpu_rate", "samples", "host_cores"]\n', "a test")
    assert [cell.settings["changed"] for cell in cells] == [
        f"{name} x{times}" for name in ("cpu_rate", "samples", "host_cores") for times in ("0.5", "2")
    ]
    slow, fast, few, many, half, two = cells
    assert slow.settings["tee"] == {**base.settings["tee"], "cpu_rate": 2e9}
    assert fast.settings["tee"]["cpu_rate"] == 8e9
    assert (few.settings["samples"], many.settings["samples"]) == (2, 8)
    assert many.settings["compute"] == pytest.approx(4 * few.settings["compute"])
    assert many.settings["tee"] == base.settings["tee"]
    assert (half.settings["host_cores"], two.settings["host_cores"]) == (4.0, 16.0)
    assert len({cell.name for cell in (base, *cells)}) == 7


def test_a_larger_dilation_is_chosen_where_fewer_cores_may_be_used() -> None:
    usual, gentle = one(STEP), one(f"{STEP}load = 0.3\n")
    for name, dilation in usual.settings["dilations"].items():
        assert gentle.settings["dilations"][name] == pytest.approx(2 * dilation, rel=0.1), name


@pytest.mark.parametrize("preset", tee.names())
def test_the_estimate_of_cores_is_at_most_what_was_asked_for(preset: str) -> None:
    cell = one(STEP.replace("h100", preset))
    for name, dilation in cell.settings["dilations"].items():
        simulated = tee_cost.simulated(
            name, tee_of(name, cell.settings["tee"]), 4, cell.trace, None, tee_cost.HOST_CORES
        )
        cores = tee_cost.work(name, 4, cell.trace, None) / (dilation * simulated)
        assert cores <= 0.6 * 1.06, name
        assert cores > 0.2, name


def test_the_rate_of_a_host_is_dilated_like_its_devices() -> None:
    settings = one(STEP).settings
    assert tee_cost.host_rate(1.0) == pytest.approx(
        1 / 0.695e-9
    )  # seal, open, send, receive, add: the planner's profile
    dilated = 8 * tee_cost.host_rate(tee_cost.HOST_CORES) / settings["dilations"]["ringfence"] / 1e6
    assert settings["rate"] == f"{dilated:.0f}mbit"


def test_copies_have_no_ring_and_no_ringfence() -> None:
    cell = one(f'{BLOCK}operations = ["copy"]\nsizes = ["1MiB"]\n')
    assert {"direct", "ringfence"}.isdisjoint(cell.settings["variants"])
    assert cell.settings["hosts"] == 0
    assert cell.trace == ((MIB, 0.0),)


def test_without_namespaces_only_ringfence_is_left_out() -> None:
    cell = one(STEP)
    left = tee_grid.without_sealed(cell)
    assert left.settings["variants"] == list(names.TEE_RING)
    assert (left.settings["hosts"], left.settings["rate"]) == (0, None)
    assert {**cell.settings["dilations"]} == {
        **left.settings["dilations"],
        "ringfence": cell.settings["dilations"]["ringfence"],
    }
    assert left.name != cell.name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BLOCK, "flops: is missing"),
        (STEP.replace("h100", "b200"), "'b200' is none of h100"),
        (STEP.replace("[4]", "[9]"), "from 2 to 8"),
        (STEP.replace("[4]", "[1]"), "from 2 to 8"),
        (f'{STEP}variants = ["gloo-a"]', "'gloo-a' is none of plain"),
        (f'{STEP}vary = ["price"]', "'price' is none of"),
        (STEP.replace("samples = 4", "samples = 3") + 'vary = ["samples"]', "write an even number"),
        (f'{STEP}operations = ["copy"]\nsizes = ["1MiB"]', "either models or operations"),
        (f'{BLOCK}operations = ["copy"]', "sizes: write a list"),
        (f"{STEP}hosts = 4", "hosts: is unknown here"),
        (f"{STEP}load = 0", "no number above zero"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        grid.read(text, "a test")


def test_the_built_in_grid_has_what_the_chapter_needs_in_little_time() -> None:
    cells = grid.built_in("gpu-tee")
    settings = [cell.settings for cell in cells]
    assert {each["kind"] for each in settings} == {TEE}
    assert total(cells, cores=2) < 25 * 60
    assert {each["workers"] for each in settings} == {2, 4, 8}
    assert {each["preset"] for each in settings} == set(tee.names()) - {"published"}  # which has a grid of its own
    assert {each["model"] for each in settings if each["model"]} == {"gpt2", "gpt2-xl", "bert-large", "resnet50"}
    assert len({each["bucket_mb"] for each in settings}) >= 5
    assert {each["load"] for each in settings} == {0.6, 0.3}
    assert {name for each in settings for name in each["variants"]} == set(names.TEE_VARIANTS)


# -- the estimates beside what they stand for --------------------------------------------------------------------------


def test_the_stages_of_a_copy_add_up_unless_they_overlap() -> None:
    figures = figures_of(tee.load("software"))
    size = 8.0 * MIB
    stages = [size / figures[name] for name in ("cpu_rate", "link_rate", "device_rate", "authentication_rate")]
    confidential = tee_cost.copy_seconds(tee_of("confidential", figures), size)
    assert confidential == pytest.approx(figures["copy_overhead"] + sum(stages))
    overlapped = tee_cost.copy_seconds(tee_of("overlap", figures), size)
    assert max(stages) < overlapped < confidential
    parallel = tee_cost.copy_seconds(tee_of("parallel-authentication", figures), size)
    assert confidential - parallel == pytest.approx(stages[3] * 31 / 32)
    assert tee_cost.copy_seconds(tee_of("plain", figures), size) == pytest.approx(figures["plain_overhead"] + stages[1])


def test_a_hop_costs_two_copies_or_one_with_a_direct_channel() -> None:
    figures = figures_of(tee.load("h100"))
    size = 4.0 * MIB
    confidential = tee_of("confidential", figures)
    assert tee_cost.hop_seconds(confidential, size) == pytest.approx(2 * tee_cost.copy_seconds(confidential, size))
    direct = tee_cost.hop_seconds(tee_of("direct", figures), size)
    assert direct == pytest.approx(figures["copy_overhead"] + 2 * size / figures["link_rate"])


def test_computing_hides_all_buckets_but_the_last() -> None:
    plain = tee_of("plain", figures_of(tee.load("h100")))
    trace = [(MIB, 1.0), (MIB, 1.0)]
    hop = tee_cost.hop_seconds(plain, MIB / 4)
    assert tee_cost.ring_seconds(plain, 4, trace) == pytest.approx(2.0 + 6 * hop)


# -- the layers ---------------------------------------------------------------------------------------------------------


def write(folder: Folder, cell: Cell, rounds: int) -> None:
    """Raw samples as the study writes them: simulated seconds, with what passed here beside them."""
    folder.make()
    samples = Samples(folder.raw, f"{cell.name}.jsonl")
    samples.begin({"cores": 2, "source": "0123456789ab"}, "ringfence study --grid gpu-tee", "2026-11-16T10:00:00+00:00")
    for number in range(rounds):
        found: dict[str, dict[str, Any]] = {}
        for place, (name, dilation) in enumerate(cell.settings["dilations"].items()):
            seconds = 0.001 * (1 + (place if name not in names.TEE_BASELINE else 0)) * (1 + 0.01 * number)
            wall = seconds * dilation
            found[name] = {"seconds": seconds, "cpu": 0.5 * wall, "sent": 0, "repeats": 1, "late": 0.001}
            found[name] |= {"wall": wall, "dilation": dilation}
        samples.add({**cell.settings, "machine": "m1"}, found)


def test_ratios_are_to_the_step_without_a_tee_of_the_same_round(tmp_path: Path) -> None:
    folder, cell = Folder(tmp_path), one(STEP)
    write(folder, cell, 5)
    summarise(folder)
    rows = {row["variant"]: row for row in json.loads(folder.summary.read_text())}
    assert list(rows) == list(names.TEE_VARIANTS)
    for place, name in enumerate(rows):
        expected = 1.0 if name in names.TEE_BASELINE else 1.0 + place
        assert rows[name]["ratio"] == pytest.approx(expected)
        assert rows[name]["dilation"] == cell.settings["dilations"][name]
        assert rows[name]["wall_seconds"] == pytest.approx(rows[name]["seconds"] * rows[name]["dilation"])
        assert rows[name]["scored"] is True
    about = rows["confidential"]
    assert (about["all_reduces"], about["load"], about["changed"], about["late_seconds"]) == (145, 0.6, "", 0.001)
    assert {row["rounds"] for row in rows.values()} == {5}
    text = summary_table.summary(list(rows.values()))
    assert "ratio to plain" in text
    assert "plain / plain ±0.00" in text
    assert "0.50" in text  # cores in use


@pytest.mark.parametrize("name", ["gpu-tee-ringfence", "gpu-tee-published"])
def test_what_is_predicted_of_ringfence_is_near_what_was_measured(name: str) -> None:
    """Where hosts have cores enough. With one or two the links decide, of which it knows only the rate."""
    settings = ("model", "preset", "bucket_mb", "workers", "host_cores")
    measured = {tuple(getattr(cell, each) for each in settings): cell for cell in study.read(RESULTS / name).cells}
    seen = set()
    for cell in grid.built_in(name):
        here = cell.settings
        line = measured[tuple(here[each] for each in settings)].lines[names.TEE_SEALED]
        steady = line.seconds.high < 1.1 * line.seconds.low
        if here["host_cores"] == tee_cost.HOST_CORES and (steady or here["workers"] == 8):
            figures, rate = tee_of(names.TEE_SEALED, here["tee"]), tee_cost.host_rate(here["host_cores"])
            predicted = tee_cost.sealed_seconds(figures, here["workers"], cell.trace, rate)
            assert predicted == pytest.approx(line.seconds.median, rel=0.15), cell.name
            seen.add(here["workers"])
    assert seen == ({2, 4, 8} if name == "gpu-tee-ringfence" else {4})
