"""The run name of a session's members: distinct for distinct members, groups and runs, and short enough for an entry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ringfence.admission.entry import RUN_ID_BYTES
from ringfence.session.members import Members

RUN_IDS = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=RUN_ID_BYTES)
RANKS = st.sets(st.integers(0, (1 << 20) - 1), min_size=1, max_size=8).map(lambda ranks: tuple(sorted(ranks)))
CASES = st.tuples(RUN_IDS, RANKS, st.text(max_size=20))


@given(CASES, CASES)
def test_names_are_equal_only_for_equal_members(
    one: tuple[str, tuple[int, ...], str], two: tuple[str, tuple[int, ...], str]
) -> None:
    names = [Members(ranks, group).run_name(run_id) for run_id, ranks, group in (one, two)]
    assert (names[0] == names[1]) == (one == two)
    assert all(len(name) <= RUN_ID_BYTES and name.isascii() and name.isprintable() for name in names)


def test_long_run_ids_with_a_common_beginning_have_different_names() -> None:
    members = Members((1, 3), "2")
    assert members.run_name("a" * 127 + "b") != members.run_name("a" * 127 + "c")


def test_many_ranks_are_abbreviated() -> None:
    assert str(Members((1, 3), "2")) == "ranks 1, 3"
    assert str(Members(tuple(range(100)), "2")).endswith("14, 15, ...")


def test_files_of_two_sessions_of_a_worker_differ() -> None:
    labels = {Members(ranks, "2").file_label(0, "run") for ranks in ((1, 3), (1, 2))}
    assert len(labels) == 2 and all(label.startswith("1-") for label in labels)
