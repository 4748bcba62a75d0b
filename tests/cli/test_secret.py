"""`ringfence secret`: a fresh secret, for the owner's eyes only, never over an old one unless it is to be replaced."""

from __future__ import annotations

import json
import re
import shutil
import stat
from pathlib import Path

import pytest

from ringfence.config.private_files import load_secret
from ringfence.config.settings import Settings
from tests.cli.command import ringfence
from tests.integration.join_cluster import Clock, Warnings, World
from tests.limits import FAR


def test_a_new_secret_is_64_hex_digits_that_only_the_owner_reads(tmp_path: Path) -> None:
    done = ringfence("secret", "new", "run.secret", folder=tmp_path)
    file = tmp_path / "run.secret"
    assert done.returncode == 0
    assert re.fullmatch(r"[0-9a-f]{64}\n", file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_secret_is_never_printed(tmp_path: Path) -> None:
    done = ringfence("secret", "new", "run.secret", folder=tmp_path)
    file = tmp_path / "run.secret"
    assert file.read_text().strip() not in done.stdout + done.stderr
    assert f"export RINGFENCE_SECRET_FILE={file}" in done.stdout


def test_json_names_the_file(tmp_path: Path) -> None:
    done = ringfence("secret", "new", "--json", "run.secret", folder=tmp_path)
    found = json.loads(done.stdout)
    assert found["file"] == str(tmp_path / "run.secret")
    assert set(found) == {"file", "fingerprint"}


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


# -- check and rotate -------------------------------------------------------------------------------------------------


def fingerprint(folder: Path, name: str = "run.secret") -> str:
    done = ringfence("secret", "check", "--json", name, folder=folder)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["fingerprint"])


def test_equal_secrets_have_equal_fingerprints(tmp_path: Path) -> None:
    for name in ("one", "two"):
        ringfence("secret", "new", name, folder=tmp_path)
    shutil.copy2(tmp_path / "one", tmp_path / "copy")
    assert fingerprint(tmp_path, "one") == fingerprint(tmp_path, "copy") != fingerprint(tmp_path, "two")
    assert re.fullmatch(r"[0-9a-f]{16}", fingerprint(tmp_path, "one"))
    assert fingerprint(tmp_path, "one") not in (tmp_path / "one").read_text()


def test_check_refuses_a_file_that_workers_would_refuse(tmp_path: Path) -> None:
    ringfence("secret", "new", "run.secret", folder=tmp_path)
    (tmp_path / "run.secret").chmod(0o644)
    done = ringfence("secret", "check", "run.secret", folder=tmp_path)
    assert done.returncode == 2
    assert "chmod 600" in done.stderr


def test_rotation_replaces_the_secret_and_names_both_fingerprints(tmp_path: Path) -> None:
    ringfence("secret", "new", "run.secret", folder=tmp_path)
    file = tmp_path / "run.secret"
    content, old = file.read_text(), fingerprint(tmp_path)
    done = ringfence("secret", "rotate", "run.secret", folder=tmp_path)
    new = fingerprint(tmp_path)
    assert done.returncode == 0
    assert new != old
    assert old in done.stdout
    assert new in done.stdout
    assert content.strip() not in done.stdout
    assert file.read_text().strip() not in done.stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["run.secret"], "the old secret lies about"


def test_rotation_replaces_nothing_that_is_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "thesis.txt"
    file.write_text("precious")
    file.chmod(0o600)
    for name in ("thesis.txt", "missing"):
        assert ringfence("secret", "rotate", name, folder=tmp_path).returncode == 2
    assert file.read_text() == "precious"
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.txt"]


def test_rotation_goes_through_a_symbolic_link_to_the_file(tmp_path: Path) -> None:
    ringfence("secret", "new", "real", folder=tmp_path)
    (tmp_path / "link").symlink_to("real")
    before = fingerprint(tmp_path, "real")
    assert ringfence("secret", "rotate", "link", folder=tmp_path).returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert fingerprint(tmp_path, "real") == fingerprint(tmp_path, "link") != before


@pytest.mark.promise("Workers with the old and the new secret do not admit each other after a rotation.")
def test_a_rotated_secret_and_the_old_one_refuse_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guide says of the time in between: workers with different files do not form a run, and are told why."""
    ringfence("secret", "new", "run.secret", folder=tmp_path)
    old = load_secret(tmp_path / "run.secret")
    ringfence("secret", "rotate", "run.secret", folder=tmp_path)
    clock, world = Clock(monkeypatch), World(2)
    with Warnings() as warnings:
        world.start([0, 1], {0: Settings(old), 1: Settings(load_secret(tmp_path / "run.secret"))})
        warnings.wait_for(lambda texts: sum("shared secret" in text for text in texts) == 2)
    clock.advance(FAR)
    assert "does not have the shared secret" in world.error(1)
    assert "missing: rank 1" in world.error(0)


def test_the_commands_of_the_guide_run(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/secrets.md").read_text()
    commands = re.findall(r"^ringfence (.+)$", "\n".join(re.findall(r"```sh\n(.*?)```", guide, re.S)), re.M)
    assert [command.split()[1] for command in commands] == ["new", "check", "rotate"]
    for command in commands:
        assert ringfence(*command.split(), folder=tmp_path).returncode == 0


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 20])
def test_a_full_disk_leaves_no_partial_secret(tmp_path: Path, room: int) -> None:
    done = ringfence("secret", "new", "run.secret", folder=tmp_path, room=room)
    assert done.returncode == 2
    assert done.stderr == "ringfence: cannot write run.secret: File too large\n"
    assert not list(tmp_path.iterdir())
    assert ringfence("secret", "new", "run.secret", folder=tmp_path).returncode == 0


def test_a_full_disk_keeps_the_old_secret(tmp_path: Path) -> None:
    ringfence("secret", "new", "run.secret", folder=tmp_path)
    before = (tmp_path / "run.secret").read_text()
    done = ringfence("secret", "rotate", "run.secret", folder=tmp_path, room=20)
    assert done.returncode == 2
    assert done.stderr == f"ringfence: cannot replace {tmp_path / 'run.secret'}: File too large; it is unchanged\n"
    assert (tmp_path / "run.secret").read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["run.secret"]
