"""`ringfence certificate`: one authority, certificates that are never overwritten, their renewal, and the list."""

from __future__ import annotations

import json
import stat
import time
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from ringfence.admission.proofs import certificate
from ringfence.config.settings import Settings, load_credential, load_policy
from ringfence.errors import AdmissionError
from tests.cli.command import ringfence


def test_certificates_meet_the_policy_made_for_them(tmp_path: Path) -> None:
    assert ringfence("certificate", "new", "site", "node-0", "node-1", folder=tmp_path).returncode == 0
    assert ringfence("policy", "new", "site/policy.toml", folder=tmp_path).returncode == 0
    site = tmp_path / "site"
    ((_, rules),) = load_policy(site / "policy.toml").rules[0].proofs
    assert isinstance(rules, certificate.Rules)
    for name in ("node-0", "node-1"):
        credential = load_credential(site / f"{name}.pem", site / f"{name}.key")
        start = (site / f"{name}.pem").stat().st_mtime
        claims, _ = certificate.verify_chain(rules, credential.chain, start)
        assert claims.id == f"spiffe://ringfence.internal/worker/{name}"
        (leaf, *_) = map(x509.load_der_x509_certificate, credential.chain)
        assert leaf.not_valid_after_utc.timestamp() == pytest.approx(start + 30 * 86400, abs=60)


def test_keys_are_for_the_owner_and_are_never_printed(tmp_path: Path) -> None:
    done = ringfence("certificate", "new", "site", "node-0", folder=tmp_path)
    for name in ("ca", "node-0"):
        file = tmp_path / "site" / f"{name}.key"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.read_text().splitlines()[1] not in done.stdout + done.stderr


def test_the_printed_lines_are_a_workers_environment(tmp_path: Path) -> None:
    done = ringfence("certificate", "new", "site", "node-0", folder=tmp_path)
    assert ringfence("policy", "new", "site/policy.toml", folder=tmp_path).returncode == 0
    exports = [word for line in done.stdout.splitlines() if line.startswith("  export ") for word in line.split()[1:]]
    settings = Settings.from_environment(dict(word.split("=", 1) for word in exports))
    assert settings.certificate is not None
    assert settings.policy is not None


