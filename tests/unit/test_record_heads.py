"""The heads of previous logs: through a store that may be late, wrong or hostile."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest

from ringfence import keys
from ringfence.errors import RecordError
from ringfence.record import heads
from ringfence.record.json_object import Json
from ringfence.session.head_exchange import HeadExchange
from tests.integration.join_cluster import MemoryStore
from tests.limits import FAR
from tests.unit.flips import flips
from tests.unit.log_samples import Session

SESSION, OTHER = Session(size=3), Session("second", size=3)
HEADS = ["ab" * 32, "", "cd" * 32]


def statement(rank: int, session: Session = SESSION) -> bytes:
    return heads.state(session.join(rank), rank, HEADS[rank], session.record_key(rank))


def parsed(data: bytes, rank: int) -> Json:
    return heads.parse(data, rank, SESSION.roster, SESSION.listings)


def listed(*ranks: int) -> bytes:
    return heads.encode({rank: parsed(statement(rank), rank) for rank in ranks})


def test_a_head_is_accepted_from_the_worker_that_the_roster_lists() -> None:
    for rank in range(3):
        assert parsed(statement(rank), rank)["head"] == HEADS[rank]
    found = heads.decode(listed(0, 1, 2), SESSION.roster, SESSION.listings)
    assert {rank: said["head"] for rank, said in found.items()} == dict(enumerate(HEADS))


@pytest.mark.promise("Only the worker that the roster lists can have written a log in its name.")
def test_every_changed_bit_of_a_head_is_refused() -> None:
    genuine = json.loads(statement(0))
    for changed in flips(statement(0), every=False):
        try:
            found = parsed(changed, 0)
        except RecordError:
            continue
        assert found == genuine, "a head that its worker did not publish"


@pytest.mark.promise("Only the worker that the roster lists can have written a log in its name.")
def test_heads_of_other_workers_and_sessions_are_refused() -> None:
    for data in (statement(1), statement(0, OTHER)):
        with pytest.raises(RecordError):
            parsed(data, 0)
    own = json.loads(statement(0))
    for name in ("key", "certified", "signature", "tls_key", "head"):
        for other in (statement(1), statement(2), statement(0, OTHER)):
            value = json.loads(other)[name]
            if value != own[name]:
                with pytest.raises(RecordError):
                    parsed(json.dumps({**own, name: value}).encode(), 0)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b"\xff", b"x" * 5000, json.dumps({"rank": 0}).encode()],
)
def test_malformed_heads_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        parsed(data, 0)


def test_a_list_keeps_the_heads_that_are_right() -> None:
    entries = [json.loads(statement(rank)) for rank in range(3)]
    entries[1] = {**entries[1], "head": "ef" * 32}
    strange = [*entries, 7, None, {"rank": True}, {"rank": 99}, {"rank": -1}]
    found = heads.decode(json.dumps(strange).encode(), SESSION.roster, SESSION.listings)
    assert set(found) == {0, 2}
    for bad in (b"{}", b"7", b"", b"[" * 5000, b" " * 10_000):
        with pytest.raises(RecordError):
            heads.decode(bad, SESSION.roster, SESSION.listings)


class TestExchange:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keys, "RECORD_HEADS_SECONDS", 0.3)

    def run(self, store: MemoryStore, ranks: tuple[int, ...] = (0, 1, 2)) -> dict[int, dict[int, Json]]:
        found: dict[int, dict[int, Json]] = {}
        threads = [threading.Thread(target=self.part, args=(store, rank, found)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def part(self, store: MemoryStore, rank: int, found: dict[int, dict[int, Json]]) -> None:
        exchange = HeadExchange(store, SESSION.join(rank), rank, threading.Event())
        found[rank] = exchange.run(statement(rank))

    def test_all_workers_hold_the_same_list(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keys, "RECORD_HEADS_SECONDS", FAR)
        found = self.run(MemoryStore())
        assert [heads.encode(found[rank]) for rank in range(3)] == [listed(0, 1, 2)] * 3

    def test_a_worker_that_publishes_nothing_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rank 0 looks once, when the other one has published."""
        monkeypatch.setattr(keys, "RECORD_HEADS_SECONDS", FAR)
        published = threading.Event()

        class Store(MemoryStore):
            def set(self, key: str, value: str) -> None:
                super().set(key, value)
                published.set()

        store, stopped = Store(), threading.Event()
        stopped.set()
        found: dict[int, dict[int, Json]] = {}
        other = threading.Thread(target=self.part, args=(store, 2, found))
        other.start()
        assert published.wait(FAR)
        found[0] = HeadExchange(store, SESSION.join(0), 0, stopped).run(statement(0))
        other.join()
        assert set(found[0]) == set(found[2]) == {0, 2}

    def test_without_rank_0_nobody_waits_for_ever(self) -> None:
        assert self.run(MemoryStore(), ranks=(1, 2)) == {1: {}, 2: {}}

    def test_a_session_that_ends_stops_the_exchange(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keys, "RECORD_HEADS_SECONDS", 3600.0)
        stopped = threading.Event()
        stopped.set()
        for rank, expected in ((0, {0}), (1, set())):
            store = MemoryStore()
            assert set(HeadExchange(store, SESSION.join(rank), rank, stopped).run(statement(rank))) == expected

    @pytest.mark.parametrize(
        "change",
        [
            lambda key, value: "nonsense",
            lambda key, value: statement(0, OTHER).decode() if "/head/" in key else value,
            lambda key, value: value.replace("ab" * 32, "ef" * 32),
            lambda key, value: "[]" if key.endswith("/heads") else value,
        ],
    )
    def test_a_hostile_store_can_only_withhold(self, change: Callable[[str, str], str]) -> None:
        class Hostile(MemoryStore):
            def set(self, key: str, value: str) -> None:
                super().set(key, change(key, value))

        genuine = {rank: json.loads(statement(rank)) for rank in range(3)}
        for found in self.run(Hostile()).values():
            assert all(genuine[rank] == said for rank, said in found.items())

    def test_a_store_that_fails_costs_nothing(self) -> None:
        class Broken(MemoryStore):
            def check(self, keys: list[str]) -> bool:
                raise RuntimeError("the connection was closed")

        assert self.run(Broken()) == {0: {}, 1: {}, 2: {}}
