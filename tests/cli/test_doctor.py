"""`ringfence doctor`: what it finds is true, and each thing that is missing comes with its repair."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ringfence import keys
from ringfence.cli import doctor
from ringfence.cli.checks import configuration, device, hardware, software
from ringfence.cli.checks.check import Check, bad
from ringfence.config.private_files import load_secret
from ringfence.config.settings import Settings
from ringfence.errors import ConfigurationError
from tests import ports
from tests.cli.command import ringfence, unprivileged
from tests.limits import HANG
from tests.unit import token_mint


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    assert ringfence("secret", "new", "run.secret", folder=tmp_path).returncode == 0
    return tmp_path / "run.secret"


def findings(output: str) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(output)["checks"]}


def test_a_ready_machine_is_exit_code_0(secret: Path) -> None:
    done = ringfence("doctor", "--json", RINGFENCE_SECRET_FILE=str(secret))
    found = findings(done.stdout)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["ready"] is True
    assert found["torch"]["value"] == metadata.version("torch")
    assert found["backend"]["good"] is True
    assert found["group"]["good"] is True
    assert found["secret"]["value"] == str(secret)
    assert set(found["AES-256-GCM"]["value"]) == {"4096", str(keys.SEGMENT_BYTES)}
    assert f"{keys.SEGMENT_BYTES >> 10} KiB segments" in str(found["AES-256-GCM"]["text"])
    assert found["data plane"]["value"] == "compiled"
    assert found["settings"]["good"] is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RINGFENCE_POLICY", ""),
        ("RINGFENCE_POLICY_FILE", "policy.toml"),
        ("RINGFENCE_INTERFACE", "nope0"),
        ("RINGFENCE_PORTS", "abc"),
        ("RINGFENCE_ADVERTISE", "host"),
        ("RINGFENCE_JOIN_TIMEOUT", "soon"),
        ("RINGFENCE_OUTAGE_TIMEOUT", "1"),
        ("RINGFENCE_RUN_ID", "line\nbreak"),
        ("RINGFENCE_CERTIFICATE_FILE", "x"),
        ("RINGFENCE_VCEK_FILE", "x"),
        ("RINGFENCE_TOKEN_COMMAND", "'"),
    ],
)
def test_doctor_reports_the_error_that_a_worker_would_raise(secret: Path, name: str, value: str) -> None:
    environ = {"RINGFENCE_SECRET_FILE": str(secret), name: value}
    with pytest.raises(ConfigurationError) as refused:
        Settings.from_environment(environ)
    found = bad([*software.checks(environ), *configuration.checks(environ)])
    assert [check.text for check in found] == [str(refused.value)]
    assert found[0].fix


def test_settings_that_are_refused_are_exit_code_1(secret: Path) -> None:
    done = ringfence("doctor", RINGFENCE_SECRET_FILE=str(secret), RINGFENCE_POLICY_FILE="policy.toml")
    assert done.returncode == 1
    assert "did you mean RINGFENCE_POLICY?" in done.stdout
    assert "To repair:\n  change the environment as `settings` says" in done.stdout


def test_ports_that_are_used_up_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = configuration.settings({"RINGFENCE_PORTS": str(taken.getsockname()[1])})
    assert found.good is False
    assert "cannot listen on ports" in found.text


def test_one_port_is_too_few_for_a_worker_with_children(secret: Path) -> None:
    port = ports.port()
    done = ringfence("doctor", RINGFENCE_SECRET_FILE=str(secret), RINGFENCE_PORTS=str(port))
    assert done.returncode == 1, done.stdout
    assert f"cannot listen on ports {port}-{port} of 127.0.0.1: Address already in use" in done.stdout
    assert "a worker needs two ports: one for links, one for admission" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RINGFENCE_DATAPLANE", "fast", "it may be 'compiled' or 'python'"),
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1", "unset TORCH_DISTRIBUTED_USE_TORCHCOMMS"),
    ],
)
def test_what_a_backend_would_refuse_is_found(secret: Path, name: str, value: str, said: str) -> None:
    setting: dict[str, Any] = {name: value}
    done = ringfence("doctor", RINGFENCE_SECRET_FILE=str(secret), **setting)
    assert done.returncode == 1, done.stdout
    assert said in done.stdout


WITHOUT_COMPILER = """
import sys
sys.modules["ringfence.dataplane._core"] = None  # as where it was never built
from ringfence.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_doctor_fails_without_the_compiled_data_plane(secret: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER, "doctor", "--json"],
        env={**environment, "RINGFENCE_SECRET_FILE": str(secret)},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    found = findings(done.stdout)["data plane"]
    assert (done.returncode, found["value"], found["good"]) == (1, None, False)
    assert "install a C compiler and Python's headers" in str(found["text"])


