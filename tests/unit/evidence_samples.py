"""Sessions whose workers presented proofs of test authorities and test hardware, and the first lines of their logs."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from ringfence.admission.binding import Binding, Role, bind, proof_digest
from ringfence.admission.entry import Entry, Listing
from ringfence.admission.messages import Hello
from ringfence.admission.peer_verification import Presentation
from ringfence.admission.policy_file.policy_file import PolicyFile, Rule
from ringfence.admission.proofs import azure, bundle, certificate, kinds, nvidia, reference_values, secret, snp, tdx
from ringfence.admission.roster import roster_digest
from ringfence.admission.tree import parent_of
from ringfence.record import begin, log
from ringfence.record.begin import JoinRecord
from ringfence.record.log import LogEntry
from ringfence.record.log_file import Blobs
from tests.certificates import HOUR, Authority, spiffe
from tests.unit import azure_mint, nvidia_mint, snp_mint, tdx_mint
from tests.unit.admission_samples import SUITES, fixed_bytes
from tests.unit.log_samples import SUITE, TABLE, VERSIONS, Session, spki

NOW = int(time.time())
LONG_AGO = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)  # all certificates of then have expired
SECRET = bytes(range(32))
Make = Callable[[int, Binding], bytes]

HEAD = "version = 1\n[[admit]]\n"
BY_CERTIFICATE = (
    '[admit.certificate]\nca = "ca.pem"\ntrust_domain = "example.org"\nids = "spiffe://example.org/worker/*"\n'
)
LISTED = BY_CERTIFICATE + 'crl = "lists"\ncrl_max_age = "12h"\n'


@dataclass(frozen=True)
class Run:
    """A session under one policy. `make` makes the proof of a rank for a binding."""

    kind: int
    text: str | None  # of the policy; None: there is none, and the secret admits
    make: Make
    at: int = NOW
    files: Mapping[str, bytes] = field(default_factory=dict)
    size: int = 3
    same_host: str = "shared"
    name: str = "first"  # of the session: another one has other keys
    hosts: tuple[str, ...] = ()
    run_id: str = "run-7"

    @cached_property
    def policy(self) -> PolicyFile | None:
        if self.text is None:
            return None
        contents = {"policy.toml": self.text.encode(), **self.files}
        file = kinds.read(contents["policy.toml"], lambda name, limit: contents[name], list_folder=self._listed)
        return replace(file, name="policy.toml", contents=contents)

    def _listed(self, path: str) -> list[str] | None:
        names = [name.removeprefix(f"{path}/") for name in self.files if name.startswith(f"{path}/")]
        return [name for name in names if "/" not in name] or None

    @property
    def digest(self) -> bytes:
        by_secret = PolicyFile((Rule((("secret", secret.Rules()),)),))
        return kinds.digest_of(replace(self.policy or by_secret, same_host=self.same_host))

    @property
    def session(self) -> Session:
        return Session(self.name, self.size, hosts=self.hosts, run=self.run_id)

    def entry(self, rank: int) -> Entry:
        return self.session.entry(rank)

    def binding(self, rank: int) -> Binding:
        """What the proof of `rank` covers: presented to its parent; by rank 0, to rank 1."""
        parent = parent_of(rank)
        own, other = self.entry(rank), self.entry(1 if parent is None else parent)
        prover, verifier = (Hello(each, self.digest, SUITES, (self.kind,)) for each in (own, other))
        role = Role.PARENT if parent is None else Role.CHILD
        exporter = fixed_bytes(f"exporter {rank}")
        return bind(role, prover, verifier, own.tls_key_digest, other.tls_key_digest, exporter)

    @cached_property
    def proofs(self) -> list[bytes]:
        return [self.make(rank, self.binding(rank)) for rank in range(self.size)]

    @property
    def listings(self) -> tuple[Listing, ...]:
        others = range(1, self.size)
        digests = [bytes(32), *(proof_digest(self.kind, self.binding(rank), self.proofs[rank]) for rank in others)]
        return tuple(Listing(self.entry(rank), self.kind, digest, b"") for rank, digest in enumerate(digests))

    def presentation(self, rank: int) -> Presentation | None:
        if self.size == 1:
            return None
        return Presentation(self.kind, self.at, self.binding(rank), self.proofs[rank])

    def join(self, rank: int) -> JoinRecord:
        roster = roster_digest(self.digest, self.listings, SUITE, TABLE)
        key, public = self.session.tls_key(rank), self.session.public(rank)
        signed = begin.certified_bytes(self.entry(rank).digest, roster, public)
        return JoinRecord(
            listings=self.listings,
            policy_digest=self.digest,
            same_host=self.same_host,
            suite=SUITE,
            table=TABLE,
            roster_digest=roster,
            presentation=self.presentation(rank),
            tls_key=spki(key),
            certified=key.sign(signed, ec.ECDSA(hashes.SHA256())),
        )

    def begin(
        self, rank: int, blobs: Blobs, policy: PolicyFile | None = None, before: str = "", **changes: Any
    ) -> LogEntry:
        """The first line of a worker's log. `policy`: the one that it keeps; `changes`: of its presentation."""
        join, public = self.join(rank), self.session.public(rank)
        kept = policy or self.policy
        fields = begin.fields_of(join, rank, public, blobs, policy=kept, versions=VERSIONS, before=before)
        fields["presentation"] |= changes
        return LogEntry(log.BEGIN, 0, log.FIRST.hex(), (self.at + 5) * 1000, fields)


