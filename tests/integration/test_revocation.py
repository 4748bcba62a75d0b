"""Revocation in real joins: the next session refuses a revoked worker by name on every worker, and refuses bad lists."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from ringfence.admission.policy import Policy
from ringfence.admission.proofs import certificate, nvidia, reference_values
from ringfence.config.settings import Settings, load_policy
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.launch import agent_admission
from ringfence.launch.agent_admission import CurrentPolicy
from ringfence.session.join.credentials import JoinCredentials
from tests import ports, provers
from tests.certificates import HOUR, Authority, private_pem, spiffe
from tests.integration.admitted_worker import assert_refused, run_workers
from tests.integration.join_cluster import Warnings, World
from tests.integration.test_join_policy import BY_CERTIFICATE
from tests.integration.test_launch import Start, agent, joined
from tests.limits import FAR, HANG
from tests.pool import Failure, Pool, values
from tests.unit import nvidia_mint, ocsp_mint
from tests.unit.nvidia_mint import Device

__all__ = ["agent"]  # a fixture

TODAY = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
LISTED = BY_CERTIFICATE + 'crl = "lists"\ncrl_max_age = "12h"\n'
PATIENCE = (4.0, 40.0)  # seconds that rank 0 waits for a worker that it refuses; longer if the machine was too busy


class Site:
    """A certificate authority with machines, each with a policy, a certificate and its own copies of the lists."""

    def __init__(self, folder: Path, machines: int) -> None:
        self.folder = folder
        self.authority = Authority(start=TODAY - 24 * HOUR, end=TODAY + 24 * HOUR)
        self.keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(machines)]
        for number, key in enumerate(self.keys):
            home = folder / str(number)
            (home / "lists").mkdir(parents=True)
            (home / "lists").chmod(0o755)
            (home / "policy.toml").write_text(LISTED)
            (home / "ca.pem").write_bytes(self.authority.pem)
            self.issue(number, 100 + number)
            (home / "own.key").touch(mode=0o600)
            (home / "own.key").write_bytes(private_pem(key))
        self.machines = range(machines)

    def issue(self, number: int, serial: int) -> None:
        """Issue a machine's certificate, for the key that it has, in the place of the one of before."""
        name, times = spiffe(f"worker/w{number}"), {"start": TODAY - HOUR, "end": TODAY + HOUR}
        leaf = self.authority.sign("worker", self.keys[number], [name], serial=serial, **times)  # type: ignore[arg-type]
        new = self.folder / str(number) / "own.pem.new"
        new.write_bytes(leaf.public_bytes(Encoding.PEM))
        new.rename(new.with_suffix(""))

    def publish(
        self, *serials: int, to: range | list[int] | None = None, name: str = "ca.crl", **wrong: object
    ) -> None:
        """Write a new list to machines; to all by default."""
        options = {"start": TODAY, "end": TODAY + 24 * HOUR} | wrong
        content = self.authority.revoke(*serials, **options)  # type: ignore[arg-type]
        for number in self.machines if to is None else to:
            (self.folder / str(number) / "lists" / name).write_bytes(content)

    def environment(self, number: int) -> dict[str, str]:
        home = self.folder / str(number)
        return {
            "RINGFENCE_POLICY": str(home / "policy.toml"),
            "RINGFENCE_CERTIFICATE_FILE": str(home / "own.pem"),
            "RINGFENCE_KEY_FILE": str(home / "own.key"),
        }

    def environments(self) -> list[Mapping[str, str]]:
        return [self.environment(number) for number in self.machines]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as found:
        yield found


def total() -> float:
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    return float(tensor[0])


def session(pool: Pool, site: Site) -> list[object]:
    return pool.join("ringfence", len(site.machines), env=site.environments(), renew=True)


def refused_session(pool: Pool, site: Site, reason: str = "") -> list[str]:
    """Return the error of each worker; all of them have this reason in it."""
    for patience in PATIENCE:
        environments = [
            {**each, "RINGFENCE_JOIN_TIMEOUT": str(1.5 * patience if rank else patience)}
            for rank, each in enumerate(site.environments())
        ]
        results = pool.join("ringfence", len(environments), seconds=FAR, env=environments, renew=True, timeout=HANG)
        assert all(isinstance(each, Failure) for each in results), results
        errors = [each.message for each in results]
        if all(reason in error for error in errors):
            break
    assert all(reason in error for error in errors), errors
    return errors


REVOKED = "spiffe://example.org/worker/w2 was revoked"


