"""The statement of a run: SLSA provenance, made from the verified logs of its workers (spec/record.md, 12)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from ringfence import keys
from ringfence.errors import RecordError
from ringfence.record import folder, json_object, statement
from ringfence.record.json_object import Json
from ringfence.record.log import Log, canonical
from ringfence.record.log_file import Blobs
from ringfence.record.statement import CHECKPOINT, DATA, SHA256, Statement, Subject

_RESOURCE: Final = {"name": str, "digest": dict}
_PREDICATE: Final = {
    "buildDefinition": {
        "buildType": str,
        "externalParameters": {"run": str, "code": [{"script": str, "digest": str, "arguments": str}]},
        "internalParameters": {"versions": [{"ringfence": str, "torch": str, "python": str}], "policies": [str]},
        "resolvedDependencies": [_RESOURCE],
    },
    "runDetails": {
        "builder": {"id": str},
        "metadata": {"invocationId": str, "startedOn": str, "finishedOn": str},
        "byproducts": [{**_RESOURCE, "annotations": {"bytes": int, "complete": bool, "workers": int}}],
    },
}


def statement_of(path: Path, models: Iterable[Subject]) -> Statement:
    """Return what is signed of a run whose logs are in a folder, and of models that were exported.

    Raises RecordError if a log is refused, if there are logs of several runs, or if there is nothing to make a statement of.
    """
    logs = _logs(path)
    begins = [each.begin.fields for each in logs.values()]
    (run,) = {each["run"] for each in begins}
    entries = [entry for each in logs.values() for entry in each.entries]
    code = [each.fields for each in entries if each.kind == "code"]
    checkpoints = [each.fields for each in entries if each.kind == "checkpoint"]
    written = {each["anchor"] for each in checkpoints if each["action"] == "written"}
    subjects = (*_resources("checkpoint", CHECKPOINT, written), *models)
    if not subjects:
        raise RecordError("no log says that a checkpoint was written: name the exported model with --model")
    dependencies = [
        *(Subject(*each) for each in sorted({(said["script"], SHA256, said["digest"]) for said in code}) if each[2]),
        *(Subject("packages", SHA256, each) for each in sorted({said["packages"] for said in code})),
        *_resources("checkpoint", CHECKPOINT, {each["anchor"] for each in checkpoints} - written),
        *_resources("data", DATA, {each.fields["root"] for each in entries if each.kind == "data"}),
    ]
    definition = {
        "buildType": keys.RECORD_RUN,
        "externalParameters": {
            "run": run,
            "code": _distinct({name: said[name] for name in ("script", "digest", "arguments")} for said in code),
        },
        "internalParameters": {
            "versions": _distinct(each["versions"] for each in begins),
            "policies": sorted({each["policy"] for each in begins}),
        },
        "resolvedDependencies": [each.as_json() for each in dependencies],
    }
    times = [each.at for each in entries]
    details = {
        "builder": {"id": keys.RECORD_BUILDER},
        "metadata": {"invocationId": run, "startedOn": _time(min(times)), "finishedOn": _time(max(times))},
        "byproducts": [_byproduct(name, each, Blobs(path)) for name, each in logs.items()],
    }
    made = Statement(subjects, keys.RECORD_PROVENANCE, {"buildDefinition": definition, "runDetails": details})
    parse(statement.parse(made.encode()))  # what is signed can be read
    return made


def parse(found: Statement) -> Json:
    """Return the predicate of a statement about a run, after checking it. Raises RecordError."""
    if found.kind != keys.RECORD_PROVENANCE:
        raise RecordError("the statement is not SLSA provenance: a newer ringfence may be able to read it")
    json_object.check_type(found.predicate, _PREDICATE, "the predicate")
    definition, details = found.predicate["buildDefinition"], found.predicate["runDetails"]
    if (definition["buildType"], details["builder"]["id"]) != (keys.RECORD_RUN, keys.RECORD_BUILDER):
        raise RecordError("the statement is not about a run of ringfence, or a newer ringfence made it")
    if definition["externalParameters"]["run"] != details["metadata"]["invocationId"]:
        raise RecordError("the predicate names two runs")
    for each in (*definition["resolvedDependencies"], *details["byproducts"]):
        statement.subject_of({name: each[name] for name in _RESOURCE})
    return found.predicate


def _logs(path: Path) -> dict[str, Log]:
    """Return the verified logs of a folder, by name."""
    found: dict[str, Log] = {}
    for each in folder.audit(path):
        if each.log is None:
            raise RecordError(f"{each.name} is refused: {each.reason}")
        found[each.name] = each.log
    if len({each.begin.fields["run"] for each in found.values()}) > 1:
        raise RecordError(
            f"{path} has logs of several runs: copy those of each run, and blobs, to a folder of their own"
        )
    return found


def _resources(kind: str, algorithm: str, digests: Iterable[str]) -> list[Subject]:
    return [Subject(f"{kind}/{each[:16]}", algorithm, each) for each in sorted(digests)]


def _distinct(values: Iterable[Json]) -> list[Json]:
    return [each for _, each in sorted({canonical(each): each for each in values}.items())]


def _byproduct(name: str, found: Log, blobs: Blobs) -> Json:
    """Return what is said of a log. How many workers its session had shows whether the logs of others are missing."""
    workers = int.from_bytes(blobs.get(found.begin.fields["listings"])[:4], "big")
    annotations = {"bytes": found.size, "complete": found.is_complete, "workers": workers}
    return {**Subject(name, SHA256, found.digest).as_json(), "annotations": annotations}


def _time(at: int) -> str:
    """Return a time in the form of RFC 3339. `log.parse` refuses those that no calendar has."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
