"""`ringfence policy new | check | explain`: what is written can be filled in, what is wrong is named, what it means is said."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from ringfence.admission.policy import PolicyTerms
from ringfence.admission.proofs import kinds, snp_chain
from ringfence.cli.templates import HEAD, TABLES
from ringfence.config.settings import load_policy
from ringfence.errors import PolicyError
from tests.certificates import HOUR, Authority
from tests.cli.command import ringfence, ringfence_here

NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def write(folder: Path, text: str, authority: Authority | None = None) -> None:
    (folder / "policy.toml").write_text(text)
    (folder / "ca.pem").write_bytes((authority or Authority(start=NOW, end=NOW + 24 * 365 * HOUR)).pem)


CERTIFICATE = 'version = 1\n[[admit]]\n[admit.certificate]\nca = "ca.pem"\nids = "*.nodes.example.org"\n'


def test_there_is_a_template_for_every_kind_of_proof() -> None:
    assert list(TABLES) == list(kinds.KINDS)


def test_the_template_names_every_key_outside_a_rule() -> None:
    named = re.findall(r"^(?:# )?(\w+) = ", HEAD, re.MULTILINE)
    assert named == ["version", *(field.name for field in dataclasses.fields(PolicyTerms))]


@pytest.mark.parametrize("kind", TABLES)
def test_a_template_has_known_keys_and_must_be_filled_in(tmp_path: Path, kind: str) -> None:
    assert ringfence_here("certificate", "new", ".", "a", folder=tmp_path).returncode == 0
    assert ringfence_here("policy", "new", "policy.toml", "--admit", kind, folder=tmp_path).returncode == 0
    text = (tmp_path / "policy.toml").read_text()
    assert list(tomllib.loads(text)["admit"][0]) == [kind]
    if "FILL IN" not in text:
        assert load_policy(tmp_path / "policy.toml").kinds == (kind,)
        return
    with pytest.raises(PolicyError) as caught:
        load_policy(tmp_path / "policy.toml")
    assert "unknown key" not in str(caught.value)


def test_rules_and_their_proofs_are_written_as_asked(tmp_path: Path) -> None:
    arguments = (
        "--admit",
        "tdx+certificate",
        "--admit",
        "secret",
        "--ca",
        'a "strange" name.pem',
        "--trust-domain",
        "x.org",
    )
    assert ringfence_here("policy", "new", "policy.toml", *arguments, folder=tmp_path).returncode == 0
    written = tomllib.loads((tmp_path / "policy.toml").read_text())
    assert [list(rule) for rule in written["admit"]] == [["certificate", "tdx"], ["secret"]]
    assert written["admit"][0]["certificate"]["ca"] == 'a "strange" name.pem'
    assert written["admit"][0]["certificate"]["ids"] == ["spiffe://x.org/worker/*"]


@pytest.mark.parametrize("rule", ["sercet", "tdx+tdx", "", "tdx+"])
def test_a_rule_of_unknown_kinds_writes_nothing(tmp_path: Path, rule: str) -> None:
    done = ringfence_here("policy", "new", "policy.toml", "--admit", rule, folder=tmp_path)
    assert done.returncode == 2
    assert "join different kinds with +, from secret, certificate" in done.stderr
    assert not (tmp_path / "policy.toml").exists()


def test_a_policy_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("precious")
    done = ringfence("policy", "new", "policy.toml", folder=tmp_path)
    assert done.returncode == 2
    assert "a policy is never overwritten" in done.stderr
    assert (tmp_path / "policy.toml").read_text() == "precious"


def test_check_prints_the_digest_that_workers_compare(tmp_path: Path) -> None:
    write(tmp_path, CERTIFICATE + "[[admit]]\n[admit.secret]\n")
    digest = kinds.digest_of(load_policy(tmp_path / "policy.toml")).hex()
    done = ringfence("policy", "check", "policy.toml", folder=tmp_path)
    assert done.returncode == 0
    assert f"digest     {digest[:16]} {digest[16:]}" in done.stdout
    assert "admits by  certificate, or by secret" in done.stdout
    found = json.loads(ringfence("policy", "check", "policy.toml", "--json", folder=tmp_path).stdout)
    assert found["digest"] == digest
    assert found["rules"] == [["certificate"], ["secret"]]
    assert found["in_order"] is True


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version = 1\n[[admit]]\n[admit.certifcate]\n", "unknown key 'certifcate'"),
        (CERTIFICATE.replace("ca.pem", "gone.pem"), "cannot read gone.pem"),
        ("version = 1\n", "admit is missing"),
    ],
)
def test_check_names_what_is_wrong_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    write(tmp_path, text)
    done = ringfence_here("policy", "check", "policy.toml", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("ringfence: policy.toml")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_check_tells_whether_names_are_bound_to_ranks(tmp_path: Path) -> None:
    bound = CERTIFICATE.replace("*.nodes", "{rank}.nodes")
    several = "a name can stand for several ranks: two rosters are not detected"
    for text, rules, says in (
        (CERTIFICATE, [1], "rule 1 binds no name to a rank: two rosters are not detected"),
        (bound, [], "each name stands for one rank: two rosters are detected"),
        (bound.replace("{rank}", "{rank/8}"), [], several),
        (CERTIFICATE + 'ranks = "0-7"\n', [], several),
        (bound + "[[admit]]\n[admit.secret]\n", [2], "rule 2 binds no name to a rank: two rosters are not detected"),
    ):
        write(tmp_path, text)
        printed = ringfence_here("policy", "check", "policy.toml", folder=tmp_path).stdout
        assert says in " ".join(printed.split())
        found = json.loads(ringfence_here("policy", "check", "policy.toml", "--json", folder=tmp_path).stdout)
        assert found["rules_for_any_rank"] == rules
        assert found["two_rosters_are_detected"] is says.endswith("are detected")


def test_check_finds_authorities_at_their_end(tmp_path: Path) -> None:
    write(tmp_path, CERTIFICATE, Authority(start=NOW - 2 * HOUR, end=NOW - HOUR))
    done = ringfence_here("policy", "check", "policy.toml", folder=tmp_path)
    assert done.returncode == 1
    assert "expired: authority 'CN=test authority'" in done.stdout
    write(tmp_path, CERTIFICATE, Authority(start=NOW - HOUR, end=NOW + HOUR))
    done = ringfence_here("policy", "check", "policy.toml", folder=tmp_path)
    assert done.returncode == 0
    assert "expires within 30 days: authority 'CN=test authority'" in done.stdout


def test_check_finds_collateral_at_its_end(tmp_path: Path) -> None:
    """Intel's own, recorded in 2025: it was good for a month."""
    evidence = Path(__file__).parents[1] / "evidence" / "tdx"
    (tmp_path / "collateral.json").write_bytes((evidence / "phala-tdx_quote_collateral.json").read_bytes())
    registers = "".join(f'rtmr{number} = "{"00" * 48}"\n' for number in range(4))
    table = f'[admit.tdx]\ncollateral = "collateral.json"\nmrtd = "{"00" * 48}"\n{registers}'
    write(tmp_path, "version = 1\n[[admit]]\n" + table)
    done = ringfence_here("policy", "check", "policy.toml", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "expired: TDX collateral for platforms " in done.stdout
    explained = ringfence_here("policy", "explain", "policy.toml", folder=tmp_path).stdout
    assert "If a rule also requires a certificate, a key that this policy admits signs each entry." in explained


@pytest.mark.parametrize(
    ("days", "amd", "says"),
    [
        ((-30, -1), True, "expired: list of revoked certificates of 'CN=ARK-Milan"),
        ((-1, 5), True, "expires within 30 days: list of revoked certificates of 'CN=ARK-Milan"),
        ((-1, 90), True, "a list of revoked certificates in the policy was not signed by AMD"),
        ((-1, 90), False, "none of AMD's roots issued it"),
    ],
    ids=["expired", "soon", "not signed", "foreign"],
)
def test_check_finds_revocation_lists_that_amd_did_not_sign(
    tmp_path: Path, days: tuple[int, int], amd: bool, says: str
) -> None:
    """In AMD's name or not, these are signed by somebody else."""
    root = snp_chain.pinned()["milan"].root.subject
    issuer = root if amd else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ARK-Milan")])
    start, end = (NOW + day * 24 * HOUR for day in days)
    builder = x509.CertificateRevocationListBuilder().issuer_name(issuer).last_update(start).next_update(end)
    signed = builder.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    (tmp_path / "milan.crl").write_bytes(signed.public_bytes(Encoding.DER))
    table = f'[admit.snp]\nmeasurement = "{"00" * 48}"\ncrl = "milan.crl"\n'
    write(tmp_path, f"version = 1\n[[admit]]\n{table}[admit.snp.minimum_tcb.milan]\n" + TCB)
    done = ringfence_here("policy", "check", "policy.toml", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert says in done.stdout and "is valid" not in done.stdout
    found = json.loads(ringfence_here("policy", "check", "policy.toml", "--json", folder=tmp_path).stdout)
    assert found["in_order"] is False and len(found["not_genuine"]) == 1
    assert len(found["expired"]) == (days[1] < 0) and len(found["expires_soon"]) == (days[1] == 5)


TCB = "bootloader = 0\ntee = 0\nsnp = 0\nmicrocode = 0\n"


def test_explain_says_whom_it_admits(tmp_path: Path) -> None:
    note = 'note = "the cluster in Turin"\n'
    text = CERTIFICATE.replace("[[admit]]\n", 'min_workers = 8\nmax_session_age = "36h"\n[[admit]]\n' + note)
    write(tmp_path, text + "[admit.secret]\n[[admit]]\n[admit.secret]\n")
    lines = ringfence("policy", "explain", "policy.toml", folder=tmp_path).stdout.splitlines()
    assert lines[0] == "A worker is admitted if it meets any of 2 rules:"
    assert "1. the cluster in Turin" in lines
    assert "     has the run's shared secret (RINGFENCE_SECRET_FILE)" in lines
    assert "     presents a certificate named *.nodes.example.org" in lines
    assert "2. secret" in lines
    start = lines.index("No other worker is admitted.")
    assert lines[start + 1 : start + 3] == [
        "A run with fewer than 8 workers does not begin.",
        "After 36 hours all workers must be verified again.",
    ]
    assert " ".join(lines[start + 3 :]).startswith("Workers of one user on one machine exchange tensors through memory")


def test_sealing_inside_a_machine_is_named(tmp_path: Path) -> None:
    write(tmp_path, 'version = 1\nsame_host = "sealed"\n[[admit]]\n[admit.secret]\n')
    found = json.loads(ringfence_here("policy", "check", "policy.toml", "--json", folder=tmp_path).stdout)
    assert found["same_host"] == "sealed"
    said = " ".join(ringfence_here("policy", "explain", "policy.toml", folder=tmp_path).stdout.split())
    assert said.endswith("Workers on one machine seal what they exchange, as between machines (same_host).")


def test_what_authenticates_forwarded_data_is_named(tmp_path: Path) -> None:
    write(tmp_path, 'version = 1\nforwarded = "every_hop"\n[[admit]]\n[admit.secret]\n')
    found = json.loads(ringfence_here("policy", "check", "policy.toml", "--json", folder=tmp_path).stdout)
    assert found["forwarded"] == "every_hop"
    said = " ".join(ringfence_here("policy", "explain", "policy.toml", folder=tmp_path).stdout.split())
    assert said.endswith("(forwarded): a member of a group that is not on the path cannot alter it.")


def test_a_required_record_is_named(tmp_path: Path) -> None:
    write(tmp_path, 'version = 1\nrecord = "required"\n[[admit]]\n[admit.secret]\n')
    found = json.loads(ringfence_here("policy", "check", "policy.toml", "--json", folder=tmp_path).stdout)
    assert found["record"] == "required"
    said = " ".join(ringfence_here("policy", "explain", "policy.toml", folder=tmp_path).stdout.split())
    assert said.endswith("Every worker writes a signed record of the run, and a run without one fails (record).")


def test_backends_inside_a_machine_are_named(tmp_path: Path) -> None:
    write(tmp_path, 'version = 1\ninside_machine = ["nccl", "gloo"]\n[[admit]]\n[admit.secret]\n')
    done = ringfence_here("policy", "check", "policy.toml", folder=tmp_path)
    assert "  permits    nccl, gloo without sealing inside one machine" in done.stdout
    found = json.loads(ringfence_here("policy", "check", "policy.toml", "--json", folder=tmp_path).stdout)
    assert found["inside_machine"] == ["nccl", "gloo"]
    said = " ".join(ringfence_here("policy", "explain", "policy.toml", folder=tmp_path).stdout.split())
    assert (
        "A group that asks for nccl or gloo uses it without sealing if all its members prove to be on one machine"
        in said
    )


def test_a_full_disk_leaves_no_partial_policy(tmp_path: Path) -> None:
    done = ringfence("policy", "new", "policy.toml", "--trust-domain", "example.org", folder=tmp_path, room=20)
    assert done.returncode == 2
    assert done.stderr == "ringfence: cannot write policy.toml: File too large\n"
    assert not list(tmp_path.iterdir())


# -- revocation -----------------------------------------------------------------------------------------------------

LISTED = CERTIFICATE + 'crl = "ca.crl"\ncrl_max_age = "1d"\n'


@pytest.mark.parametrize(
    ("how", "says"),
    {
        "current": "issued 3 h ago, at ",
        "stale": "expired: list of revoked certificates of 'CN=test authority' in 'ca.crl': it was issued at ",
        "forged": "not genuine: the list of revoked certificates of 'CN=test authority' in 'ca.crl' was not signed",
        "foreign": "missing: a list of revoked certificates (crl) of 'CN=test authority'",
    }.items(),
)
def test_check_prints_the_age_of_lists_and_finds_bad_ones(tmp_path: Path, how: str, says: str) -> None:
    authority = Authority(start=NOW - HOUR, end=NOW + 24 * 365 * HOUR)
    issuer = Authority("other") if how == "foreign" else authority
    start = NOW - (30 if how == "stale" else 3) * HOUR
    key = ec.generate_private_key(ec.SECP256R1()) if how == "forged" else None
    (tmp_path / "ca.crl").write_bytes(issuer.revoke(7, start=start, end=NOW + 48 * HOUR, key=key))
    write(tmp_path, LISTED, authority)
    done = ringfence_here("policy", "check", "policy.toml", folder=tmp_path)
    assert done.returncode == (how != "current"), done.stderr
    assert says in " ".join(done.stdout.split())
    found = json.loads(ringfence_here("policy", "check", "policy.toml", "--json", folder=tmp_path).stdout)
    assert found["in_order"] is (how == "current")
    assert [len(found[name]) for name in ("expired", "not_genuine", "missing")] == [
        how == "stale",
        how == "forged",
        how == "foreign",
    ]
    assert found["lists"][0]["age"] == ("30 h ago" if how == "stale" else "3 h ago") and found["not_revocable"] == []


def test_check_names_what_cannot_be_revoked(tmp_path: Path) -> None:
    snp = f'[[admit]]\n[admit.snp]\nmeasurement = "{"00" * 48}"\nvlek_providers = "aws"\n'
    write(tmp_path, f"{CERTIFICATE}[admit.secret]\n{snp}[admit.snp.minimum_tcb.milan]\n{TCB}")
    done = ringfence_here("policy", "check", "policy.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(ringfence_here("policy", "check", "policy.toml", "--json", folder=tmp_path).stdout)[
        "not_revocable"
    ]
    assert [each.split(":")[0] for each in found] == [
        "a shared secret",
        "certificates",
        "the keys that sign SEV-SNP's VCEKs and VLEKs",
        "single SEV-SNP chips",
        "keys that AMD issued to a cloud provider (VLEK)",
    ]
    for each in found:
        assert each in " ".join(done.stdout.split())


def test_check_names_an_authority_of_another_rule_as_not_revocable(tmp_path: Path) -> None:
    authority = Authority(start=NOW - HOUR, end=NOW + 24 * 365 * HOUR)
    (tmp_path / "ca.crl").write_bytes(authority.revoke(start=NOW, end=NOW + HOUR))
    (tmp_path / "other.pem").write_bytes(Authority("other", start=NOW, end=NOW + 24 * 365 * HOUR).pem)
    other = CERTIFICATE.removeprefix("version = 1\n")
    for ca, count in (("ca.pem", 0), ("other.pem", 1)):
        write(tmp_path, LISTED + other.replace("ca.pem", ca), authority)
        found = json.loads(ringfence_here("policy", "check", "policy.toml", "--json", folder=tmp_path).stdout)
        assert len(found["not_revocable"]) == count