def test_more_names_come_from_the_same_authority(tmp_path: Path) -> None:
    ringfence("certificate", "new", "site", "a", "--trust-domain", "example.org", folder=tmp_path)
    before = (tmp_path / "site" / "ca.pem").read_bytes()
    done = ringfence("certificate", "new", "site", "b", "--days", "7", "--json", folder=tmp_path)
    made = json.loads(done.stdout)
    assert made["trust_domain"] == "example.org"
    assert made["certificates"] == [
        {
            "id": "spiffe://example.org/worker/b",
            "certificate": str(tmp_path / "site" / "b.pem"),
            "key": str(tmp_path / "site" / "b.key"),
        }
    ]
    assert (tmp_path / "site" / "ca.pem").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("site", "b", "a"), "a.pem exists, and certificates are never overwritten"),
        (("site", "../b"), "cannot name a worker"),
        (("site", "ca"), "cannot name a worker"),
        (("site", "b", "--days", "0"), "argument --days: '0' is not a number from 1 to 825"),
        (("site", "b", "--trust-domain", "example.com"), "is for trust domain ringfence.internal, not example.com"),
        (("other", "b", "--trust-domain", "Example.com"), "is not a trust domain"),
        (("site/a.pem/x", "b"), "cannot make"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    ringfence("certificate", "new", "site", "a", folder=tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = ringfence("certificate", "new", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_an_authority_that_others_can_use_is_not_used(tmp_path: Path) -> None:
    ringfence("certificate", "new", "site", "a", folder=tmp_path)
    (tmp_path / "site" / "ca.key").chmod(0o644)
    done = ringfence("certificate", "new", "site", "b", folder=tmp_path)
    assert done.returncode == 2
    assert "others can open the key file" in done.stderr
    (tmp_path / "site" / "ca.key").unlink()
    assert "cannot read site/ca.key" in ringfence("certificate", "new", "site", "b", folder=tmp_path).stderr


def test_an_incomplete_authority_is_refused_with_a_remedy(tmp_path: Path) -> None:
    ringfence("certificate", "new", "site", "a", folder=tmp_path)
    (tmp_path / "site" / "ca.pem").unlink()
    done = ringfence("certificate", "new", "site", "b", folder=tmp_path)
    assert done.returncode == 2
    assert "restore the missing file, or name a new folder" in done.stderr


def test_a_full_disk_leaves_no_partial_certificates(tmp_path: Path) -> None:
    """Keys fit here, and certificates do not."""
    done = ringfence("certificate", "new", "new/site", "a", folder=tmp_path, room=400)
    assert done.returncode == 2
    assert done.stderr == "ringfence: cannot write new/site/ca.pem: File too large\n"
    assert not list(tmp_path.iterdir())


def test_if_one_certificate_cannot_be_written_none_is(tmp_path: Path) -> None:
    ringfence("certificate", "new", "site", "a", folder=tmp_path)
    before = sorted(tmp_path.rglob("*"))
    room = (tmp_path / "site" / "a.pem").stat().st_size + 50  # a signature may be a little longer; a name of 63 is much
    done = ringfence("certificate", "new", "site", "b", "c" * 63, folder=tmp_path, room=room)
    assert done.returncode == 2
    assert f"cannot write site/{'c' * 63}.pem" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    assert ringfence("certificate", "new", "site", "b", "c" * 63, folder=tmp_path).returncode == 0


def site_with_a_list(folder: Path) -> None:
    """Make an authority, certificates for a and b, an empty list of revoked ones, and a policy."""
    assert ringfence("certificate", "new", "site", "a", "b", folder=folder).returncode == 0
    first = json.loads(ringfence("certificate", "revoke", "site", "--json", folder=folder).stdout)
    assert first == {"file": str(folder / "site" / "ca.crl"), "serials": []}
    table = 'version = 1\n[[admit]]\n[admit.certificate]\nca = "ca.pem"\nids = "spiffe://ringfence.internal/worker/*"\n'
    table += 'trust_domain = "ringfence.internal"\ncrl = "ca.crl"\ncrl_max_age = "1d"\n'
    (folder / "site" / "policy.toml").write_text(table)
    assert ringfence("policy", "check", "site/policy.toml", folder=folder).returncode == 0


def refusal_of(site: Path, chain: Path, key: Path) -> str | None:
    """Why the policy of a site refuses a certificate, or None."""
    rules = load_policy(site / "policy.toml").rules[0].proofs[0][1]
    assert isinstance(rules, certificate.Rules)
    try:
        certificate.verify_chain(rules, load_credential(chain, key).chain, time.time())
    except AdmissionError as error:
        return str(error)
    return None


def test_renew_changes_the_dates_and_nothing_else(tmp_path: Path) -> None:
    site_with_a_list(tmp_path)
    site = tmp_path / "site"
    old = tmp_path / "old.pem"
    old.write_bytes((site / "a.pem").read_bytes())
    untouched = {name: (site / name).read_bytes() for name in ("a.key", "b.pem", "b.key", "ca.pem", "ca.key")}
    done = ringfence("certificate", "renew", "site", "a", "--days", "60", folder=tmp_path)
    assert done.returncode == 0 and "Renewed the certificate of spiffe://ringfence.internal/worker/a" in done.stdout
    assert {name: (site / name).read_bytes() for name in untouched} == untouched
    before, after = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (old, site / "a.pem"))
    assert after.public_key() == before.public_key() and after.serial_number != before.serial_number
    assert after.not_valid_after_utc - before.not_valid_after_utc > timedelta(days=29)
    names = [each.extensions.get_extension_for_class(x509.SubjectAlternativeName) for each in (before, after)]
    assert names[0] == names[1]
    assert refusal_of(site, site / "a.pem", site / "a.key") is None
    again = json.loads(ringfence("certificate", "renew", "site", "a", "b", "--json", folder=tmp_path).stdout)
    assert [each["certificate"] for each in again["certificates"]] == [str(site / "a.pem"), str(site / "b.pem")]


@pytest.mark.promise("A revoked certificate admits to no further session.")
def test_revoking_a_renewed_certificate_revokes_those_before_it(tmp_path: Path) -> None:
    """They have the same key, and have not expired. And what was revoked is not renewed."""
    site_with_a_list(tmp_path)
    site = tmp_path / "site"
    chains = []
    for number in range(3):
        chains.append(tmp_path / f"{number}.pem")
        chains[-1].write_bytes((site / "a.pem").read_bytes())
        assert ringfence("certificate", "renew", "site", "a", folder=tmp_path).returncode == 0
    done = ringfence("certificate", "revoke", "site", "a", folder=tmp_path)
    assert done.returncode == 0 and "4 revoked certificates" in done.stdout
    for chain in (*chains, site / "a.pem"):
        assert "worker/a was revoked" in str(refusal_of(site, chain, site / "a.key"))
    assert refusal_of(site, site / "b.pem", site / "b.key") is None
    before = (site / "a.pem").read_bytes(), (site / "b.pem").read_bytes()
    done = ringfence("certificate", "renew", "site", "b", "a", folder=tmp_path)
    assert done.returncode == 2 and "the certificate of a was revoked" in " ".join(done.stderr.split())
    assert ((site / "a.pem").read_bytes(), (site / "b.pem").read_bytes()) == before


def test_revoke_writes_a_list_that_a_policy_uses(tmp_path: Path) -> None:
    site_with_a_list(tmp_path)
    site = tmp_path / "site"

    def refused(name: str) -> str | None:
        return refusal_of(site, site / f"{name}.pem", site / f"{name}.key")

    assert refused("a") is None and refused("b") is None
    done = ringfence("certificate", "revoke", "site", "b", folder=tmp_path)
    assert done.returncode == 0 and "1 revoked certificate, valid for 7 days" in done.stdout
    assert 'crl_max_age = "7d"' in done.stdout  # as long as the list itself
    assert refused("a") is None and "worker/b was revoked" in str(refused("b"))
    assert ringfence("certificate", "revoke", "site", "a", "b", "--days", "1", folder=tmp_path).returncode == 0
    assert "worker/a was revoked" in str(refused("a")) and "worker/b was revoked" in str(refused("b"))
    for name, says in (("c", "cannot read the certificate of c"), ("ca", "cannot name a worker")):
        done = ringfence("certificate", "revoke", "site", name, folder=tmp_path)
        assert done.returncode == 2 and says in " ".join(done.stderr.split())
    (tmp_path / "site" / "ca.crl").write_bytes(b"x")
    done = ringfence("certificate", "revoke", "site", folder=tmp_path)
    assert done.returncode == 2 and "ca.crl, to which new entries are added" in " ".join(done.stderr.split())
