"""Workers join as their policy says, in threads and in processes: real TLS, real certificates, real files."""

from __future__ import annotations

import datetime
import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from ringfence.admission.proofs import kinds
from ringfence.admission.proofs.certificate import CertificateProver
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.config.private_files import check_unshared, new_secret_file
from ringfence.config.settings import Settings, load_credential, load_policy
from ringfence.errors import ConfigurationError, PolicyError
from ringfence.evidence.nvml import Library
from ringfence.evidence.tsm import KernelFiles
from ringfence.session.join.provers import MAKERS, Machine, policy_of
from tests.certificates import HOUR, Authority, private_pem, spiffe
from tests.fake_tsm import Kernel
from tests.integration.admitted_worker import run_workers
from tests.integration.join_cluster import Clock, Warnings, World
from tests.limits import FAR

TODAY = datetime.datetime.now(datetime.UTC).replace(microsecond=0)

BY_SECRET = "version = 1\n[[admit]]\n[admit.secret]\n"
BY_CERTIFICATE = (
    'version = 1\n[[admit]]\n[admit.certificate]\nca = "ca.pem"\n'
    'trust_domain = "example.org"\nids = "spiffe://example.org/worker/*"\n'
)
BY_BOTH = BY_CERTIFICATE + "[admit.secret]\n"
BY_EITHER = BY_CERTIFICATE + "[[admit]]\n[admit.secret]\n"
BY_SNP_OR_SECRET = (
    BY_SECRET
    + f"""\
[[admit]]
[admit.snp]
measurement = "{"5a" * 48}"
[admit.snp.minimum_tcb]
milan = {{ bootloader = 3, tee = 0, snp = 20, microcode = 209 }}
"""
)