# -- certificates ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """An authority and the certificates of its workers, of a time. The serial number of rank r is 100 + r."""

    moment: datetime.datetime = LONG_AGO

    @cached_property
    def authority(self) -> Authority:
        return Authority(start=self.moment - 24 * HOUR, end=self.moment + 24 * HOUR)

    def credential(self, rank: int) -> certificate.Credential:
        start, end = self.moment - HOUR, self.moment + HOUR
        return self.authority.issue(spiffe(f"worker/{rank}"), serial=100 + rank, start=start, end=end)

    def prove(self, rank: int, binding: Binding) -> bytes:
        return certificate.CertificateProver(self.credential(rank)).prove(binding)

    def revoked(self, *serials: int, number: int = 1) -> bytes:
        hours = self.moment - HOUR + number * datetime.timedelta(minutes=1)
        return self.authority.revoke(*serials, number=number, start=hours, end=self.moment + HOUR)

    def run(self, text: str = HEAD + BY_CERTIFICATE, **files: bytes) -> Run:
        """A run of the site's workers. `files`: lists of revoked certificates, by their names in the folder."""
        lists = {f"lists/{name}": content for name, content in files.items()}
        at = int(self.moment.timestamp())
        return Run(2, text, self.prove, at, {"ca.pem": self.authority.pem, **lists})


# -- hardware -------------------------------------------------------------------------------------------------------


def _hexes(**values: bytes) -> str:
    return "".join(f'{name} = "{value.hex()}"\n' for name, value in values.items())


def tdx_keys(**collateral: Any) -> tuple[str, dict[str, bytes]]:
    """The keys of a table for the test's TD, and the file that they name."""
    rules = tdx_mint.foundry().rules
    registers = {f"rtmr{index}": value for index, (value,) in enumerate(rules.rtmrs)}
    text = _hexes(mrtd=rules.mrtd[0], **registers) + 'collateral = "tdx.json"\n'
    return text, {"tdx.json": tdx_mint.foundry().collateral(**collateral).text.encode()}


def tdx_run(at: int = NOW, **collateral: Any) -> Run:
    text, files = tdx_keys(**collateral)
    return Run(tdx.KIND, f"{HEAD}[admit.tdx]\n{text}", lambda _, to: tdx_mint.foundry().quote(to.digest), at, files)


def snp_keys() -> str:
    versions = ", ".join(f"{name} = {value}" for name, value in snp_mint.VERSIONS.items() if name != "fmc")
    return _hexes(measurement=snp_mint.MEASUREMENT) + f"minimum_tcb.milan = {{ {versions} }}\n"


def snp_run(at: int = NOW, days: tuple[float, float] = (-1, 30), revoked: bytes | None = None) -> Run:
    def make(rank: int, binding: Binding) -> bytes:
        vm = snp_mint.foundry()
        return snp.encode(vm.report(binding.digest), vm.certificate(days=days))  # type: ignore[arg-type]

    text = f"{HEAD}[admit.snp]\n{snp_keys()}"
    if revoked is None:
        return Run(snp.KIND, text, make, at)
    return Run(snp.KIND, text + 'crl = "milan.crl"\n', make, at, {"milan.crl": revoked})


TOP = nvidia_mint.root()
GPU = nvidia_mint.Device.under(TOP)


def nvidia_run(*responses: bytes) -> Run:
    """A run with a GPU, and with OCSP responses if there are any."""
    claims = nvidia.verify_report(GPU.gpu(bytes(32)), bytes(32), nvidia_mint.NOW, root=TOP.certificate)
    files = {"gpu.toml": reference_values.write(claims.reference_values()).encode()}
    files |= {f"status/{number}": each for number, each in enumerate(responses)}
    text = f'{HEAD}[admit.nvidia]\nreference_values = "gpu.toml"\n'
    text += 'ocsp = "status"\nocsp_max_age = "12h"\n' if responses else ""

    def make(rank: int, binding: Binding) -> bytes:
        return nvidia.encode([GPU.gpu(nvidia.nonce_of(binding.digest))])

    return Run(nvidia.KIND, text, make, int(nvidia_mint.NOW), files)


def azure_run(name: str) -> Run:
    text, files = (snp_keys(), {}) if name == "azure_snp" else tdx_keys()
    pcrs = ", ".join(f'{index} = "{azure_mint.PCRS[index].hex()}"' for index in (0, 4, 7))

    def make(rank: int, binding: Binding) -> bytes:
        vm = azure_mint.machine()
        attestation = vm.attestation(azure.nonce_of(binding.digest))
        return vm.snp_proof(attestation) if name == "azure_snp" else vm.tdx_proof(attestation)

    kind = kinds.KINDS[name].number
    return Run(kind, f"{HEAD}[admit.{name}]\n{text}pcrs = {{ {pcrs} }}\n", make, NOW, files)


def secret_run() -> Run:
    """A run without a policy file: the secret admits."""
    return Run(secret.SharedSecret.kind, None, lambda rank, binding: SECRET)


def bundle_run(site: Site) -> Run:
    """A run whose workers need the secret, a certificate and a quote."""
    text, files = tdx_keys()
    text = f"{HEAD}{BY_CERTIFICATE}[admit.secret]\n[admit.tdx]\n{text}"

    def make(rank: int, binding: Binding) -> bytes:
        quote = tdx_mint.foundry().quote(binding.digest)
        return bundle.encode([(1, SECRET), (2, site.prove(rank, binding)), (tdx.KIND, quote)])

    return Run(bundle.KIND, text, make, NOW, {"ca.pem": site.authority.pem, **files})


@pytest.fixture
def test_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the tests' hardware: no policy file, and so no record, can name a root."""
    monkeypatch.setattr(tdx, "pinned_root", lambda: tdx_mint.foundry().root)
    monkeypatch.setattr(snp, "pinned", lambda: snp_mint.foundry().roots)
    monkeypatch.setattr(nvidia, "pinned_root", lambda: TOP.certificate)