@pytest.mark.promise("A revoked certificate admits to no further session.")
@pytest.mark.parametrize("told", [[0, 1], [0], [1]], ids=["honest workers", "only the root", "only another worker"])
def test_the_next_session_refuses_a_revoked_worker_on_every_worker(pool: Pool, tmp_path: Path, told: list[int]) -> None:
    """The revoked worker keeps its old list. One worker with the new list is enough, also one that it never met."""
    site = Site(tmp_path, 3)
    site.publish(number=1, start=TODAY - HOUR)
    values(session(pool, site))
    assert pool.check(total, 3, env=site.environments()) == [3.0] * 3
    site.publish(102, number=2, to=told)
    refused_session(pool, site, REVOKED)
    site.publish(102, number=2)  # then the worker itself knows
    own = refused_session(pool, site)[2]
    assert f"this worker's own certificate would be refused: the certificate of {REVOKED}" in own


@pytest.mark.promise("A revoked certificate admits to no further session.")
def test_a_revoked_parent_is_refused_by_its_children(pool: Pool, tmp_path: Path) -> None:
    site = Site(tmp_path, 2)
    site.publish(number=1, start=TODAY - HOUR)
    values(session(pool, site))
    site.publish(100, number=2, to=[1])
    refused_session(pool, site, "worker/w0 was revoked")


@pytest.mark.promise("Of several lists of one issuer the newest decides, and an older one cannot replace it.")
def test_a_list_that_was_rolled_back_ends_the_next_session(pool: Pool, tmp_path: Path) -> None:
    site = Site(tmp_path, 2)
    site.publish(number=2)
    values(session(pool, site))
    site.publish(number=1, start=TODAY - HOUR)
    refused_session(pool, site, "was rolled back")


def break_list(site: Site, how: str) -> None:
    lists = site.folder / "1" / "lists"
    if how == "stale":
        site.publish(to=[1], start=TODAY - 13 * HOUR)
    elif how == "expired":
        site.publish(to=[1], start=TODAY - 2 * HOUR, end=TODAY - HOUR)
    elif how == "forged":
        site.publish(to=[1], key=ec.generate_private_key(ec.SECP256R1()))
    elif how == "of another issuer":
        (lists / "ca.crl").write_bytes(Authority("other").revoke(start=TODAY, end=TODAY + HOUR))
    elif how == "missing":
        shutil.rmtree(lists)
    else:
        (lists / "ca.crl").unlink()


@pytest.mark.promise("A stale, forged or foreign list of revoked certificates admits nobody.")
@pytest.mark.parametrize(
    ("how", "says"),
    {
        "stale": "more than 12 hours ago (crl_max_age): fetch the current one",
        "expired": "expired at",
        "forged": "was not signed by that authority",
        "of another issuer": "there is no list of revoked certificates of",
        "missing": "crl: cannot read lists: No such file or directory",
        "empty": "crl: the folder lists is empty",
    }.items(),
)
def test_a_worker_without_a_usable_list_does_not_join(tmp_path: Path, how: str, says: str) -> None:
    site = Site(tmp_path, 2)
    site.publish()
    break_list(site, how)
    reasons = ["1 of 2 workers are missing: rank 1", says]
    assert_refused(reasons, lambda patience: run_workers(tmp_path, site.environments(), patience), PATIENCE)


def test_workers_with_different_current_lists_form_a_session(tmp_path: Path) -> None:
    site = Site(tmp_path, 2)
    site.publish(number=1, start=TODAY - HOUR)
    site.publish(7, number=2, to=[1], name="new.crl")
    found = run_workers(tmp_path, site.environments())
    assert [each.get("by") for each in found] == ["certificate"] * 2, found


def test_a_list_that_others_can_change_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, 2)
    site.publish()
    (tmp_path / "0" / "lists" / "ca.crl").chmod(0o666)
    (tmp_path / "1" / "lists").chmod(0o777)
    first, second = run_workers(tmp_path, site.environments())
    assert "others on this machine can change" in first["error"] and "ca.crl" in first["error"]
    assert "others on this machine can change the folder" in second["error"]