class Site:
    """A folder with an authority, a secret, policies and workers' certificates; environments that name them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(start=TODAY - HOUR, end=TODAY + HOUR)
        (folder / "ca.pem").write_bytes(self.authority.pem)
        new_secret_file(folder / "secret")

    def policy(self, text: str, name: str = "policy.toml") -> dict[str, str]:
        (self.folder / name).write_text(text)
        return {"RINGFENCE_POLICY": str(self.folder / name)}

    def secret(self) -> dict[str, str]:
        return {"RINGFENCE_SECRET_FILE": str(self.folder / "secret")}

    def certificate(
        self,
        name: str,
        *names: x509.GeneralName,
        authority: Authority | None = None,
        end: datetime.datetime = TODAY + HOUR,
    ) -> dict[str, str]:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = authority or self.authority
        leaf = issuer.sign(name, key, names or (spiffe(f"worker/{name}"),), start=TODAY - 2 * HOUR, end=end)
        (self.folder / f"{name}.pem").write_bytes(leaf.public_bytes(Encoding.PEM))
        (self.folder / f"{name}.key").touch(mode=0o600)
        (self.folder / f"{name}.key").write_bytes(private_pem(key))
        return {
            "RINGFENCE_CERTIFICATE_FILE": str(self.folder / f"{name}.pem"),
            "RINGFENCE_KEY_FILE": str(self.folder / f"{name}.key"),
        }


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def environments(site: Site, kind: str) -> list[Mapping[str, str]]:
    """Three workers under one policy."""
    secret, certificates = site.secret(), [site.certificate(f"w{rank}") for rank in range(3)]
    if kind == "secret":
        policy = site.policy(BY_SECRET)
        return [{**policy, **secret} for _ in range(3)]
    if kind == "certificate":
        policy = site.policy(BY_CERTIFICATE)
        return [{**policy, **certificate} for certificate in certificates]
    if kind == "both":
        policy = site.policy(BY_BOTH)
        return [{**policy, **secret, **certificate} for certificate in certificates]
    policy = site.policy(BY_EITHER)
    return [{**policy, **secret}, {**policy, **secret, **certificates[1]}, {**policy, **secret, **certificates[2]}]


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        ("secret", ["shared secret"] * 3),
        ("certificate", ["certificate"] * 3),
        ("both", ["shared secret and certificate"] * 3),
        ("either", ["shared secret", "certificate", "certificate"]),
    ],
)
def test_processes_admit_each_other_by_each_kind_of_proof(site: Site, kind: str, by: list[str]) -> None:
    said = run_workers(site.folder, environments(site, kind))
    assert [each.get("by") for each in said] == by, said
    assert len({(each["roster"], each["key"]) for each in said}) == 1


def test_certificates_of_distant_workers_are_verified(site: Site) -> None:
    policy = site.policy(BY_CERTIFICATE)
    with World(7) as world:
        for rank in range(7):
            settings = Settings.from_environment({**policy, **site.certificate(f"w{rank}")})
            world.start([rank], {rank: settings})
        members = world.members()
        assert len({member.roster.digest for member in members}) == 1
        assert {each.proof_name for member in members for each in member.roster.admitted} == {"certificate"}


def settings_of(*parts: Mapping[str, str]) -> Settings:
    return Settings.from_environment({name: value for part in parts for name, value in part.items()})


@pytest.mark.promise("Workers with different policies do not form a session, and the error names both policies.")
@pytest.mark.parametrize(
    "change",
    [("worker/*", "worker/**"), ("version = 1", 'version = 1\nforwarded = "every_hop"')],
    ids=["a rule", "the tags of links"],  # the first policy is that of a release without this key, too
)
def test_different_policies_are_refused_and_both_sides_are_named(
    site: Site, change: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert change[0] in BY_CERTIFICATE
    one = settings_of(site.policy(BY_CERTIFICATE, "one.toml"), site.certificate("w0"))
    two = settings_of(site.policy(BY_CERTIFICATE.replace(*change), "two.toml"), site.certificate("w1"))
    digests = [policy_of(each)[0].digest[:8].hex() for each in (one, two)]
    clock, world = Clock(monkeypatch), World(2)
    with Warnings() as warnings:
        world.start([0, 1], {0: one, 1: two})
        warnings.wait_for(lambda texts: sum("have different policies" in text for text in texts) == 2)
    clock.advance(FAR)  # rank 0 waits for rank 1, which gives up
    for rank in (1, 0):
        error = world.error(rank)
        assert "have different policies" in error
        assert all(digest in error for digest in digests)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("foreign authority", "not issued under an authority of the policy"),
        ("foreign trust domain", "is of trust domain example.com, and this rule is for example.org"),
        ("two names", "2 URIs, and exactly one is allowed"),
        ("expired", "expired at"),
        ("another name", "the policy admits spiffe://example.org/worker/*"),
    ],
)
def test_an_unusable_certificate_is_reported_before_dialling(site: Site, wrong: str, says: str) -> None:
    policy = site.policy(BY_CERTIFICATE)
    bad = {
        "foreign authority": lambda: site.certificate("x", authority=Authority(start=TODAY - HOUR, end=TODAY + HOUR)),
        "foreign trust domain": lambda: site.certificate("x", spiffe("worker/x", "example.com")),
        "two names": lambda: site.certificate("x", spiffe("worker/x"), spiffe("worker/y")),
        "expired": lambda: site.certificate("x", end=TODAY - HOUR),
        "another name": lambda: site.certificate("x", spiffe("viewer/x")),
    }[wrong]()
    with pytest.raises(ConfigurationError, match="this worker has no credential that its own policy admits") as caught:
        policy_of(settings_of(policy, bad))
    assert says in str(caught.value)


def test_an_unusable_certificate_is_logged_if_another_rule_is_met(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    bad = {**site.policy(BY_EITHER), **site.certificate("w1", end=TODAY - HOUR), **site.secret()}
    with caplog.at_level("WARNING", logger="ringfence"):
        _, prover = policy_of(settings_of(bad))
    assert prover.kind == SharedSecret.kind
    (warning,) = caplog.messages
    assert "rule 1: this worker's own certificate would be refused" in warning and "tries the next rule" in warning


def test_a_rule_without_a_credential_is_skipped_silently(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="ringfence"):
        policy_of(settings_of({**site.policy(BY_EITHER), **site.secret()}))
    assert not caplog.messages


@pytest.mark.parametrize("wrong", ["foreign authority", "expired"])
def test_a_worker_that_dials_with_a_bad_certificate_is_refused(
    site: Site, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own verifier is more lenient than its policy: a malicious worker. The parent's verification decides."""
    good = settings_of(site.policy(BY_CERTIFICATE), site.certificate("w0"))
    if wrong == "expired":
        bad, says = settings_of(site.policy(BY_CERTIFICATE), site.certificate("w1", end=TODAY - HOUR)), "expired at"
    else:
        unauthenticated_peer = Authority(start=TODAY - HOUR, end=TODAY + HOUR)
        bad = settings_of(site.policy(BY_CERTIFICATE), site.certificate("w1", authority=unauthenticated_peer))
        says = "not issued under an authority of the policy"
    policy, _ = policy_of(good)
    assert bad.certificate is not None
    clock, world = Clock(monkeypatch), World(2)
    with Warnings() as warnings:
        world.start([0, 1], {0: good, 1: bad}, admission={1: (policy, CertificateProver(bad.certificate))})
        warnings.wait_for(lambda texts: sum(says in text for text in texts) == 2)
    clock.advance(FAR)
    assert says in world.error(1)
    assert "1 of 2 workers are missing: rank 1" in world.error(0)
    assert says in world.error(0)


