"""The page about GPU TEEs: its words as they are (a snapshot), its figures, and how far they are from published ones.

`python -m lab.tests.unit.test_report_tee` writes the snapshot anew; look at the difference before you keep it.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from lab.tests.unit import report_samples
from lab.tests.unit.report_samples import Row, write_study
from lab.tests.unit.tee_samples import everything, tee_cell
from lab.tests.unit.test_report_figures import study_of
from lab.tests.unit.test_report_page import Structure
from ringfence_lab.accelerator import tee as presets
from ringfence_lab.report import tee
from ringfence_lab.report.figure import Missing, Picture
from ringfence_lab.report.page import page
from ringfence_lab.report.study import Study, read
from ringfence_lab.report.tee import distance, distances, outside
from ringfence_lab.report.tee_page import LIMITS, chapter, headline
from ringfence_lab.report.write import PAGE, TEE_BUILDERS, TEE_PAGE, write

SNAPSHOT = Path(__file__).with_name("report_tee.html")


def figures_of(found: Study) -> list[Picture | Missing]:
    return [figure for build in TEE_BUILDERS for figure in build(found)]


def rendered() -> str:
    """The page of a study with a cell for each figure, without style, pictures and the figures of presets."""
    return re.sub(r'(<section id="inputs".*?)<tbody>.*?(</table>)', r"\1\2", whole(), flags=re.DOTALL)


def whole(*more: Row) -> str:
    study = study_of([*everything(), *more])
    figures = [*figures_of(study), Missing("nothing", "A figure that is not there", "nobody measured it")]
    pictures = {each.name: f"data:{each.name}" for each in figures if isinstance(each, Picture)}
    text = page(study, chapter(study, figures), pictures, {"report.html": "The other cells of this study"})
    return re.sub(r"<style>.*?</style>", "<style></style>", text, flags=re.DOTALL)


def drawn(found: Any) -> Picture:
    (figure,) = found
    assert isinstance(figure, Picture), figure
    return figure


def test_the_words_of_the_page_are_those_that_were_looked_at() -> None:
    assert rendered() == SNAPSHOT.read_text(), "if this is meant: python -m lab.tests.unit.test_report_tee"


def test_a_step_on_hosts_with_other_cores_takes_the_place_of_none() -> None:
    few = tee_cell("few-cores", 0.002, {"ringfence": 99.0}, preset="h100", model="gpt2-xl", host_cores=2.0)
    base, both = study_of(everything()), study_of([*few, *everything()])
    assert headline(both) == headline(base)
    for table in (tee.all_steps, tee.distances, tee.dilations, tee.sensitivity):
        assert table(both) == table(base), table.__name__


def test_the_page_is_whole_and_fetches_nothing() -> None:
    found = Structure(rendered())
    assert all(address.startswith("data:") for address in found.fetched)
    assert [name for name, count in found.ids.items() if count > 1] == []
    inside = {link.removeprefix("#") for link in found.links if link.startswith("#")}
    assert inside <= set(found.ids)
    others = [link for link in found.links if not link.startswith("#")]
    assert others == ["report.html"]


def test_every_input_stands_there_with_its_source_or_as_an_assumption() -> None:
    text = whole(*tee_cell("solved", 0.002, {"confidential": 40.0}, preset="published", model="gpt2-xl"))
    for preset in presets.names():
        found = presets.load(preset)
        assert f'colspan="4">{preset}</th>' in text
        for name, origin in found.origins.items():
            said = f"assumed: {origin.text}" if origin.assumed else f"{origin.text} ({origin.date})"
            assert f"<td>{name}</td>" in text
            assert html.escape(said).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in text


def test_a_full_study_has_every_figure() -> None:
    figures = figures_of(study_of(everything()))
    assert [each for each in figures if isinstance(each, Missing)] == []
    assert len({each.name for each in figures}) == len(TEE_BUILDERS)


@pytest.mark.parametrize("build", TEE_BUILDERS, ids=lambda build: build.__name__)
def test_what_a_study_does_not_hold_is_said_and_not_drawn(build: Any) -> None:
    nothing = study_of(tee_cell("one", 0.001, {"all": 2.0}, model="gpt2"))
    (missing,) = build(nothing)
    assert isinstance(missing, Missing)
    assert missing.why


def test_the_headline_states_the_distance_and_the_limits_stand_on_the_page() -> None:
    assert headline(study_of(everything())) == (
        "On 4 simulated GPU TEEs (h100) a step of gpt2-xl takes 40.0 [38.0, 44.0] times the step without a TEE; "
        "Lee et al. publish 41.6 (1.04 times below)."
    )
    text = rendered()
    assert len(LIMITS) >= 5
    assert "No GPU took part." in text


def test_distances_are_to_the_figure_of_the_same_kind() -> None:
    rows = distances(study_of(everything())).groups[""]
    found = {(row[1], row[4].split(",")[1].strip()): (row[2], row[3], row[5]) for row in rows}
    assert found["GPT-2 XL on four GPUs, default buckets", "h100"] == ("41.6", "40.0", "1.04 times below")
    assert found["GPT-2 XL on four GPUs, larger buckets", "buckets of 100 MiB"][0] == "3.03"
    assert found["run time saved by all three, at most", "h100"] == ("84.6 %", "85.0 %", "+0.4 points")
    assert found["CPU-GPU communication", "25 MiB"][2] == "within the range"


@pytest.mark.parametrize(
    ("here", "said"), [(20.0, "within the range"), (67.06, "2.00 times above"), (6.345, "2.00 times below")]
)
def test_a_number_outside_of_a_range_is_compared_with_its_nearer_end(here: float, said: str) -> None:
    assert outside(here, 12.69, 33.53) == said


def test_twice_as_much_is_above_and_half_is_below() -> None:
    assert distance(8.0, 4.0) == "2.00 times above"
    assert distance(4.0, 8.0) == "2.00 times below"


def test_the_cell_with_more_cores_in_use_is_shown_and_the_other_checks_it() -> None:
    rows = tee_cell("one", 0.001, {"confidential": 10.0}, model="gpt2")
    rows += tee_cell("two", 0.001, {"confidential": 13.0}, model="gpt2", load=0.3)
    study = study_of(rows)
    figure = drawn(tee.models(study))
    (point,) = figure.numbers["confidential, hop by hop"]
    assert point["ratio"][1] == 10.0
    (row,) = tee.dilations(study).groups[""]
    assert (row[0], row[-1]) == ("gpt2, h100, 4 devices, 1/20 of the step", "+30.0 %, apart")


def test_the_input_with_the_largest_effect_comes_first() -> None:
    first, second, *_ = tee.sensitivity(study_of(everything())).groups[""]
    name = "gpt2-xl, h100, 4 devices, confidential, hop by hop"
    assert first == (name, "cpu_rate", "72.0", "24.0", "3.00 times")
    assert second[1] == "samples"


def test_each_switch_is_shown_alone_and_all_together() -> None:
    figure = drawn(tee.switches(study_of(everything())))
    assert list(figure.numbers) == [
        "confidential, hop by hop", "direct channel", "parallel authentication", "overlap", "all three",
    ]  # fmt: skip
    assert all(len(points) == 3 for points in figure.numbers.values())


def test_a_study_of_both_has_two_pages_that_know_of_each_other(tmp_path: Path) -> None:
    both = report_samples.cell("gloo", 1.0, {"ringfence": 1.1}, operation="all_reduce", size=4096)
    folder = write_study(tmp_path / "study", both + tee_cell("tee", 0.001, {"confidential": 2.0}, model="gpt2"))
    done = write(folder, tmp_path / "report")
    assert [page.name for page in done.pages] == [PAGE, TEE_PAGE]
    first, second = (page.read_text() for page in done.pages)
    assert f'href="{TEE_PAGE}"' in first
    assert f'href="{PAGE}"' in second
    assert "confidential" not in first.split("</style>")[1]
    assert len(read(folder).cells) == 2


def test_a_study_of_tees_alone_has_their_page_only(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study", tee_cell("tee", 0.001, {"confidential": 2.0}, model="gpt2"))
    done = write(folder, tmp_path / "report")
    assert [page.name for page in done.pages] == [TEE_PAGE]
    assert not (tmp_path / "report" / PAGE).exists()


if __name__ == "__main__":
    SNAPSHOT.write_text(rendered())