# -- the launcher ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("A revoked certificate admits to no further session.")
def test_a_host_refuses_the_next_connection_of_a_revoked_agent(
    agent: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host runs on: it reads the list anew when an agent connects. The revoked agent has its old list."""
    site, port = Site(tmp_path / "site", 3), ports.port()
    site.publish(number=1, start=TODAY - HOUR)
    monkeypatch.delenv("RINGFENCE_SECRET_FILE")
    monkeypatch.setattr(agent_admission, "_POLICY_SECONDS", 0.0)

    def start(number: int) -> object:
        for name, value in site.environment(number).items():
            monkeypatch.setenv(name, value)
        return agent(port, number, nodes=(2, 3))

    host, first = start(0), start(1)
    joined(host, first)  # type: ignore[arg-type]
    site.publish(102, number=2, to=[0])
    with Warnings() as warnings:
        start(2)
        warnings.wait_for(lambda texts: any(REVOKED in text and "keeps trying" in text for text in texts))


@pytest.mark.promise("A revoked agent takes no part in the next round, also if it stays connected.")
@pytest.mark.parametrize("ends", ["the host", "the revoked agent"])
def test_a_revoked_agent_that_is_connected_takes_no_part_in_the_next_round(
    agent: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """It has its old list, and waits for the round on the connection on which it was admitted."""
    site, port = Site(tmp_path / "site", 3), ports.port()
    site.publish(number=1, start=TODAY - HOUR)
    monkeypatch.delenv("RINGFENCE_SECRET_FILE")
    monkeypatch.setattr(agent_admission, "_POLICY_SECONDS", 0.0)
    agents = []
    for number in range(3):
        for name, value in site.environment(number).items():
            monkeypatch.setenv(name, value)
        agents.append(agent(port, number, nodes=(2, 3)))
    host, other, revoked = agents
    assert [each.world_size for each in joined(*agents)] == [3] * 3
    site.publish(102, number=2, to=[0, 1])  # agents of one process remember the newest list together

    def wait_in_vain() -> None:
        with contextlib.suppress(RendezvousConnectionError, RendezvousTimeoutError):
            vain.append(revoked.next_rendezvous())

    vain: list[object] = []
    thread = threading.Thread(target=wait_in_vain, daemon=True)
    with Warnings() as warnings:
        if ends == "the revoked agent":
            thread.start()
        rounds = joined(host, other)
        assert [each.world_size for each in rounds] == [2, 2]
        if ends == "the host":
            thread.start()
        warnings.wait_for(lambda texts: any("refused the agent" in text and REVOKED in text for text in texts))
    assert not vain


def test_an_agent_proves_with_the_certificate_of_now(tmp_path: Path) -> None:
    site = Site(tmp_path, 1)
    site.publish()
    credentials = JoinCredentials(Settings.from_environment(site.environment(0)))
    before = credentials.settings.certificate
    assert before is not None and credentials.read_certificate_again(2) is None, "it is the same"
    site.issue(0, 200)
    with pytest.raises(ConfigurationError, match="another kind of proof"):
        credentials.read_certificate_again(1)
    assert credentials.settings.certificate is before and before.key is not None
    prover = credentials.read_certificate_again(2)
    assert prover is not None and prover.kind == 2
    assert credentials.settings.certificate is not None and credentials.settings.certificate.chain != before.chain


# -- GPUs -----------------------------------------------------------------------------------------------------------


def gpu_settings(folder: Path, responses: list[bytes], top: nvidia_mint.Issuer, device: Device) -> Settings:
    """Write a policy with OCSP responses, and return settings that have read it."""
    claims = nvidia.verify_report(device.gpu(bytes(32)), bytes(32), time.time(), root=top.certificate)
    (folder / "status").mkdir(parents=True)
    (folder / "gpu.toml").write_text(reference_values.write(claims.reference_values()))
    (folder / "status").chmod(0o755)
    for place, each in enumerate(responses):
        (folder / "status" / f"{place}.der").write_bytes(each)
    (folder / "policy.toml").write_text(
        'version = 1\n[[admit]]\n[admit.nvidia]\nreference_values = "gpu.toml"\nocsp = "status"\nocsp_max_age = "12h"\n'
    )
    return Settings(policy=load_policy(folder / "policy.toml"))


def collect(device: Device, nonce: bytes) -> list[nvidia.Gpu]:
    return [device.gpu(nonce)]


@pytest.mark.promise(
    "A GPU whose certificates NVIDIA has revoked is rejected, and so is one without a current OCSP response."
)
@pytest.mark.parametrize(
    ("how", "says"),
    {
        "good": "",
        "revoked": "NVIDIA has revoked certificate",
        "unknown": "is unknown to NVIDIA's responder",
        "stale": "more than 12 hours ago (ocsp_max_age)",
        "forged": "is not from NVIDIA",
        "for another certificate": "there is no OCSP response for certificate",
    }.items(),
)
def test_a_worker_whose_gpu_is_revoked_is_refused(tmp_path: Path, how: str, says: str) -> None:
    top = nvidia_mint.root()
    devices = [Device.under(top, number) for number in (1, 2)]
    times = {"start": TODAY - HOUR, "end": TODAY + HOUR}
    good = [each for device in devices for each in ocsp_mint.responses(device, top, **times)]
    rom, provisioner, *_ = ocsp_mint.path_of(devices[1], top)
    namesake = devices[1].above[1].issue("Test GH100 Provisioner ICA 1", nvidia_mint.issuing())
    changed: dict[str, dict[str, object]] = {
        "revoked": {"status": ocsp_mint.REVOKED},
        "unknown": {"status": ocsp_mint.UNKNOWN},
        "stale": {"start": TODAY - 13 * HOUR},
        "forged": {"signer": namesake, "certificates": []},
    }
    responses = list(good)
    if how in changed:
        responses[3] = ocsp_mint.response(rom, provisioner, **{**times, **changed[how]})  # type: ignore[arg-type]
    elif how != "good":
        responses[3] = good[0]
    settings = [
        gpu_settings(tmp_path / str(rank), found, top, devices[0]) for rank, found in enumerate((responses, good))
    ]
    admission = {}
    for rank, (own, device) in enumerate(zip(settings, devices, strict=True)):
        assert own.policy is not None
        ((_, rules),) = own.policy.rules[0].proofs
        assert isinstance(rules, nvidia.Rules)
        policy = Policy((nvidia.verifier(rules, time.time, root=top.certificate),))
        admission[rank] = policy, provers.of_nvidia(partial(collect, device))
    assert admission[0][0].digest == admission[1][0].digest
    with World(2, timeout=FAR if how == "good" else 6.0) as world:
        world.start([0, 1], dict(enumerate(settings)), admission=admission)
        if how == "good":
            assert len(world.members()) == 2
            return
        assert says in world.error(0), world.outcomes
        assert "1 of 2 workers are missing: rank 1" in world.error(0)
        assert "rank 1" in world.error(1)


# -- the policy of an agent -------------------------------------------------------------------------------------------


@pytest.fixture(params=["shared", "sealed"])
def agents_policy(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Site, CurrentPolicy, Policy]:
    """A policy that an agent has read, and reads again whenever it is asked; with a setting that makes it stricter, too."""
    monkeypatch.setattr(agent_admission, "_POLICY_SECONDS", 0.0)
    site = Site(tmp_path, 2)
    site.publish()
    own = JoinCredentials(Settings.from_environment({**site.environment(0), "RINGFENCE_SAME_HOST": request.param}))
    policy, _ = own.admission(timeout=HANG, warn_after=HANG, warn=lambda: None)
    assert own.reads_lists
    return site, CurrentPolicy(own, policy), policy


def test_an_agent_keeps_its_policy_while_no_list_changes(
    agents_policy: tuple[Site, CurrentPolicy, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, current, policy = agents_policy
    assert current() is policy
    site.publish(5, number=2)
    renewed = current()
    assert renewed is not policy and renewed.digest == policy.digest
    assert current() is renewed
    monkeypatch.setattr(agent_admission, "_POLICY_SECONDS", 60.0)  # unauthenticated peers must not cause readings
    site.publish(6, number=3)
    assert current() is renewed


def test_an_agent_refuses_peers_while_its_policy_cannot_be_read(
    agents_policy: tuple[Site, CurrentPolicy, Policy],
) -> None:
    site, current, _ = agents_policy
    (site.folder / "0" / "lists" / "ca.crl").unlink()
    with pytest.raises(AdmissionError, match=r"cannot be read again: .*the folder lists is empty") as caught:
        current()
    assert caught.value.to_peer == "the other agent cannot read its policy"
    site.publish()
    current()


@pytest.mark.promise("A revoked certificate admits to no further session.")
def test_a_revoked_agent_that_tries_again_stays_refused(agents_policy: tuple[Site, CurrentPolicy, Policy]) -> None:
    site, current, _ = agents_policy
    home = site.folder / "1"
    revoked = certificate.read_credential((home / "own.pem").read_bytes(), (home / "own.key").read_bytes())

    def verified() -> certificate.Claims:
        (verifier,) = current().verifiers
        assert isinstance(verifier, certificate.CertificateVerifier)
        return certificate.verify_chain(verifier._rules, revoked.chain, time.time())[0]

    assert verified().id.endswith("/worker/w1")
    site.publish(101, number=2)
    for _ in range(3):
        with pytest.raises(AdmissionError, match="revoked"):
            verified()


def test_an_agent_whose_policy_was_edited_refuses_every_later_peer(
    agents_policy: tuple[Site, CurrentPolicy, Policy],
) -> None:
    """Not only the first: the policy of before says nothing about who was revoked in the same edit."""
    site, current, _ = agents_policy
    (site.folder / "0" / "policy.toml").write_text(LISTED.replace("12h", "13h"))
    for _ in range(3):
        with pytest.raises(AdmissionError, match="was changed while this agent ran: start the run again"):
            current()


def test_a_policy_that_cannot_be_read_is_not_read_for_every_peer(
    agents_policy: tuple[Site, CurrentPolicy, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, current, _ = agents_policy
    (site.folder / "0" / "lists" / "ca.crl").unlink()
    with pytest.raises(AdmissionError):
        current()
    monkeypatch.setattr(agent_admission, "_POLICY_SECONDS", 60.0)
    site.publish()
    with pytest.raises(AdmissionError, match="cannot be read again"):
        current()