def test_a_worker_without_credentials_is_told_what_each_rule_needs(site: Site) -> None:
    with pytest.raises(ConfigurationError, match="rule 1: set RINGFENCE_CERTIFICATE_FILE and RINGFENCE_KEY_FILE"):
        policy_of(settings_of(site.policy(BY_CERTIFICATE)))


class BareKernel(KernelFiles):
    """A kernel that attests nothing."""

    def make(self, folder: str) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def test_each_kind_of_evidence_says_what_it_misses() -> None:
    def no_gpus() -> Library:
        raise ConfigurationError("no GPU")

    bare = Machine(files=BareKernel(), gpus=no_gpus)
    other = Machine(files=Kernel("sev_guest", lambda data, level: b""))
    for kind, machine, says in (
        ("secret", bare, "RINGFENCE_SECRET_FILE"),
        ("certificate", bare, "RINGFENCE_CERTIFICATE_FILE"),
        ("tdx", bare, "no attestation by the kernel"),
        ("tdx", other, "the kernel provides sev_guest, and this rule asks for tdx_guest"),
        ("snp", bare, "no attestation by the kernel"),
        ("nvidia", bare, "no GPU"),
        ("token", bare, "RINGFENCE_TOKEN_COMMAND"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            MAKERS[kind](Settings(), None, None, machine)
    assert set(MAKERS) == set(kinds.KINDS)


# -- settings and files ---------------------------------------------------------------------------------------------


def test_a_policy_that_asks_for_the_secret_needs_it_on_every_worker(site: Site) -> None:
    with pytest.raises(ConfigurationError, match="RINGFENCE_SECRET_FILE is not set"):
        settings_of(site.policy(BY_EITHER), site.certificate("w0"))


def test_a_secret_that_no_rule_asks_for_is_not_read(site: Site) -> None:
    settings = settings_of(
        site.policy(BY_CERTIFICATE), site.certificate("w0"), {"RINGFENCE_SECRET_FILE": "no/such/file"}
    )
    assert settings.secret is None


@pytest.mark.promise("A certificate, VCEK file or token command that no policy asks for is rejected.")
def test_a_certificate_that_no_rule_asks_for_is_an_error(site: Site) -> None:
    certificate = site.certificate("w0")
    for others in (site.secret(), {**site.policy(BY_SECRET), **site.secret()}):
        with pytest.raises(ConfigurationError, match="no policy asks for certificates"):
            settings_of(others, certificate)


@pytest.mark.promise("A certificate, VCEK file or token command that no policy asks for is rejected.")
@pytest.mark.parametrize(("name", "what"), [("RINGFENCE_VCEK_FILE", "SEV-SNP"), ("RINGFENCE_TOKEN_COMMAND", "tokens")])
def test_a_credential_that_no_rule_asks_for_is_an_error(site: Site, name: str, what: str) -> None:
    """Its policy was forgotten, perhaps: by the secret alone others would be admitted."""
    for others in (site.secret(), {**site.policy(BY_SECRET), **site.secret()}):
        with pytest.raises(
            ConfigurationError, match=f"^{name} is set, and no policy asks for {what}: set RINGFENCE_POL"
        ):
            settings_of(others, {name: str(site.folder / "ca.pem")})
        assert settings_of(others, {name: ""})


def test_the_vcek_is_read_if_a_rule_asks_for_snp(site: Site) -> None:
    settings = settings_of(
        site.policy(BY_SNP_OR_SECRET), site.secret(), {"RINGFENCE_VCEK_FILE": str(site.folder / "ca.pem")}
    )
    assert settings.vcek == site.authority.pem


@pytest.mark.parametrize("name", ["RINGFENCE_CERTIFICATE_FILE", "RINGFENCE_KEY_FILE"])
def test_certificate_and_key_go_together(site: Site, name: str) -> None:
    certificate = site.certificate("w0")
    with pytest.raises(ConfigurationError, match="go together: set both"):
        settings_of(site.policy(BY_CERTIFICATE), {name: certificate[name]})


def test_a_key_that_others_can_open_is_refused(site: Site) -> None:
    certificate = site.certificate("w0")
    (site.folder / "w0.key").chmod(0o640)
    with pytest.raises(ConfigurationError, match=r"others can open the key file .*w0\.key: run `chmod 600"):
        settings_of(site.policy(BY_CERTIFICATE), certificate)


def test_files_that_do_not_fit_together_are_named(site: Site) -> None:
    one, two = site.certificate("w0"), site.certificate("w1")
    key, other = one["RINGFENCE_KEY_FILE"], two["RINGFENCE_KEY_FILE"]
    chain = one["RINGFENCE_CERTIFICATE_FILE"]
    with pytest.raises(ConfigurationError, match=r"w1\.key: the key is not that of the first certificate"):
        load_credential(chain, other)
    with pytest.raises(ConfigurationError, match="not a PEM file with certificates"):
        load_credential(key, key)
    (site.folder / "w0.key").write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match="not a private key in PEM form"):
        load_credential(chain, key)
    with pytest.raises(ConfigurationError, match=r"cannot read .*gone: No such file"):
        load_credential(site.folder / "gone", key)


def test_files_of_a_policy_are_relative_to_its_folder(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    path = site.policy(BY_CERTIFICATE)["RINGFENCE_POLICY"]
    monkeypatch.chdir("/")
    assert load_policy(path).kinds == ("certificate",)


@pytest.mark.parametrize("mode", [0o646, 0o664, 0o666])
def test_a_policy_or_an_authority_that_others_can_change_is_refused(site: Site, mode: int) -> None:
    path = site.policy(BY_CERTIFICATE)["RINGFENCE_POLICY"]
    for name in ("policy.toml", "ca.pem"):
        (site.folder / name).chmod(mode)
        with pytest.raises(PolicyError, match=f"can change .*{name}: run `chmod go-w"):
            load_policy(path)
        (site.folder / name).chmod(0o644)
    assert load_policy(path)


def test_a_policy_of_another_user_is_refused(tmp_path: Path) -> None:
    def status(uid: int) -> os.stat_result:
        return os.stat_result((stat.S_IFREG | 0o644, 1, 1, 1, uid, uid, 10, 0, 0, 0))

    for uid in (os.geteuid(), 0):
        check_unshared(tmp_path, status(uid))
    with pytest.raises(PolicyError, match=r"belongs to another user \(uid 4242\)"):
        check_unshared(tmp_path, status(4242))


def test_an_empty_policy_setting_is_an_error(site: Site) -> None:
    with pytest.raises(ConfigurationError, match="RINGFENCE_POLICY is set and empty"):
        Settings.from_environment({"RINGFENCE_POLICY": "", **site.secret()})


def test_a_missing_policy_file_names_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"cannot read the policy .*gone.toml: No such file.*`ringfence policy new`"):
        load_policy(tmp_path / "gone.toml")
    with pytest.raises(PolicyError):
        load_policy(tmp_path)


def test_settings_show_no_key(site: Site) -> None:
    settings = settings_of(site.policy(BY_BOTH), site.secret(), site.certificate("w0"))
    assert settings.certificate is not None
    shown = repr(settings)
    assert "PrivateKey" not in shown
    assert (site.folder / "secret").read_text().strip() not in shown
    assert replace(settings, run_id="x").certificate is settings.certificate
