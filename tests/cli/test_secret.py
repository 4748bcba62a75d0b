"""`ringfence secret new`: a fresh secret, for the owner's eyes only, never over an old one."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

from tests.cli.command import ringfence


def test_a_new_secret_is_64_hex_digits_that_only_the_owner_reads(tmp_path: Path) -> None:
    done = ringfence("secret", "new", "run.secret", folder=tmp_path)
    file = tmp_path / "run.secret"
    assert done.returncode == 0
    assert re.fullmatch(r"[0-9a-f]{64}\n", file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_secret_is_not_printed_and_the_next_step_is(tmp_path: Path) -> None:
    done = ringfence("secret", "new", "run.secret", folder=tmp_path)
    file = tmp_path / "run.secret"
    assert file.read_text().strip() not in done.stdout + done.stderr
    assert f"export RINGFENCE_SECRET_FILE={file}" in done.stdout


def test_json_names_the_file(tmp_path: Path) -> None:
    done = ringfence("secret", "new", "--json", "run.secret", folder=tmp_path)
    assert json.loads(done.stdout) == {"file": str(tmp_path / "run.secret")}


def test_two_secrets_differ(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert ringfence("secret", "new", name, folder=tmp_path).returncode == 0
    assert (tmp_path / "one").read_text() != (tmp_path / "two").read_text()


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "run.secret"
    file.write_text("precious")
    done = ringfence("secret", "new", "run.secret", folder=tmp_path)
    assert done.returncode == 2
    assert file.read_text() == "precious"
    assert "run.secret" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_dangling_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run.secret").symlink_to(tmp_path / "elsewhere")
    assert ringfence("secret", "new", "run.secret", folder=tmp_path).returncode == 2
    assert not (tmp_path / "elsewhere").exists()


def test_a_missing_folder_is_one_line_that_names_it(tmp_path: Path) -> None:
    done = ringfence("secret", "new", "no/such/folder/run.secret", folder=tmp_path)
    assert done.returncode == 2
    assert "no/such/folder" in done.stderr
    assert done.stderr.count("\n") == 1
