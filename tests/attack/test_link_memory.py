"""Attacks on the links of clusters in memory: none delivers a wrong result, and none hangs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from ringfence.link.frames import Type
from ringfence.link.seal import Opener
from ringfence.runtime.engine import Engine
from tests.attack.attacker import Attack, AttackPlan
from tests.attack.attacks import ATTACKS, flip_a_bit, truncate
from tests.attack.memory_attacks import PASS, SEGMENT, Outcome, Scenario, run_trial, small_segments
from tests.attack.trials import KINDS
from tests.attack.wire_messages import Kind

TRIALS = 500
ALL_TRIALS = 100_000
SCENARIOS = 150


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch)


@cache
def scenario(number: int, covers: bool = False) -> Scenario:
    return replace(Scenario.draw(Random(number)), covers=covers)


@cache
def clean(number: int, seed: int, session: int = 0, covers: bool = False) -> Outcome:
    """The same scenario without an attack: its number of messages, and what an attacker may have recorded."""
    return run_trial(scenario(number, covers), seed, session=session)


def attacked(trial: int, attacks: tuple[Attack, ...] = ATTACKS, covers: bool = False) -> tuple[Attack, Outcome]:
    """Run one trial, which its number determines completely."""
    random = Random(f"trial {trial}")
    number, attack = random.randrange(SCENARIOS), random.choice(attacks)
    here, there = clean(number, seed=1, covers=covers), clean(number, seed=2, session=1, covers=covers)
    plan = AttackPlan(attack, random.randrange(here.message_count), random, here.recording, there.recording)
    return attack, run_trial(scenario(number, covers), 2, plan)


COVERS = pytest.mark.parametrize("covers", [False, True], ids=["by the origin", "by every hop"])


@COVERS
def test_every_scenario_succeeds_without_an_attack(covers: bool) -> None:
    frames = Counter[Type]()
    kinds = Counter[int]()
    segments = set[int]()
    for number in range(SCENARIOS):
        outcome = clean(number, seed=1, covers=covers)
        assert (outcome.faults, outcome.errors) == ([], [])
        kinds.update(one.kind for one in scenario(number).calls)
        for messages in outcome.recording.values():
            headers = [message.header for message in messages if message.kind is Kind.FRAME]
            frames.update(Type(header.type) for header in headers)
            segments.update(header.segment for header in headers)
    assert set(kinds) == set(KINDS)
    assert {Type.HOP, Type.FORWARD, Type.OFFER, Type.WANT, Type.PAYLOAD} <= set(frames)
    assert {1, 2} <= segments and max(segments) >= PASS // SEGMENT  # several segments, several passes


@pytest.mark.promise("No attack on a link delivers a wrong result, leaves unauthenticated data in a tensor, or hangs.")
@pytest.mark.long
@pytest.mark.timeout(7200)
@COVERS
def test_no_attack_on_a_link_gives_a_wrong_result_or_hangs(
    covers: bool, full: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = Counter[tuple[str, str]]()
    trial = 0
    while counts.total() < (ALL_TRIALS if full else TRIALS):
        trial += 1
        attack, outcome = attacked(trial, covers=covers)
        assert not outcome.faults, f"trial {trial}, {attack.name}: {outcome.faults}"
        if outcome.attacked:
            counts[attack.name, outcome.label] += 1
    with capsys.disabled():
        print(f"\n{counts.total()} attacks on links in memory, no wrong result, no hang:\n{table(counts)}")
    assert {name for name, _ in counts} == {attack.name for attack in ATTACKS}


def table(counts: Counter[tuple[str, str]]) -> str:
    names, words = sorted({name for name, _ in counts}), sorted({word for _, word in counts})
    lines = [f"{'':32}" + "".join(f"{word:>24}" for word in words)]
    lines += [f"{name:32}" + "".join(f"{counts[name, word]:>24}" for word in words) for name in names]
    return "\n".join(lines)


def faults_of(attacks: tuple[Attack, ...], trials: int) -> list[str]:
    return [fault for trial in range(trials) for fault in attacked(trial, attacks)[1].faults]


# -- the checks can fail ----------------------------------------------------------------------------------------------


@pytest.mark.promise("The checks of these attacks detect wrong results, leftover data, hangs and unnoticed attacks.")
def test_the_checks_find_wrong_results_without_authentication(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_blindly(opener: Opener, header: bytes, sealed: memoryview, target: memoryview) -> None:
        keystream = opener._cipher.encrypt(opener._nonce(), bytes(len(target)), b"")
        target[:] = bytes(a ^ b for a, b in zip(sealed[: len(target)], keystream, strict=False))

    monkeypatch.setattr(Opener, "open_into", open_blindly)
    monkeypatch.setattr(Opener, "check", lambda *_: None)
    assert any("wrong result" in fault for fault in faults_of((Attack(flip_a_bit),), 150))


@pytest.mark.promise("The checks of these attacks detect wrong results, leftover data, hangs and unnoticed attacks.")
def test_the_checks_find_data_left_by_a_failed_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfence.link.seal.wipe", lambda target: None)
    assert any("left data behind" in fault for fault in faults_of((Attack(flip_a_bit),), 150))


@pytest.mark.promise("The checks of these attacks detect wrong results, leftover data, hangs and unnoticed attacks.")
def test_the_checks_find_an_undetected_attack() -> None:
    """An action that leaves the message as it is cannot be detected."""
    faults = faults_of((Attack(lambda attacker, wire, message: message.data),), 40)
    assert faults and set(faults) == {"no worker detected the attack on a frame"}


@pytest.mark.promise("The checks of these attacks detect wrong results, leftover data, hangs and unnoticed attacks.")
def test_the_checks_find_a_hang_without_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "expire", lambda engine: None)
    assert any("hangs" in fault for fault in faults_of((Attack(truncate),), 40))
