"""What the record of a self-test says: device, versions, and the result of each check (spec/record.md, 3)."""

from __future__ import annotations

from typing import Final

from ringfence.errors import RecordError
from ringfence.keys import RECORD_SELFTEST
from ringfence.record import json_object
from ringfence.record.json_object import Json
from ringfence.record.statement import Statement, Subject

PASSED: Final = "passed"
STATES: Final = (PASSED, "failed", "skipped")
_PREDICATE: Final = {
    "began": str,
    "device": str,
    "workers": int,
    "quick": bool,
    "confidential": str,
    "environment": dict,
    "checks": dict,
    "passed": bool,
    "rates": dict,
}


def statement_of(predicate: Json, subjects: tuple[Subject, ...]) -> Statement:
    """Return what is signed of a self-test, which is what `parse` accepts. Raises RecordError."""
    made = Statement(subjects, RECORD_SELFTEST, predicate)
    parse(made)
    return made


def parse(statement: Statement) -> Json:
    """Return the predicate of a statement about a self-test, after checking it. Raises RecordError."""
    if statement.kind != RECORD_SELFTEST:
        raise RecordError("the statement is not about a self-test: a newer ringfence may be able to read it")
    found = json_object.fields(statement.predicate, _PREDICATE, "the predicate")
    for name, kind in (("environment", str), ("checks", str), ("rates", float)):
        for each in found[name].values():
            json_object.check_type(each, kind, f"a value in {name}")
    states = set(found["checks"].values())
    if not states or states - set(STATES):
        raise RecordError(f"the predicate has no check, or one that is not {', '.join(STATES)}")
    if found["passed"] != (states == {PASSED}):
        raise RecordError("whether the self-test passed contradicts its checks")
    return found


def verdict(predicate: Json) -> str:
    """Return the result in a few words, counted here."""
    states = list(predicate["checks"].values())
    passed = "PASSED" if predicate["passed"] else "FAILED"
    return f"{passed}: {states.count(PASSED)} of {len(states)} checks{', quick' if predicate['quick'] else ''}"
