"""`ringfence.record_data` and `ringfence record statement`, with the logs of real workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringfence import record_data
from ringfence.config.private_files import new_secret_file
from ringfence.errors import RecordError
from tests.cli.command import ringfence
from tests.integration.test_record import entries, recorded, save_and_load, states, until
from tests.pool import Pool
from tests.unit.manifest_samples import FILES, write_folder


def use_data(place: str, key: str, manifest: str) -> tuple[str, str]:
    """Save a checkpoint of a run that uses data, and return the anchor and the root."""
    root = record_data(manifest)
    anchor = save_and_load(place, key)
    until(lambda: recorded("data"))
    return anchor, root


def test_data_are_recorded_and_a_statement_names_them(pool: Pool, tmp_path: Path) -> None:
    new_secret_file(tmp_path / "key")
    write_folder(tmp_path / "corpus", FILES)
    assert ringfence("record", "data", "corpus", folder=tmp_path).returncode == 0
    places = [str(tmp_path / name) for name in ("step-1", "key", "corpus.manifest")]
    with pool.fresh() as fresh:
        results = fresh.check(use_data, 2, args=places, env={"RINGFENCE_RECORD": str(tmp_path / "record")})
        fresh.leave()
        run_id = fresh.run_id
    ((anchor, root),) = set(results)
    for each in states(tmp_path / "record", size=2):
        assert entries(each)["data"] == {"root": root, "files": 6, "bytes": 13}
    done = ringfence("record", "statement", "record", "-o", "run.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = ringfence("audit", "run.json", "--key", "run.pem", "--json", folder=tmp_path)
    found = json.loads(done.stdout)
    assert [each["digest"] for each in found["subjects"]] == [anchor]
    definition, details = found["predicate"]["buildDefinition"], found["predicate"]["runDetails"]
    assert details["metadata"]["invocationId"] == run_id
    assert {"name": f"data/{root[:16]}", "digest": {"ringfenceData": root}} in definition["resolvedDependencies"]
    assert [each["annotations"]["complete"] for each in details["byproducts"]] == [True, True]


def test_data_without_a_record_are_only_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "corpus", FILES)
    assert ringfence("record", "data", "corpus", folder=tmp_path).returncode == 0
    assert len(record_data(tmp_path / "corpus.manifest")) == 64
    (tmp_path / "corpus.manifest").write_text("{}")
    with pytest.raises(RecordError, match="not that of a data manifest"):
        record_data(tmp_path / "corpus.manifest")
