"""`ringfence record statement`, and what `ringfence audit` says of what it writes."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from model_signing import signing

from ringfence.record import envelope, signing_key
from ringfence.record.statement import Statement
from tests.cli.command import installation_without, ringfence, ringfence_here
from tests.unit import statement_samples as samples
from tests.unit.log_samples import Session
from tests.unit.record_samples import KEY

WRITTEN = f"""\
  subject  checkpoint/abababababababab
           {samples.ANCHOR}
Wrote run.json, signed with record.key (made for it; keep it to sign further
records), and the public key. To verify it:
  ringfence audit run.json --key run.pem
"""

SHOWN = """\
The record says: this is what a run made, and how.
  ringfenceCheckpoint  checkpoint/abababababababab
                       ANCHOR
  buildType     https://ringfence.github.io/ringfence/record/run/v1
  run           run-7
  script        train.py
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the logs of a run."""
    samples.write_logs(tmp_path / "logs")
    return tmp_path


@pytest.fixture
def written(folder: Path) -> Path:
    """The same with the statement and its public key."""
    assert ringfence_here("record", "statement", "logs", "-o", "run.json", folder=folder).returncode == 0
    return folder


def test_what_is_printed(folder: Path) -> None:
    done = ringfence_here("record", "statement", "logs", "-o", "run.json", folder=folder, COLUMNS="80")
    assert (done.returncode, done.stdout, done.stderr) == (0, WRITTEN, "")
    assert sorted(file.name for file in folder.iterdir()) == ["logs", "record.key", "run.json", "run.pem"]
    done = ringfence_here("audit", "run.json", "--key", "run.pem", folder=folder, COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout[done.stdout.index("The record says") :]
    assert said.startswith(SHOWN.replace("ANCHOR", samples.ANCHOR))
    for text in ("torch         2.13.0", "complete      False", "workers       2", f"ringfenceData  {samples.ROOT}"):
        assert f"  {text}\n" in said, said


@pytest.mark.real_start
def test_it_needs_neither_torch_nor_model_signing(folder: Path) -> None:
    python = installation_without(folder / "environment", "torch", "model_signing")
    done = ringfence("record", "statement", "logs", "-o", "run.json", folder=folder, python=python)
    assert (done.returncode, done.stderr) == (0, "")
    done = ringfence("audit", "run.json", "--key", "run.pem", "--json", folder=folder, python=python)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["verified"] is True and found["kind"] == "https://slsa.dev/provenance/v1"
    assert found["predicate"]["runDetails"]["metadata"]["invocationId"] == "run-7"
    done = ringfence("record", "statement", "logs", "-o", "b.json", "--model", "logs", folder=folder, python=python)
    assert (done.returncode, done.stdout) == (2, "")
    assert 'python -m pip install "model-signing>=1.1.1"' in " ".join(done.stderr.split())


def test_the_owners_key_signs_every_statement_of_a_run(folder: Path) -> None:
    """One at a checkpoint, and one when the run has gone on."""
    for name in ("first", "last"):
        done = ringfence_here("record", "statement", "logs", "-o", f"{name}.json", "--key", "k", folder=folder)
        assert done.returncode == 0
        Session("second").write(folder / "logs", 0, (*samples.CHECKPOINTS, samples.LEFT)) if name == "first" else None
    assert (folder / "first.pem").read_bytes() == (folder / "last.pem").read_bytes()
    counts = []
    for name in ("first", "last"):
        done = ringfence_here("audit", f"{name}.json", "--key", "first.pem", "--json", folder=folder)
        counts.append(len(json.loads(done.stdout)["predicate"]["runDetails"]["byproducts"]))
    assert counts == [2, 3]


def test_nothing_is_signed_of_a_log_that_was_changed(folder: Path) -> None:
    path = next((folder / "logs").glob("*-1.jsonl"))
    path.write_bytes(path.read_bytes().replace(samples.ANCHOR.encode(), samples.OLDER.encode()))
    done = ringfence_here("record", "statement", "logs", "-o", "run.json", folder=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"nothing was signed: {path.name} is refused: entry" in done.stderr
    assert not (folder / "run.json").exists() and not (folder / "run.pem").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("logs", "-o", "run.json"), 2, "run.json exists; a record is never overwritten"),
        (("logs", "-o", "statement"), 2, "is not a name for a record"),
        (("logs",), 2, "required: -o/--output"),
        (("nowhere", "-o", "new.json"), 2, "cannot read nowhere: No such file or directory"),
        (("logs/blobs", "-o", "new.json"), 1, "nothing was signed: there is no log in logs/blobs"),
        (("logs", "-o", "new.json", "--key", "run.pem"), 2, "run.pem is not a private key"),
        (("logs", "-o", "new.json", "--model", "nowhere"), 1, "nothing was signed: the model nowhere is refused"),
        (("logs", "-o", "new.json", "--model", "empty"), 1, "nothing was signed: the model empty has no file"),
        (("logs", "-o", "new.json", "--model", "linked"), 1, "nothing was signed: the model linked is refused"),
    ],
)
def test_what_is_refused(written: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    for name in ("empty", "linked"):
        (written / name).mkdir()
    (written / "linked/link").symlink_to("elsewhere")
    (written / "run.pem").chmod(0o600)
    done = ringfence_here("record", "statement", *arguments, folder=written)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr


@pytest.mark.promise("A record that was changed, or that the given key did not sign, is refused.")
def test_a_changed_statement_or_one_of_another_key_is_refused(written: Path) -> None:
    (written / "other.pem").write_bytes(signing_key.public_pem(KEY.public_key()))
    done = ringfence_here("audit", "run.json", "--key", "other.pem", folder=written)
    assert (done.returncode, done.stdout) == (1, "")
    assert "run.json is refused: the record was signed with another key" in done.stderr
    document = json.loads((written / "run.json").read_text())
    payload = base64.b64decode(document["payload"]).replace(b"run-7", b"run-8")
    document["payload"] = base64.b64encode(payload).decode()
    (written / "run.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    done = ringfence_here("audit", "run.json", "--key", "run.pem", folder=written)
    assert (done.returncode, done.stdout) == (1, "")
    assert "run.json is refused: the signature is wrong" in done.stderr


def test_a_statement_with_unknown_names_is_refused(folder: Path) -> None:
    """Its signer may be right; ringfence does not show a part of what was signed."""
    made = samples.statement(folder / "other")
    made.predicate["runDetails"]["note"] = "trust me"
    content = envelope.sign(Statement(made.subjects, made.kind, made.predicate).encode(), KEY)
    (folder / "run.json").write_bytes(content)
    (folder / "run.pem").write_bytes(signing_key.public_pem(KEY.public_key()))
    done = ringfence_here("audit", "run.json", "--key", "run.pem", folder=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the predicate: runDetails has an unknown field 'note'" in done.stderr


def test_a_model_has_the_digest_that_model_signing_signs(folder: Path) -> None:
    """Which `model_signing` itself says in a signature, whether that is in the folder of the model or not."""
    model = folder / "export"
    for name, content in {
        "model.safetensors": os.urandom(100),
        "config.json": b"{}",
        "part/b": b"",
        ".git/x": b"x",
    }.items():
        (model / name).parent.mkdir(exist_ok=True, parents=True)
        (model / name).write_bytes(content)
    key = ec.generate_private_key(ec.SECP256R1())
    (folder / "ec.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    signing.Config().use_elliptic_key_signer(private_key=folder / "ec.key").sign(model, model / "model.sig")
    bundle = json.loads((model / "model.sig").read_text())
    theirs = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))["subject"]
    done = ringfence_here("record", "statement", "logs", "-o", "run.json", "--model", "export", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    statement = json.loads(base64.b64decode(json.loads((folder / "run.json").read_text())["payload"]))
    assert statement["subject"][1:] == theirs
    assert theirs[0]["name"] == "export"
