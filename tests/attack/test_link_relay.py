"""The attacker between worker processes: groups of living workers are joined through a hostile relay, again and again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.attack.attacker import Attack, Recording, Strike
from tests.attack.attacks import ATTACKS, flip_a_bit
from tests.attack.relay import Relay
from tests.attack.relayed_worker import SECONDS, Verdict, once_more, play, train
from tests.pool import Pool, values

TRIALS = len(ATTACKS)  # each once
ALL_TRIALS = 300
WORLDS = (2, 3)
STEPS = 30  # of training
GRACE = 5.0  # beyond an operation's timeout, on a machine that is busy with other things


class Trials:
    """Worlds behind the relay, and what an attacker could record of untouched ones."""

    def __init__(self, pool: Pool, secret: Path) -> None:
        self._pool = pool
        other = {"RINGFENCE_RUN_ID": "another run", "RINGFENCE_SECRET_FILE": str(secret)}
        self._other_run = {world: self._untouched(world, other) for world in WORLDS}
        self._before = {world: self._untouched(world, {}) for world in WORLDS}

    def strike(self, number: int) -> tuple[Strike, int]:
        """A trial, determined by its number but for the order in which processes happen to send."""
        draw = Random(f"trial {number}")
        world = draw.choice(WORLDS)
        attack = ATTACKS[number % len(ATTACKS)]
        units = sum(map(len, self._before[world].values()))
        return Strike(attack, draw.randrange(units), draw, self._other_run[world], self._before[world]), world

    def play(self, strike: Strike, world: int, extra: dict[str, str]) -> tuple[Relay, list[Verdict], list[str]]:
        """What each worker found, and whether each has heard of a failure in the end."""
        with Relay(world, strike) as relay:
            environments = [{**environment, **extra} for environment in relay.environments()]
            values(self._pool.join("ringfence", world, seconds=30, env=environments, renew=True))
            verdicts = values(self._pool.start(play, world, (7,)).wait(timeout=60))
            relay.rest()
            # What the blow left on a wire may come to light only now, and on one worker before the others.
            values(self._pool.start(once_more, world).wait(timeout=30))
            return relay, verdicts, values(self._pool.start(once_more, world).wait(timeout=30))

    def _untouched(self, world: int, extra: dict[str, str]) -> Recording:
        """The control: through the relay, with nobody doing anything, all goes well."""
        relay, verdicts, aware = self.play(Strike(), world, extra)
        assert [(verdict.faults, verdict.error) for verdict in verdicts] == [([], "")] * world
        assert aware == [""] * world
        assert relay.units > 0
        return relay.recording()


@pytest.mark.promise("No attack on a link delivers a wrong result, leaves unauthenticated data in a tensor, or hangs.")
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_no_attack_between_processes_delivers_a_wrong_number_or_hangs(
    pool: Pool, full: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = Trials(pool, Pool.new_secret(tmp_path / "other-secret"))
    counts = Counter[tuple[str, str]]()
    number = 0
    while counts.total() < (ALL_TRIALS if full else TRIALS):
        number += 1
        strike, world = trials.strike(number)
        relay, verdicts, aware = trials.play(strike, world, {})
        assert strike.attack is not None
        where = f"trial {number} in a world of {world}, {strike.attack.name}: {verdicts}, {aware}"
        assert not any(verdict.faults for verdict in verdicts), where
        assert max(verdict.seconds for verdict in verdicts) < SECONDS + GRACE, where
        failed = [verdict.error for verdict in verdicts if verdict.error]
        assert not (failed and strike.attack.harmless), where
        assert all(aware) or not (failed or any(aware)), where
        assert "MismatchError" not in failed, where
        assert all(aware) or not relay.must_be_noticed, where
        if relay.struck:
            first = min(failed, key=lambda name: name == "AbortedError", default=next(filter(None, aware), "no effect"))
            counts[strike.attack.name, first] += 1
    with capsys.disabled():
        print(f"\n{counts.total()} attacks between processes, no wrong number, no hang:")
        for (name, outcome), count in sorted(counts.items()):
            print(f"  {name:32} {outcome:28} {count:4}")


def trained(pool: Pool, strike: Strike) -> tuple[int, list[tuple[int, str]]]:
    """How many units a short training took, and how it ended on each worker."""
    with Relay(2, strike) as relay:
        results = pool.check(train, 2, args=(STEPS,), env=relay.environments(), renew=True)
    return relay.units, results


@pytest.mark.promise("A flipped bit during training raises on every worker, and the error names the sender.")
def test_a_flipped_bit_in_training_raises_on_every_worker(pool: Pool) -> None:
    units, results = trained(pool, Strike())
    assert results == [(STEPS, "")] * 2
    _, results = trained(pool, Strike(Attack(flip_a_bit), units // 2, Random(1)))
    for step, message in results:
        assert 0 < step < STEPS
        assert "does not authenticate" in message
