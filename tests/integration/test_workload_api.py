"""Certificates from a SPIFFE Workload API: a gRPC server of the tests on a Unix socket, and a worker's settings."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from ringfence import cli
from ringfence.admission.binding import Binding
from ringfence.admission.policy import Evidence
from ringfence.admission.proofs import certificate_signature
from ringfence.config.settings import Settings
from ringfence.errors import ConfigurationError
from ringfence.evidence import workload_api
from ringfence.session.join.provers import Machine, policy_of
from tests.certificates import Authority, now, spiffe
from tests.limits import HANG
from tests.unit.admission_samples import worker
from tests.workload_api_server import ID, Response, WorkloadApi, response_of

pytestmark = pytest.mark.processes


@pytest.fixture
def api(tmp_path: Path) -> Iterator[WorkloadApi]:
    made = WorkloadApi(tmp_path / "agent.sock")
    yield made
    made.close()


def environ(api: WorkloadApi, folder: Path, ids: str = "spiffe://example.org/trainer/*") -> dict[str, str]:
    (folder / "ca.pem").write_bytes(api.authority.pem)
    policy = folder / "policy.toml"
    policy.write_text(
        f'version = 1\n[[admit]]\n[admit.certificate]\nca = "ca.pem"\ntrust_domain = "example.org"\nids = "{ids}"\n'
    )
    return {"RINGFENCE_POLICY": str(policy), "RINGFENCE_SPIFFE_SOCKET": api.socket}


def test_a_worker_is_admitted_with_an_svid_of_the_workload_api(api: WorkloadApi, tmp_path: Path) -> None:
    settings = Settings.from_environment(environ(api, tmp_path))
    policy, prover = policy_of(settings, Machine(clock=now))
    binding, entry = Binding(b"the preimage of a binding"), worker(1).entry
    proof = prover.prove(binding)
    (verifier,) = policy.verifiers
    assert verifier.verify(Evidence(entry, prover.kind, proof, binding)) == ID
    assert len(certificate_signature.decode(proof)[0]) == 2, "the intermediate is presented too"
    assert api.requests == 1
    settings.forget()
    with pytest.raises(AttributeError):
        prover.prove(binding)


def test_each_session_gets_a_new_svid(api: WorkloadApi, tmp_path: Path) -> None:
    """Settings are read for each session; nothing is kept between them."""
    found = [Settings.from_environment(environ(api, tmp_path)).certificate for _ in range(2)]
    assert api.requests == 2
    assert found[0] is not None and found[1] is not None
    assert found[0].chain[0] != found[1].chain[0]
    assert found[0].key.public_key() != found[1].key.public_key()


def test_an_svid_that_the_policy_does_not_name_is_refused_before_it_is_presented(
    api: WorkloadApi, tmp_path: Path
) -> None:
    settings = Settings.from_environment(environ(api, tmp_path, "spiffe://example.org/other/*"))
    with pytest.raises(ConfigurationError, match=f"the certificate is for {ID}; the policy admits"):
        policy_of(settings, Machine(clock=now))


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED .*register it with the issuer"),
        (grpc.StatusCode.UNIMPLEMENTED, "not that of a Workload API"),
        (grpc.StatusCode.INTERNAL, "INTERNAL .*check the agent's log"),
    ],
)
def test_an_error_of_the_workload_api_says_what_to_do(api: WorkloadApi, code: grpc.StatusCode, advice: str) -> None:
    api.code = code
    with pytest.raises(ConfigurationError, match=advice):
        workload_api.fetch(api.socket)


def test_without_a_server_the_error_names_the_socket(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"at .*/none.sock answers UNAVAILABLE .*check that the agent runs"):
        workload_api.fetch(f"unix://{tmp_path}/none.sock")


def test_a_server_that_does_not_answer_is_given_up(api: WorkloadApi) -> None:
    leave = threading.Event()

    def block() -> bytes:
        leave.wait(HANG)
        return b""

    api.answer = block
    try:
        with pytest.raises(ConfigurationError, match=r"DEADLINE_EXCEEDED .*check that the agent runs"):
            workload_api.fetch(api.socket, seconds=0.5)
    finally:
        leave.set()


def _key_of_another(api: WorkloadApi) -> bytes:
    one, two = (api.authority.issue(spiffe("trainer/7")) for _ in range(2))
    made = response_of(one, api.authority)
    made.svids[0].x509_svid_key = response_of(two, api.authority).svids[0].x509_svid_key
    encoded: bytes = made.SerializeToString()
    return encoded


def _changed(**values: object) -> Callable[[WorkloadApi], bytes]:
    def make(api: WorkloadApi) -> bytes:
        made = Response.FromString(api.issue())
        for name, value in values.items():
            setattr(made.svids[0], name, value)
        encoded: bytes = made.SerializeToString()
        return encoded

    return make


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda api: b"", "it has no SVID"),
        (lambda api: Response(crl=[b"x"]).SerializeToString(), "it has no SVID"),
        (lambda api: b"\x08\x01", "it has no SVID"),
        (lambda api: b"\x0a\x7f", "truncated message"),
        (lambda api: b"\x0b", "a field of type 3"),
        (lambda api: b"\xff" * 11, "overlong number"),
        (_changed(x509_svid_key=b""), "name, certificate or key is missing"),
        (_changed(spiffe_id="https://example.org"), "not a SPIFFE ID"),
        (_changed(x509_svid=b"\x30\x03\x02\x01"), "unusable SVID"),
        (_changed(x509_svid_key=b"no key"), "not a private key"),
        (_key_of_another, "the key is not that of the first certificate"),
        (lambda api: bytes(2 << 20), "RESOURCE_EXHAUSTED"),
    ],
)
def test_a_response_that_is_no_svid_is_refused(
    api: WorkloadApi, answer: Callable[[WorkloadApi], bytes], reason: str
) -> None:
    made = answer(api)
    api.answer = lambda: made
    with pytest.raises(ConfigurationError, match=reason):
        workload_api.fetch(api.socket)


def test_the_first_svid_is_the_one_that_is_used(api: WorkloadApi) -> None:
    answer = api.issue()
    made = Response.FromString(answer)
    other = Authority().issue(spiffe("trainer/8"))
    made.svids.extend(response_of(other, api.authority, "spiffe://example.org/trainer/8").svids)
    assert workload_api.parse(made.SerializeToString()) == workload_api.parse(answer)


def test_settings_that_contradict_each_other_are_refused(api: WorkloadApi, tmp_path: Path) -> None:
    good = environ(api, tmp_path)
    with pytest.raises(ConfigurationError, match="are both set"):
        Settings.from_environment(good | {"RINGFENCE_CERTIFICATE_FILE": "x", "RINGFENCE_KEY_FILE": "y"})
    for socket in ("tcp://127.0.0.1:8081", "agent.sock", "unix:agent.sock"):
        with pytest.raises(ConfigurationError, match="name a Unix socket"):
            Settings.from_environment(good | {"RINGFENCE_SPIFFE_SOCKET": socket})
    (tmp_path / "policy.toml").write_text("version = 1\n[[admit]]\n[admit.secret]\n")
    secret = tmp_path / "run.secret"
    assert cli.main(["secret", "new", str(secret)]) == 0
    with pytest.raises(ConfigurationError, match="RINGFENCE_SPIFFE_SOCKET is set, and no policy asks for certificates"):
        Settings.from_environment(good | {"RINGFENCE_SECRET_FILE": str(secret)})
    assert api.requests == 0


def test_without_grpcio_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ConfigurationError, match=r"grpcio is needed .*pip install"):
        workload_api.load_library()
