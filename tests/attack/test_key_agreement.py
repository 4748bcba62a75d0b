"""Post-quantum key agreement is required unless the policy permits otherwise, whatever OpenSSL's configuration says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from ringfence import keys
from ringfence.cli.checks import software
from ringfence.errors import ConfigurationError, ProtocolError
from ringfence.transport import tls
from ringfence.transport.tls import Credentials
from tests.attack.unauthenticated_peer import tls_pair
from tests.cli.command import ringfence
from tests.integration.join_cluster import World
from tests.limits import HANG

CONFIGURATION = """\
openssl_conf = all
[all]
ssl_conf = ssl
[ssl]
system_default = system_default
[system_default]
Groups = P-256
"""
# Prints what OpenSSL agrees on by itself, then two workers, then a join of two.
SCRIPT = """\
from OpenSSL import SSL
from ringfence.transport import tls
from tests.attack.test_key_agreement import left_to_openssl
from tests.attack.unauthenticated_peer import tls_pair
from tests.integration.join_cluster import World

one, two = tls_pair(left_to_openssl(), left_to_openssl())
print(one.group, two.group)
one, two = tls_pair(tls.Credentials(), tls.Credentials())
print(one.group, two.group)
with World(2) as world:
    world.start(range(2))
    print(*(member.key_agreement for member in world.members()))
"""


def left_to_openssl() -> Credentials:
    """A worker that sets no groups."""
    credentials = Credentials(hybrid=False)
    fresh = ec.generate_private_key(ec.SECP256R1())
    credentials.context = tls._context(fresh, tls._self_signed(fresh))
    return credentials


def classical() -> Credentials:
    """A worker whose OpenSSL has no ML-KEM, and whose policy permits that."""
    credentials = Credentials(hybrid=False)
    groups = ":".join(keys.CLASSICAL_GROUPS).encode()
    assert tls.lib.SSL_CTX_set1_curves_list(credentials.context._context, groups) == 1  # type: ignore[attr-defined]
    return credentials


@pytest.mark.promise("Admission agrees on keys by X25519MLKEM768, unless the policy permits otherwise.")
def test_an_openssl_configuration_does_not_disable_it(tmp_path: Path) -> None:
    path = tmp_path / "openssl.cnf"
    path.write_text(CONFIGURATION)
    environment = {**os.environ, "OPENSSL_CONF": str(path)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr
    alone, two_workers, joined = done.stdout.splitlines()
    assert alone == "secp256r1 secp256r1", "the configuration has no effect, so the test shows nothing"
    assert two_workers == joined == "X25519MLKEM768 X25519MLKEM768"


@pytest.mark.promise("Admission agrees on keys by X25519MLKEM768, unless the policy permits otherwise.")
@pytest.mark.parametrize("strict", [0, 1], ids=["client", "server"])
def test_both_sides_refuse_a_classical_agreement(strict: int) -> None:
    sides = [classical(), classical()]
    sides[strict] = Credentials()
    with pytest.raises(ProtocolError, match=r"TLS used x25519 for .*X25519MLKEM768.*key_agreement = \"any\""):
        tls_pair(*sides)


def test_a_policy_may_permit_a_classical_agreement() -> None:
    one, two = tls_pair(classical(), Credentials(hybrid=False))
    assert one.group == two.group == "x25519"
    one, two = tls_pair(Credentials(hybrid=False), Credentials(hybrid=False))
    assert one.group == "X25519MLKEM768", "both support the hybrid group and did not use it"


def test_a_worker_without_the_hybrid_group_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "HYBRID_GROUPS", ("a group that OpenSSL does not know",))
    with World(2) as world:
        world.start([0])
        assert "ConfigurationError: OpenSSL" in world.error(0)
        assert 'set key_agreement = "any" in the policy of every worker' in world.error(0)
    assert Credentials(hybrid=False)
    with pytest.raises(ConfigurationError):
        Credentials()


def test_the_key_agreement_is_part_of_the_policy_digest(tmp_path: Path) -> None:
    texts = {
        each: f'version = 1\nkey_agreement = "{each}"\n[[admit]]\n[admit.secret]\n' for each in keys.KEY_AGREEMENTS
    }
    texts["absent"] = "version = 1\n[[admit]]\n[admit.secret]\n"
    texts["wrong"] = texts["any"].replace("any", "classical")
    found = {}
    for name, text in texts.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        path.chmod(0o600)
        found[name] = ringfence("policy", "check", str(path))
    digests = {name: done.stdout for name, done in found.items()}
    assert digests["hybrid"].replace("hybrid.toml", "") == digests["absent"].replace("absent.toml", "")
    assert digests["hybrid"].replace("hybrid.toml", "") != digests["any"].replace("any.toml", "")
    assert found["wrong"].returncode != 0
    assert "key_agreement must be one of hybrid, any" in found["wrong"].stderr
    explained = ringfence("policy", "explain", str(tmp_path / "any.toml")).stdout
    assert "may agree on keys without post-quantum cryptography" in explained


def test_the_doctor_reports_the_key_agreement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = software.key_agreement({})
    assert (found.value, found.good) == ("X25519MLKEM768", True)
    monkeypatch.setattr(keys, "HYBRID_GROUPS", ("a group that OpenSSL does not know",))
    missing = software.key_agreement({})
    assert missing.good is False
    assert missing.fix
    path = tmp_path / "policy.toml"
    path.write_text('version = 1\nkey_agreement = "any"\n[[admit]]\n[admit.secret]\n')
    path.chmod(0o600)
    permitted = software.key_agreement({"RINGFENCE_POLICY": str(path)})
    assert (permitted.value, permitted.good) == ("x25519", None)


WITHOUT = """
from OpenSSL import SSL, _util
class Context(SSL.Context):
    def __getattribute__(self, name):
        if name == "{missing}": raise AttributeError(name)
        return super().__getattribute__(name)
class Lib:
    def __getattr__(self, name):
        if name == "{missing}": raise AttributeError(name)
        return getattr(lib, name)
lib, _util.lib, SSL.Context = _util.lib, Lib(), Context
import ringfence.transport.tls
print("imported")
"""


@pytest.mark.parametrize("missing", ["SSL_CTX_set1_sigalgs_list", "SSL_CTX_set1_curves_list", "_context", "nothing"])
def test_a_pyopenssl_without_the_calls_that_tls_needs_is_refused_at_import(missing: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT.format(missing=missing)], capture_output=True, text=True)
    assert ("imported" in done.stdout) is (missing == "nothing"), done.stderr
    assert missing == "nothing" or f"lacks a call that ringfence needs ({missing})" in done.stderr
