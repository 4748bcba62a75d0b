"""What both verifiers find of a changed record: the package's, and tests/second_verifier.py, which shares no code with it.

`python -m tests.attack.record_verifiers 50000 --seed 1` makes as many changes, and prints how many of each kind there were.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ringfence.record import claims, folder
from ringfence.record.claims import REFUTED, SHOWN, Record, Verdict
from ringfence.record.folder import CUT, REFUSED
from tests import second_verifier
from tests.attack.record_changes import CHANGES, LIES, LINE_CHANGES, Change, Sample
from tests.unit import run_samples

EVALUATED = {
    "every log is genuine": "genuine",
    "both ends of every connection agree on what passed": "agree",
    "the run is run-7": "run",
    "complete": "complete",
    "only this code ran": "code",
    "only these data were used": "data",
    "nothing left a machine unsealed": "sealed",
    "these checkpoints descend from the run": "checkpoints",
}
NAMED = re.compile(r"session [0-9a-f]{16}|[0-9a-f]{16}-[0-9]+\.jsonl|the logs are of 2 runs")
CLAIMS = claims.read(run_samples.CLAIMS.encode(), "claims.toml")
ASKED = {
    name: {value} if isinstance(value, str) else set(value)
    for name, value in tomllib.loads(run_samples.CLAIMS).items()
    if value is not True
}
EVERY = 20  # of the changes for which a log is refused, one is evaluated as a whole
OFTEN = 20  # changes of lines, of which there are many different ones, for each other change


@contextmanager
def changed(path: Path, change: Change, originals: Mapping[str, bytes]) -> Iterator[None]:
    """Change files of a folder in place, and restore them."""
    for name, content in change.items():
        (path / name).unlink(missing_ok=True)
        if content is not None:
            (path / name).write_bytes(content)
    try:
        yield
    finally:
        for name in change:
            (path / name).unlink(missing_ok=True)
            if name in originals:
                (path / name).write_bytes(originals[name])


def refused_alone(sample: Sample, change: Change) -> bool:
    """Whether a log that a change touches is refused. Both verifiers read those logs, and no others."""
    touched = {name: content for name, content in change.items() if name.endswith(".jsonl")}
    with changed(sample.scratch, touched, {}):
        states = folder.audit(sample.scratch) if any(each is not None for each in touched.values()) else []
        refused = {each.name: each.reason for each in states if each.state == REFUSED}
        second, _ = second_verifier.verify(sample.scratch, ASKED)
    assert refused.keys() == second.keys(), (refused, second)
    for reason in refused.values():
        assert re.search("^entry [0-9]+: |nothing in it is signed|name", reason), reason
    return bool(refused)


def evaluate(path: Path) -> tuple[Record, dict[str, Verdict]]:
    """Evaluate a record by both verifiers, which must find the same."""
    record = Record.read(path)
    verdicts = {each.claim.partition(":")[0]: each for each in claims.evaluate(record, CLAIMS)}
    found = {EVALUATED[claim]: verdict.state for claim, verdict in verdicts.items() if claim in EVALUATED}
    refused = {each.name: each.reason for each in record.states if each.state == REFUSED}
    second, states = second_verifier.verify(path, ASKED)
    assert refused.keys() == second.keys(), (refused, second)
    assert found == states, (
        {each: (found[each], states[each]) for each in found if found[each] != states[each]},
        second,
    )
    return record, verdicts


def check_change(sample: Sample, kind: str, change: Change, is_evaluated: bool) -> None:
    """Check that a changed record is refused or shows less, and that both verifiers find the same."""
    if all(name.endswith(".jsonl") for name in change) and refused_alone(sample, change) and not is_evaluated:
        return
    with changed(sample.path, change, sample.files):
        record, verdicts = evaluate(sample.path)
    logs = {each.name: each for each in record.states}
    if kind == "append_tail":  # what follows the last signature says nothing
        assert {each.state for each in verdicts.values()} == {SHOWN}
        assert [logs[name].state for name in change] == [CUT]
        return
    failed = [each for each in verdicts.values() if each.state != SHOWN]
    assert failed, "everything is shown"
    assert any(NAMED.search(reason) for each in failed for reason in each.reasons), failed
    if kind in ("cut_at_signature", "remove_log", "leave_session_out"):
        assert verdicts["complete"].state == REFUTED
        assert all(logs[name].state == CUT for name, content in change.items() if content is not None)
        assert not any(each.state == REFUSED for each in record.states)


def check_lie(sample: Sample, change: Change) -> None:
    """Check that both verifiers find the same where a worker, which has its key, recorded something else."""
    with changed(sample.path, change, sample.files):
        evaluate(sample.path)


def run(
    path: Path, count: int, seed: int, kinds: Sequence[str] = (), say: Callable[[str], None] = lambda text: None
) -> Counter[str]:
    """Make so many changes, one at a time, of all kinds or of some, and return how many of each kind there were."""
    sample, chance = Sample.write(path), random.Random(seed)
    _, verdicts = evaluate(sample.path)
    assert {each.state for each in verdicts.values()} == {SHOWN}
    done: Counter[str] = Counter()
    began = time.monotonic()
    kinds = kinds or [*CHANGES, *LIES]
    weights = [OFTEN if kind in LINE_CHANGES else 1 for kind in kinds]
    while (number := done.total()) < count:
        (kind,) = chance.choices(kinds, weights)
        change = (CHANGES | LIES)[kind](sample, chance)
        if all(sample.files.get(name) == content for name, content in change.items()):
            continue
        try:
            if kind in LIES:
                check_lie(sample, change)
            else:
                check_change(sample, kind, change, number % EVERY == 0)
        except AssertionError as error:
            error.add_note(f"change {number} of seed {seed}: {kind} of {', '.join(change)}")
            raise
        done[kind] += 1
        if (number + 1) % 1000 == 0:
            say(f"seed {seed}: {number + 1:,} of {count:,} changes, {time.monotonic() - began:.0f} s")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.attack.record_verifiers", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        done = run(Path(path), arguments.count, arguments.seed, say=lambda text: print(text, flush=True))
    for kind, number in sorted(done.items()):
        print(f"{kind:26} {number:,}")


if __name__ == "__main__":
    main()
