"""A lying store cannot mix workers of sessions that have different members, although run id, secret and size are equal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringfence.config.settings import Settings
from ringfence.session.join.parent import AddressBook
from ringfence.session.members import Members
from tests.integration.join_cluster import SECRET, Clock, World
from tests.limits import FAR
from tests.unit.admission_samples import worker

MINE = Members((0, 1), "3")
RUN = "run-7"


def settings(name: str) -> Settings:
    return Settings(SECRET, run_id=name, generation="3")


@pytest.mark.promise("Sessions of different sets of members, or of different groups, cannot be mixed up.")
@pytest.mark.parametrize(
    "name",
    [Members((0, 2), "3").run_name(RUN), Members((0, 1), "4").run_name(RUN), MINE.run_name("run-8"), RUN],
    ids=["other members", "another group", "another run", "the whole run"],
)
def test_a_store_cannot_mix_sessions_of_different_members(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, elsewhere = Clock(monkeypatch), World(2)
    elsewhere.start([0], {0: settings(name)})
    _, address = elsewhere.store.wait_for_address()
    world, own = World(2), MINE.run_name(RUN)
    AddressBook(world.store, replace(worker(0, 2).entry, run_id=own)).publish(address)
    world.start([1], {1: settings(own)})
    world.store.wait_for_lookups(2)  # the first attempt was refused
    clock.advance(FAR)
    error = world.error(1)
    assert f"run '{own}'" in error and f"run '{name}'" in error
    assert "did not form" in elsewhere.error(0)


def test_members_of_one_session_join() -> None:
    """The same, with equal names: what differs above is what keeps them apart."""
    with World(2) as world:
        world.start(range(2), dict.fromkeys(range(2), settings(MINE.run_name(RUN))))
        assert [member.world_size for member in world.members()] == [2, 2]
