"""Attacks between worker processes, whose links pass through a hostile relay."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.attack.attacker import Attack, AttackPlan, Recording
from tests.attack.attacks import ATTACKS, flip_a_bit
from tests.attack.forgery import EVERY_HOP
from tests.attack.relay import Relay
from tests.attack.relayed_worker import SECONDS, WorkerResult, probe, run_calls, train
from tests.limits import FAR, FAR_OUTAGE, HANG
from tests.pool import Pool, values

TRIALS = len(ATTACKS)  # each once
ALL_TRIALS = 300
WORLDS = (2, 3)
STEPS = 30  # of training


class Trials:
    """Groups behind the relay, and recordings of groups without an attack."""

    def __init__(self, pool: Pool, secret: Path, policy: dict[str, str]) -> None:
        self._pool = pool
        self._policy = policy
        other = {"RINGFENCE_RUN_ID": "another run", "RINGFENCE_SECRET_FILE": str(secret)}
        self._other_run = {world: self._without_attack(world, other) for world in WORLDS}
        self._before = {world: self._without_attack(world, {}) for world in WORLDS}

    def plan(self, number: int) -> tuple[AttackPlan, int]:
        """A trial, which its number determines except for the order in which processes send."""
        random = Random(f"trial {number}")
        world = random.choice(WORLDS)
        attack = ATTACKS[number % len(ATTACKS)]
        messages = sum(map(len, self._before[world].values()))
        return AttackPlan(
            attack, random.randrange(messages), random, self._other_run[world], self._before[world]
        ), world

    def run(self, plan: AttackPlan, world: int, extra: dict[str, str]) -> tuple[Relay, list[WorkerResult], list[str]]:
        """Return the relay, what each worker found, and the failure that each has learnt of in the end.

        A request under attack may end by its own short timeout. Without an attack none is near, and no other timeout ends a
        request: one that outlives its own hangs.
        """
        seconds = FAR if plan.attack is None or plan.attack.harmless else SECONDS
        with Relay(world, plan) as relay:
            environments = [
                {**environment, **FAR_OUTAGE, **self._policy, **extra} for environment in relay.environments()
            ]
            values(self._pool.join("ringfence", world, seconds=FAR, env=environments, renew=True))
            worker_results = values(self._pool.start(run_calls, world, (7, seconds)).wait(HANG))
            relay.stop_attacking()
            # What the attack left on a wire may be detected only now, and on one worker before the others.
            values(self._pool.start(probe, world).wait(HANG))
            return relay, worker_results, values(self._pool.start(probe, world).wait(HANG))

    def _without_attack(self, world: int, extra: dict[str, str]) -> Recording:
        """The control: through the relay without an attack, every call succeeds."""
        relay, worker_results, aware = self.run(AttackPlan(), world, extra)
        assert [(result.faults, result.error) for result in worker_results] == [([], "")] * world
        assert aware == [""] * world
        assert relay.message_count > 0
        return relay.recording()


@pytest.mark.promise("No attack on a link delivers a wrong result, leaves unauthenticated data in a tensor, or hangs.")
@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "policy", ["", pytest.param(EVERY_HOP, marks=pytest.mark.nightly)], ids=["by the origin", "by every hop"]
)
def test_no_attack_between_processes_gives_a_wrong_result_or_hangs(
    pool: Pool, policy: str, full: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With each kind of tag on what is forwarded."""
    (tmp_path / "policy.toml").write_text(policy)
    applied = {"RINGFENCE_POLICY": str(tmp_path / "policy.toml")} if policy else {}
    trials = Trials(pool, Pool.new_secret(tmp_path / "other-secret"), applied)
    counts = Counter[tuple[str, str]]()
    number = 0
    while counts.total() < (ALL_TRIALS if full else TRIALS):
        number += 1
        plan, world = trials.plan(number)
        relay, worker_results, aware = trials.run(plan, world, {})
        assert plan.attack is not None
        where = f"trial {number} in a world of {world}, {plan.attack.name}: {worker_results}, {aware}"
        assert not any(result.faults for result in worker_results), where
        failed = [result.error for result in worker_results if result.error]
        assert not (failed and plan.attack.harmless), where
        assert all(aware) or not (failed or any(aware)), where
        assert "MismatchError" not in failed, where
        assert all(aware) or not relay.must_be_detected, where
        if relay.attacked is not None:
            first = min(failed, key=lambda name: name == "AbortedError", default=next(filter(None, aware), "no effect"))
            counts[plan.attack.name, first] += 1
    with capsys.disabled():
        print(f"\n{counts.total()} attacks between processes, no wrong result, no hang:")
        for (name, outcome), count in sorted(counts.items()):
            print(f"  {name:32} {outcome:28} {count:4}")


def trained(pool: Pool, plan: AttackPlan) -> tuple[int, list[tuple[int, str]]]:
    """Return how many messages a short training took, and how it ended on each worker."""
    with Relay(2, plan) as relay:
        environments = [{**environment, **FAR_OUTAGE} for environment in relay.environments()]
        results = pool.check(train, 2, args=(STEPS,), env=environments, seconds=FAR, timeout=HANG, renew=True)
    return relay.message_count, results


@pytest.mark.promise("A flipped bit during training raises on every worker, and the error names the sender.")
def test_a_flipped_bit_in_training_raises_on_every_worker(pool: Pool) -> None:
    messages, results = trained(pool, AttackPlan())
    assert results == [(STEPS, "")] * 2
    _, results = trained(pool, AttackPlan(Attack(flip_a_bit), messages // 2, Random(1)))
    for step, message in results:
        assert 0 < step < STEPS
        assert "does not authenticate" in message
