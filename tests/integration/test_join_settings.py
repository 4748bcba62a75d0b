"""Settings and the secret file: which values are accepted, and the errors for others."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ringfence.admission.entry import format_address
from ringfence.config.interfaces import parse_address
from ringfence.config.private_files import load_secret, new_secret_file
from ringfence.config.settings import Settings, inherited
from ringfence.errors import ConfigurationError
from ringfence.session import session
from ringfence.session.join.provers import policy_of

RANDOM = "8f1d6c0be25a47937de0fb1c6a9842d35be7103cf4a86e92d11f7ac508b36e4d"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    new_secret_file(path)
    return path


def settings(secret_file: Path, **environ: str) -> Settings:
    return Settings.from_environment({"RINGFENCE_SECRET_FILE": str(secret_file), **environ})


def write(path: Path, content: str, mode: int = 0o600) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


# -- the secret -----------------------------------------------------------------------------------------------------


def test_a_new_secret_is_private_random_and_loads(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        new_secret_file(tmp_path / "one")
        os.umask(0o777)
        new_secret_file(tmp_path / "two")
    finally:
        os.umask(previous)
    for name in ("one", "two"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        assert len((tmp_path / name).read_bytes()) == 65
    assert load_secret(tmp_path / "one") != load_secret(tmp_path / "two")


def test_a_secret_is_never_overwritten(secret_file: Path) -> None:
    before = secret_file.read_bytes()
    with pytest.raises(ConfigurationError, match="never overwritten"):
        new_secret_file(secret_file)
    assert secret_file.read_bytes() == before


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no/such: No such file"):
        new_secret_file(tmp_path / "no" / "such")


def test_without_a_secret_the_error_says_how_to_make_one() -> None:
    with pytest.raises(ConfigurationError, match=r"RINGFENCE_SECRET_FILE is not set.*`ringfence secret new FILE`"):
        Settings.from_environment({})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing: No such file.*`ringfence secret new FILE`"):
        load_secret(tmp_path / "nothing")


@pytest.mark.promise("A weak secret, or a secret file that other users can open or replace, is rejected.")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o601])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigurationError, match="chmod 600"):
        load_secret(write(tmp_path / "secret", RANDOM + "\n", mode))


@pytest.mark.promise("A weak secret, or a secret file that other users can open or replace, is rejected.")
def test_a_secret_of_another_user_is_refused_and_says_what_to_do(secret_file: Path) -> None:
    """Its owner could put another secret in its place."""
    os.chown(secret_file, 4242, -1)
    with pytest.raises(
        ConfigurationError, match=r"belongs to another user \(uid 4242\).*`chown \d+ .*`install -m 600`"
    ):
        load_secret(secret_file)
    os.chown(secret_file, os.geteuid(), -1)
    assert load_secret(secret_file)


@pytest.mark.parametrize(
    "content",
    [
        "",
        RANDOM,
        RANDOM[:-2] + "\n",
        RANDOM + "00\n",
        RANDOM.upper() + "\n",
        RANDOM + "\r\n",
        RANDOM + "\n\n",
        "correct horse\n",
    ],
    ids=["empty", "no newline", "short", "long", "upper case", "carriage return", "two newlines", "passphrase"],
)
def test_any_other_form_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a secret file"):
        load_secret(write(tmp_path / "secret", content))


@pytest.mark.promise("A weak secret, or a secret file that other users can open or replace, is rejected.")
@pytest.mark.parametrize(
    "material",
    [
        bytes(32),
        b"\xff" * 32,
        bytes(range(32)),
        bytes(range(0, 64, 2)),
        bytes(range(255, 223, -1)),
        b"\x01\x80" * 16,
        b"correct horse battery staple 123",
    ],
    ids=["zeros", "ones", "counting", "counting by two", "counting down", "two bytes", "passphrase in hexadecimal"],
)
def test_a_secret_that_is_not_random_is_refused(tmp_path: Path, material: bytes) -> None:
    with pytest.raises(ConfigurationError, match="not drawn at random"):
        load_secret(write(tmp_path / "secret", material.hex() + "\n"))


def test_a_directory_is_refused_as_a_secret(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigurationError):
        load_secret(tmp_path)


def test_settings_show_no_secret(secret_file: Path) -> None:
    assert secret_file.read_text().strip() not in repr(settings(secret_file))


# -- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("A misspelt setting is rejected, and the error suggests the right name.")
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("RINGFENCE_POLICY_FILE", "RINGFENCE_POLICY"),
        ("RINGFENCE_POLCY", "RINGFENCE_POLICY"),
        ("RINGFENCE_SECRET", "RINGFENCE_SECRET_FILE"),
        ("RINGFENCE_CERT_FILE", "RINGFENCE_CERTIFICATE_FILE"),
        ("RINGFENCE_PORT", "RINGFENCE_PORTS"),
        ("RINGFENCE_RUNID", "RINGFENCE_RUN_ID"),
        ("RINGFENSE_POLICY", "RINGFENCE_POLICY"),
        ("RINGFENC_POLICY", "RINGFENCE_POLICY"),
        ("RING_FENCE_POLICY", "RINGFENCE_POLICY"),
        ("RINGFENCEPOLICY", "RINGFENCE_POLICY"),
        ("ringfence_policy", "RINGFENCE_POLICY"),
    ],
)
def test_a_misspelt_setting_is_refused_naming_the_nearest_one(secret_file: Path, name: str, nearest: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name} is set.*did you mean {nearest}\?"):
        settings(secret_file, **{name: "/etc/policy.toml"})
    with pytest.raises(ConfigurationError, match=name):
        settings(secret_file, **{name: ""})


@pytest.mark.parametrize("name", ["FENCE_POLICY", "INFERENCE_POLICY", "REFERENCE_FILE", "RING_SIZE", "STRING", "_"])
def test_other_programs_settings_are_left_alone(secret_file: Path, name: str) -> None:
    settings(secret_file, **{name: "/etc/policy.toml"})


def test_a_child_process_inherits_the_data_plane_setting_only() -> None:
    ours = {"RINGFENCE_POLICY": "p", "RINGFENCE_SECRET_FILE": "s", "RINGFENCE_POLCY": "x"}
    others = {"PATH": "/bin", "RINGFENCE_DATAPLANE": "python"}
    assert inherited({**ours, **others}) == others


def test_run_and_generation_default_to_torchruns(secret_file: Path) -> None:
    nothing = settings(secret_file)
    assert (nothing.run_id, nothing.generation) == ("none", "0")
    elastic = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}
    theirs = settings(secret_file, **elastic)
    assert (theirs.run_id, theirs.generation) == ("job", "2")
    ours = settings(secret_file, **elastic, RINGFENCE_RUN_ID="mine", RINGFENCE_GENERATION="r5")
    assert (ours.run_id, ours.generation) == ("mine", "r5.2"), "torchrun's restarts are counted on top of a scheduler's"
    first = settings(secret_file, TORCHELASTIC_RESTART_COUNT="0", RINGFENCE_GENERATION="r5")
    assert first.generation == "r5"
    launched = settings(secret_file, **elastic, RINGFENCE_GENERATION="0f.1", RINGFENCE_AGENT="/run/agent")
    assert launched.generation == "0f.1", "the restart counts of nodes differ"


@pytest.mark.parametrize(("name", "value"), [("RINGFENCE_RUN_ID", "x" * 129), ("RINGFENCE_GENERATION", "line\nbreak")])
def test_names_are_short_and_printable(secret_file: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        settings(secret_file, **{name: value})


def test_the_interface_by_address_name_or_master(secret_file: Path) -> None:
    assert settings(secret_file).host == "127.0.0.1"
    assert settings(secret_file, RINGFENCE_INTERFACE="127.0.0.5").host == "127.0.0.5"
    assert settings(secret_file, RINGFENCE_INTERFACE="::1").host == "::1"
    assert settings(secret_file, RINGFENCE_INTERFACE="lo").host == "127.0.0.1"
    assert settings(secret_file, MASTER_ADDR="127.0.0.1").host == "127.0.0.1"
    assert settings(secret_file, MASTER_ADDR="::1").host == "::1"


def test_without_a_master_the_stores_host_selects_the_interface(secret_file: Path) -> None:
    environ = {"RINGFENCE_SECRET_FILE": str(secret_file)}
    assert Settings.from_environment(environ, "::1").host == "::1"
    assert Settings.from_environment({**environ, "MASTER_ADDR": "127.0.0.1"}, "::1").host == "127.0.0.1"
    with pytest.raises(
        ConfigurationError, match=r"the store's host, nowhere\.invalid, cannot be resolved.*RINGFENCE_INTERFACE"
    ):
        Settings.from_environment(environ, "nowhere.invalid")


def test_a_master_that_cannot_be_resolved_is_an_error(secret_file: Path) -> None:
    lost = {"MASTER_ADDR": "nowhere.invalid", "WORLD_SIZE": "4"}
    for elsewhere in ({}, {"LOCAL_WORLD_SIZE": "2"}):
        with pytest.raises(
            ConfigurationError, match=r"MASTER_ADDR, nowhere\.invalid, cannot be resolved.*RINGFENCE_INTERFACE"
        ):
            settings(secret_file, **lost, **elsewhere)
    assert settings(secret_file, **lost, RINGFENCE_INTERFACE="lo").host == "127.0.0.1"
    assert settings(secret_file, **lost, LOCAL_WORLD_SIZE="4").host == "127.0.0.1", "all workers are on this machine"


@pytest.mark.parametrize(
    ("host", "advertise", "here", "warned"),
    [
        ("127.0.0.1", None, "2", True),
        ("::1", None, "2", True),
        ("127.0.0.1", None, "4", False),
        ("127.0.0.1", None, None, False),
        ("127.0.0.1", ("gateway.example", 4000), "2", False),
        ("192.0.2.1", None, "2", False),
    ],
)
def test_a_loopback_is_reported_if_workers_are_on_other_machines(
    host: str,
    advertise: tuple[str, int] | None,
    here: str | None,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    session._warn_of_loopback(Settings(host=host, advertise=advertise), 4)
    assert (f"listens on {host}" in caplog.text and "set RINGFENCE_INTERFACE" in caplog.text) == warned


def test_an_unknown_interface_is_refused_naming_the_others(secret_file: Path) -> None:
    name = socket.if_nameindex()[0][1]
    with pytest.raises(ConfigurationError, match=f"neither an address nor an interface.*{name}"):
        settings(secret_file, RINGFENCE_INTERFACE="nope0")


def test_listening_on_all_interfaces_needs_an_advertised_address(secret_file: Path) -> None:
    with pytest.raises(ConfigurationError, match="peers cannot dial that"):
        settings(secret_file, RINGFENCE_INTERFACE="0.0.0.0")
    chosen = settings(secret_file, RINGFENCE_INTERFACE="0.0.0.0", RINGFENCE_ADVERTISE="gateway.example:4000")
    assert chosen.link_address(("0.0.0.0", 20000)) == ("gateway.example", 4000)
    assert chosen.admission_address(("0.0.0.0", 20001)) == ("gateway.example", 20001)


def test_the_bound_address_is_advertised_by_default(secret_file: Path) -> None:
    assert settings(secret_file).link_address(("127.0.0.1", 5)) == ("127.0.0.1", 5)
    assert settings(secret_file).admission_address(("127.0.0.1", 5)) == ("127.0.0.1", 5)


def test_a_range_of_ports(secret_file: Path) -> None:
    assert settings(secret_file).ports is None
    assert settings(secret_file, RINGFENCE_PORTS="20000-20100").ports == range(20000, 20101)
    assert settings(secret_file, RINGFENCE_PORTS="20000").ports == range(20000, 20001)
    for wrong in ("0-5", "9-8", "1-65536", "a-b", "1-", "-1", "1,2", "٣-٤"):
        with pytest.raises(ConfigurationError, match="RINGFENCE_PORTS"):
            settings(secret_file, RINGFENCE_PORTS=wrong)


def test_timeouts_are_numbers_of_seconds(secret_file: Path) -> None:
    by_default = settings(secret_file)
    assert (by_default.join_timeout, by_default.outage) == (300, 300)
    given = settings(secret_file, RINGFENCE_JOIN_TIMEOUT="60", RINGFENCE_OUTAGE_TIMEOUT="2.5")
    assert (given.join_timeout, given.outage) == (60, 2.5)


@pytest.mark.parametrize("wrong", ["0", "0.9", "86401", "-5", "5 min", "1e3", "inf", "nan", "٣٠"])
def test_a_timeout_outside_its_limits_is_refused(secret_file: Path, wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=r"RINGFENCE_JOIN_TIMEOUT=.* from 1 to 86400"):
        settings(secret_file, RINGFENCE_JOIN_TIMEOUT=wrong)
    with pytest.raises(ConfigurationError, match=r"RINGFENCE_OUTAGE_TIMEOUT=.* from 2 to 86400"):
        settings(secret_file, RINGFENCE_OUTAGE_TIMEOUT=wrong)


@pytest.mark.parametrize(
    ("variable", "policy", "applies"),
    [("", "", "shared"), ("sealed", "", "sealed"), ("shared", "sealed", "sealed"), ("sealed", "shared", "sealed")],
)
def test_the_variable_can_add_sealing_inside_a_machine_and_not_remove_it(
    secret_file: Path, tmp_path: Path, variable: str, policy: str, applies: str
) -> None:
    environ = {"RINGFENCE_SAME_HOST": variable} if variable else {}
    if policy:
        (tmp_path / "policy.toml").write_text(f'version = 1\nsame_host = "{policy}"\n[[admit]]\n[admit.secret]\n')
        environ["RINGFENCE_POLICY"] = str(tmp_path / "policy.toml")
    assert policy_of(settings(secret_file, **environ))[0].same_host == applies


def test_another_value_for_the_inside_of_a_machine_is_refused(secret_file: Path) -> None:
    with pytest.raises(ConfigurationError, match="RINGFENCE_SAME_HOST is 'plain'; it may be shared or sealed"):
        settings(secret_file, RINGFENCE_SAME_HOST="plain")


def test_the_folder_of_a_record_is_absolute(secret_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may change its working directory before it creates its process group."""
    monkeypatch.chdir(tmp_path)
    assert settings(secret_file, RINGFENCE_RECORD="record").record == tmp_path / "record"
    assert settings(secret_file, RINGFENCE_RECORD="").record is None
    assert settings(secret_file).record is None


def test_addresses() -> None:
    for address in (("10.0.0.1", 1), ("::1", 65535), ("host.example", 80)):
        assert parse_address(format_address(address), "x") == address
    for wrong in (
        "",
        ":1",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:1x",
        "a b:1",
        "h\n:1",
        "h" * 256 + ":1",
        "[[h]]:1",
        "[h:1",
        "h]:1",
    ):
        with pytest.raises(ConfigurationError, match="write host:port"):
            parse_address(wrong, "x")