def test_core_dumps_are_a_note(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    pattern = tmp_path / "proc/sys/kernel/core_pattern"
    pattern.write_text("core\n")
    before = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
        assert hardware.core_dumps(tmp_path) == Check("core dumps", "off", 0)
        pattern.write_text("|/usr/lib/keeper %P\n")
        assert "sent to |/usr/lib/keeper whatever the limit" in hardware.core_dumps(tmp_path).text
        pattern.unlink()
        resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
        found = hardware.core_dumps(tmp_path)
        assert (found.value, found.good) == (before[1], None)
        assert "`ulimit -c 0`" in found.text
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


def test_without_a_secret_it_says_how_to_make_one() -> None:
    done = ringfence("doctor")
    assert done.returncode == 1
    assert "RINGFENCE_SECRET_FILE is not set" in done.stdout
    assert "ringfence secret new" in done.stdout


def test_plugins_turned_off_are_found(secret: Path) -> None:
    done = ringfence("doctor", RINGFENCE_SECRET_FILE=str(secret), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 1
    assert "unset TORCH_DEVICE_BACKEND_AUTOLOAD" in done.stdout


def test_a_secret_that_others_can_read_is_found(secret: Path) -> None:
    secret.chmod(0o640)
    found = configuration.secret_file({"RINGFENCE_SECRET_FILE": str(secret)})
    assert found.good is False
    assert "0640" in found.text
    assert found.fix == f"chmod 600 {secret}"


def test_a_secret_that_is_none_is_found(secret: Path) -> None:
    secret.write_text("password\n")
    found = configuration.secret_file({"RINGFENCE_SECRET_FILE": str(secret)})
    assert found.good is False
    assert "password" not in found.text
    assert "ringfence secret new" in found.fix


def test_a_secret_file_that_is_not_there_is_found(tmp_path: Path) -> None:
    found = configuration.secret_file({"RINGFENCE_SECRET_FILE": str(tmp_path / "none")})
    assert found.good is False
    assert str(tmp_path / "none") in found.text


def test_the_fix_for_a_missing_secret_file_works(tmp_path: Path) -> None:
    found = configuration.secret_file({"RINGFENCE_SECRET_FILE": str(tmp_path / "run.secret")})
    assert repaired(found, tmp_path).good is True


@pytest.mark.parametrize("content", ["", "password\n"])
def test_the_fix_for_an_invalid_secret_keeps_the_old_file(secret: Path, content: str) -> None:
    secret.write_text(content)
    found = configuration.secret_file({"RINGFENCE_SECRET_FILE": str(secret)})
    assert repaired(found, secret.parent).good is True
    assert secret.with_name("run.secret.old").read_text() == content


def repaired(found: Check, folder: Path) -> Check:
    """What is found once the command was run that the repair ends with."""
    assert found.fix.startswith(
        f"copy the run's secret to {folder / 'run.secret'}, or make a new one for all workers: "
    )
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", found.fix.partition(": ")[2]], check=True, env=environment, timeout=HANG)
    return configuration.secret_file({"RINGFENCE_SECRET_FILE": str(folder / "run.secret")})


def test_an_unreadable_secret_is_not_replaced(secret: Path) -> None:
    """Other machines have the same one: with a new secret this worker would be refused."""
    secret.chmod(0)
    with unprivileged(secret.parent):
        user, found = os.geteuid(), configuration.secret_file({"RINGFENCE_SECRET_FILE": str(secret)})
        with pytest.raises(ConfigurationError) as refused:
            load_secret(secret)
    assert (found.good, found.text) == (False, f"{secret}: Permission denied")
    for said in (found.fix, str(refused.value)):
        assert f"chown {user} {secret} && chmod 600 {secret}" in said
        assert "secret new" not in said


def test_a_folder_is_no_secret_and_is_left_as_it_is(tmp_path: Path) -> None:
    found = configuration.secret_file({"RINGFENCE_SECRET_FILE": str(tmp_path)})
    assert (found.good, found.text) == (False, f"{tmp_path} is not a regular file")
    assert found.fix == "set RINGFENCE_SECRET_FILE to the secret file itself"
    with pytest.raises(ConfigurationError, match="Is a directory; name the file itself"):
        load_secret(tmp_path)


def test_cpu_flags_are_those_of_the_first_cpu(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu aes sse vaes\n\nprocessor\t: 1\n")
    assert hardware.cpu_flags(tmp_path).value == ["aes", "vaes"]
    (tmp_path / "proc/cpuinfo").write_text("Features\t: fp asimd\n")
    assert "slow" in hardware.cpu_flags(tmp_path).text


@pytest.mark.parametrize(
    ("device", "kind", "name"), [("tdx_guest", "tdx", "Intel TDX"), ("sev-guest", "snp", "AMD SEV-SNP")]
)
def test_it_says_which_tee_this_machine_is_a_guest_of(tmp_path: Path, device: str, kind: str, name: str) -> None:
    found = hardware.tee(tmp_path)
    assert (found.value, found.good) == (None, None)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    found = hardware.tee(tmp_path)
    assert (found.value, found.good) == (kind, None)
    assert f"{name} guest (/dev/{device})" in found.text
    assert "mount -t configfs" in found.fix
    (tmp_path / hardware.TSM).mkdir(parents=True)
    found = hardware.tee(tmp_path)
    assert (found.value, found.good) == (kind, True)


def test_it_says_what_a_tpm_may_be_good_for(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/tpmrm0").touch()
    found = hardware.tee(tmp_path)
    assert (found.value, found.good) == (None, None)
    assert "a TPM (/dev/tpmrm0): on Azure it can meet a policy that requires azure_snp or azure_tdx" in found.text


def test_with_a_policy_doctor_names_what_the_worker_presents(secret: Path) -> None:
    policy = secret.parent / "policy.toml"
    policy.write_text("version = 1\n[[admit]]\n[admit.secret]\n")
    environ = {"RINGFENCE_POLICY": str(policy), "RINGFENCE_SECRET_FILE": str(secret)}
    found = configuration.admission(environ)
    assert found.good is True
    assert "this worker presents shared secret" in found.text
    assert configuration.admission({"RINGFENCE_SECRET_FILE": str(secret)}).name == "secret"


def test_doctor_checks_whether_one_machine_can_be_proved(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = secret.parent / "policy.toml"
    policy.write_text('version = 1\ninside_machine = "gloo"\n[[admit]]\n[admit.secret]\n')
    environ = {"RINGFENCE_POLICY": str(policy), "RINGFENCE_SECRET_FILE": str(secret)}
    found = configuration.admission(environ)
    assert found.good is True and found.text.endswith("groups inside one machine may use gloo unsealed")
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    reason = configuration._inside_machine(["gloo"])
    assert reason.good is False and "it runs as user 65534" in reason.text and "remove inside_machine" in reason.fix
    assert configuration._inside_machine([]).good is True


@pytest.mark.parametrize(
    ("table", "reason"), [("[admit.secret]", "RINGFENCE_SECRET_FILE"), ("[admit.none]", "unknown key 'none'")]
)
def test_a_policy_that_this_worker_cannot_meet_is_found(tmp_path: Path, table: str, reason: str) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f"version = 1\n[[admit]]\n{table}\n")
    found = configuration.admission({"RINGFENCE_POLICY": str(policy)})
    assert found.good is False
    assert reason in found.text
    assert found.fix == f"ringfence policy check {policy}"


TOKENS = """
version = 1
[[admit]]
[admit.token]
issuer = "https://verifier.example"
keys = "keys.json"
claims = { ready = true }
"""


@pytest.mark.parametrize("mode", [None, 0o644, 0o755], ids=["missing", "not executable", "executable"])
def test_a_token_command_that_cannot_be_run_is_found(tmp_path: Path, mode: int | None) -> None:
    (tmp_path / "policy.toml").write_text(TOKENS)
    (tmp_path / "keys.json").write_bytes(token_mint.key_set(token_mint.ES256))
    command = tmp_path / "fetch-token"
    if mode is not None:
        command.touch(mode)
    environment = {
        "RINGFENCE_POLICY": str(tmp_path / "policy.toml"),
        "RINGFENCE_TOKEN_COMMAND": f"{command} --service verifier",
    }
    (found,) = [check for check in configuration.checks(environment) if check.name == "policy"]
    if mode == 0o755:
        assert found.good is True, found.text
        return
    assert found.good is False
    assert found.text.startswith(f"the token command {command} does not start: ")
    assert "RINGFENCE_TOKEN_COMMAND" in found.fix


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("2.13.0+cpu", ">=2.13", True),
        ("2.13", ">=2.13.0", True),
        ("2.12.1", ">=2.13", False),
        ("2.9", ">=2.13", False),
        ("3.0", ">=2.13", True),
        ("50.0.2", ">=50,<51", True),
        ("51.0.0", ">=50,<51", False),
        ("51", "<51,>=50", False),
        ("49.9", "<51,>=50", False),
    ],
)
def test_versions_are_compared_as_numbers(version: str, wanted: str, expected: bool) -> None:
    assert software.within(version, wanted) is expected


def test_every_version_that_is_asked_for_can_be_compared() -> None:
    for name in ("torch", "cryptography", "pyOpenSSL"):
        assert software.within(metadata.version(name), software.requirement(name))


def test_a_package_that_is_too_old_comes_with_its_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "49.1")
    found = software.package("cryptography")
    assert found.good is False
    assert found.fix == f'python -m pip install "cryptography{software.requirement("cryptography")}"'


@pytest.mark.parametrize(
    ("version", "good", "text"),
    [
        ("2.12.1", False, "2.12.1, but >=2.13 is needed"),
        ("2.13.1+cpu", True, "2.13.1+cpu"),
        ("2.15.3", True, "2.15.3"),
        ("2.16.0", True, "2.16.0 (newer than the releases that ringfence is tested with: 2.13 to 2.15)"),
    ],
)
def test_torch_is_too_old_tested_or_newer(monkeypatch: pytest.MonkeyPatch, version: str, good: bool, text: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    found = software.torch()
    assert found.good is good
    assert text == found.text
    assert found.fix == ("" if good else 'python -m pip install "torch>=2.13,<2.16"')


def test_a_missing_torch_comes_with_its_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = software.backend({})
    assert found.good is False
    assert found.fix == 'python -m pip install "torch>=2.13,<2.16"'


def test_doctor_runs_without_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert software.openssl().value is None
    assert hardware.throughput().value is None


def test_the_sealing_rate_is_bytes_over_time() -> None:
    ticks = iter(range(1_000))
    assert hardware.sealing_rate(1 << 20, seconds=3, clock=lambda: float(next(ticks))) == pytest.approx((1 << 20) / 1e9)


def test_the_text_lists_repairs_only_for_what_is_bad() -> None:
    text = doctor.as_text(
        [
            Check("one", "fine", 1, True, "never shown"),
            Check("two", "a fact", 2, None, "never shown"),
            Check("three", "broken", 3, False, "repair three"),
        ]
    )
    assert "repair three" in text
    assert "never shown" not in text


def test_the_real_machine_has_cores(tmp_path: Path) -> None:
    assert hardware.cores(tmp_path).value == len(os.sched_getaffinity(0))


ON_A_DEVICE = """
import json, sys
from dataclasses import asdict
from ringfence.cli.checks import device
from ringfence_lab import accelerator
accelerator.load()
found = {}
for on in (False, True):
    accelerator.confidential(on)
    found[str(on)] = {check.name: asdict(check) for check in device.checks()}
print(json.dumps(found))
"""


def test_an_accelerator_is_reported_with_pinned_memory_and_its_mode() -> None:
    done = subprocess.run([sys.executable, "-c", ON_A_DEVICE], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for on in ("False", "True"):
        assert found[on]["device"]["good"] is True
        assert found[on]["device"]["text"].startswith("2 x sim; collectives stage its tensors through host memory.")
    assert found["False"]["pinned memory"]["value"] is True
    assert found["False"]["confidential"]["value"] == "no"
    assert found["True"]["pinned memory"]["value"] is False
    assert "as in confidential mode" in found["True"]["pinned memory"]["text"]
    assert found["True"]["confidential"]["value"] == "unclear"  # its behaviour shows only behind a kernel
    assert "ringfence selftest measures how copies behave" in found["True"]["confidential"]["text"]


def test_a_machine_without_an_accelerator_says_so_in_one_line() -> None:
    (found,) = device.checks()
    assert (found.name, found.good, found.value) == ("device", None, None)
    assert found.text == "none that torch can use; tensors on the CPU need none"
