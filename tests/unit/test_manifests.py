"""The manifests in examples/ are valid under the schemas of their own kinds, and their parts fit together."""

from __future__ import annotations

import copy
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from torch.distributed.run import get_args_parser

from ringfence.admission.proofs.certificate import Rules, verify_chain
from ringfence.config.settings import KNOWN, load_policy
from ringfence.errors import AdmissionError
from tests.certificates import Authority, now, spiffe, x509
from tests.manifests import FILES, ROOT, Node, documents, job_of, name_of, named, of_kind, pod_of, policy_of

SCHEMAS = [json.loads(file.read_text()) for file in sorted((ROOT / "tests/data/schemas").glob("*.json"))]
KINDS: dict[str, str] = {kind: place for schema in SCHEMAS for kind, place in schema["kinds"].items()}
DEFINITIONS: dict[str, Any] = {name: each for schema in SCHEMAS for name, each in schema["$defs"].items()}
FREE = {  # objects whose fields may have any name
    "annotations", "data", "labels", "limits", "matchLabels", "requests", "selector", "volumeAttributes",
}  # fmt: skip
POD_NAME = "train-node-0-0-x7k2p"


@cache
def validator_of(kind: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": KINDS[kind], "$defs": DEFINITIONS})


def problems(document: dict[str, Any]) -> list[str]:
    """What the schema of the document's kind objects to."""
    validator = validator_of(f"{document['apiVersion']} {document['kind']}")
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def arguments(command: list[str], env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A command line of `ringfence run`, read by torchrun's own parser: they take the same options."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert command[:2] == ["ringfence", "run"]
    return get_args_parser().parse_args(command[2:])


# -- schemas --------------------------------------------------------------------------------------------------------


def test_there_are_manifests() -> None:
    assert len(FILES) == 5


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_document_is_valid_under_the_schema_of_its_kind(file: Path) -> None:
    for document in documents(file):
        assert problems(document) == []


def renamings(node: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every field with a fixed name."""
    if isinstance(node, list):
        for each in node:
            yield from renamings(each)
    elif isinstance(node, dict):
        for name, value in node.items():
            yield node, name
            if name not in FREE:
                yield from renamings(value)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_misspelt_field_is_refused(file: Path) -> None:
    checked = 0
    for document in documents(file):
        for holder, name in list(renamings(document)):
            if holder is document and name in ("apiVersion", "kind"):
                continue  # they select the schema
            value = holder.pop(name)
            holder[f"{name}s"] = value
            assert problems(document), f"{document['kind']}: {name}s was accepted"
            del holder[f"{name}s"]
            holder[name] = value
            checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("JobSet", ("spec", "network", "enableDNSHostnames"), "yes"),
        ("JobSet", ("spec", "replicatedJobs", 0, "template", "spec", "completions"), "2"),
        ("NetworkPolicy", ("spec", "ingress", 0, "ports", 1, "endPort"), "20015"),
        ("Certificate", ("spec", "privateKey", "algorithm"), "P-256"),
        ("Issuer", ("spec",), None),
        ("TrainJob", ("spec", "trainer", "numNodes"), "2"),
        ("TrainingRuntime", ("spec", "mlPolicy", "torch"), []),
        ("Service", ("spec", "publishNotReadyAddresses"), "true"),
        ("Job", ("spec", "backoffLimit"), 1.5),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(kind: str, path: tuple[str | int, ...], value: object) -> None:
    document = next(each for file in FILES for each in documents(file) if each["kind"] == kind)
    changed = copy.deepcopy(document)
    holder: Any = changed
    for step in path[:-1]:
        holder = holder[step]
    assert path[-1] in holder if isinstance(holder, dict) else True
    holder[path[-1]] = value
    assert problems(changed)


# -- parts that must fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_commands_are_understood_by_torchrun(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(file)
    read = arguments(node.expanded(), node.env, monkeypatch)
    job = job_of(file)
    assert read.nnodes == str(job.get("completions", 2))
    assert read.node_rank == 1
    assert read.max_restarts == 3
    assert (ROOT / read.training_script).is_file()
    assert tomllib.loads(policy_of(file))["min_workers"] == int(read.nnodes) * int(read.nproc_per_node)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_endpoint_is_the_name_that_the_scheduler_gives_node_0(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(file)
    host = arguments(node.expanded(), node.env, monkeypatch).rdzv_endpoint.partition(":")[0]
    document = of_kind(file, "Job", "JobSet", "TrainJob")
    name = document["metadata"]["name"]
    if document["kind"] == "Job":  # hostname of an Indexed Job's pod, and the headless Service
        service = of_kind(file, "Service")
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
        assert pod_of(file)["subdomain"] == service["metadata"]["name"]
        assert host == f"{name}-0.{service['metadata']['name']}"
    elif document["kind"] == "JobSet":  # <JobSet>-<replicated job>-<index of the job>-<index of the pod>.<subdomain>
        assert host == f"{name}-node-0-0.{document['spec']['network']['subdomain']}"
    else:
        assert host == f"{name}-node-0-0.{name}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_network_policy_opens_the_ports_that_workers_use(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(file)
    read = arguments(node.expanded(), node.env, monkeypatch)
    spec = of_kind(file, "NetworkPolicy")["spec"]
    rule = spec["ingress"][0]
    rendezvous, workers = rule["ports"]
    assert rendezvous["port"] == int(read.rdzv_endpoint.partition(":")[2])
    assert f"{workers['port']}-{workers['endPort']}" == node.env["RINGFENCE_PORTS"]
    assert workers["endPort"] - workers["port"] + 1 >= 2 * int(read.nproc_per_node)
    assert rule["from"] == [{"podSelector": spec["podSelector"]}] == spec["egress"][0]["to"]
    assert spec["egress"][0]["ports"] == rule["ports"]
    assert len(spec["ingress"]) == 1  # nothing else may connect


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_mount_has_a_volume_and_every_path_a_mount(file: Path) -> None:
    pod = pod_of(file)
    volumes = {each["name"] for each in pod["volumes"]}
    for container in (*pod.get("initContainers", []), *pod["containers"]):
        assert {each["name"] for each in container["volumeMounts"]} <= volumes
    mounts = {each["mountPath"] for each in named(pod["containers"], "node")["volumeMounts"]}
    env = Node(file).env
    assert {name for name in env if name.startswith("RINGFENCE_")} <= set(KNOWN)
    paths = [value for name, value in env.items() if name.endswith(("_FILE", "_POLICY"))]
    assert len(paths) >= 2
    assert all(str(Path(path).parent) in mounts for path in paths)
    maps = {each["metadata"]["name"] for each in documents(file) if each["kind"] == "ConfigMap"}
    assert {each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each} == maps


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_only_the_user_of_the_workers_can_read_their_credentials(file: Path) -> None:
    """Files of a Secret or a CSI volume belong to root, and to fsGroup: a worker would refuse them."""
    pod = pod_of(file)
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True and context["runAsUser"] == context["fsGroup"] != 0
    assert named(pod["volumes"], "credentials")["emptyDir"] == {"medium": "Memory"}
    helper = [each["data"]["helper.conf"] for each in documents(file) if "helper.conf" in each.get("data", {})]
    if helper:
        assert re.search(r"^key_file_mode = 0600$", helper[0], re.MULTILINE)
    else:
        command = pod["initContainers"][0]["command"]
        assert command[:3] == ["install", "-m", "600"] and command[-1] == "/credentials/"
        assert {Path(each).name for each in command[3:-1]} >= {
            Path(value).name for name, value in Node(file).env.items() if name.endswith("_FILE")
        }


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_policy_admits_the_pod_and_no_other(file: Path, tmp_path: Path) -> None:
    """With certificates as the issuers that the manifest asks make them."""
    authority = Authority()
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    (tmp_path / "policy.toml").write_text(re.sub(r'ca = "/credentials/[\w.]+"', 'ca = "ca.pem"', policy_of(file)))
    (rule,) = load_policy(tmp_path / "policy.toml").rules
    ((kind, rules),) = rule.proofs
    if kind == "secret":
        assert Node(file).env["RINGFENCE_SECRET_FILE"]
        return
    assert isinstance(rules, Rules)
    volumes = {each["csi"]["driver"]: each["csi"] for each in pod_of(file)["volumes"] if "csi" in each}
    if "csi.spiffe.io" in volumes:
        namespace, account = of_kind(file, "JobSet")["metadata"]["namespace"], pod_of(file)["serviceAccountName"]
        good, bad = spiffe(f"ns/{namespace}/sa/{account}"), spiffe(f"ns/{namespace}/sa/default")
    else:
        asked = volumes["csi.cert-manager.io"]["volumeAttributes"]["csi.cert-manager.io/dns-names"]
        name = asked.replace("${POD_NAME}", POD_NAME)
        good = x509.DNSName(name.replace("${POD_NAMESPACE}", "ml"))
        bad = x509.DNSName(name.replace("${POD_NAMESPACE}", "other"))
    claims, _ = verify_chain(rules, authority.issue(good).chain, now())
    assert claims.id == good.value
    with pytest.raises(AdmissionError, match="the policy admits"):
        verify_chain(rules, authority.issue(bad).chain, now())


def test_settings_of_spiffe_helper_are_documented_ones() -> None:
    """Those of the README of spiffe/spiffe-helper 0.11.0 that concern X.509 certificates."""
    known = {
        "agent_address", "cmd", "cmd_args", "pid_file_name", "cert_dir", "daemon_mode", "add_intermediates_to_bundle",
        "renew_signal", "svid_file_name", "svid_key_file_name", "svid_bundle_file_name", "include_federated_domains",
        "cert_file_mode", "key_file_mode", "hint", "omit_expired",
    }  # fmt: skip
    file = ROOT / "examples/kubernetes/overlays/spire/kustomization.yaml"
    (text,) = (each["data"]["helper.conf"] for each in documents(file) if "helper.conf" in each.get("data", {}))
    values = dict(line.split(" = ") for line in text.splitlines())
    assert set(values) <= known
    written = {f'"{Path(value).name}"' for name, value in Node(file).env.items() if name.endswith("_FILE")}
    assert written | {'"bundle.pem"'} == {value for name, value in values.items() if name.startswith("svid_")}


# -- guides and the batch script ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guide", "example"),
    [
        ("kubernetes", "examples/kubernetes/base/jobset.yaml"),
        ("slurm", "examples/slurm/train.sbatch"),
        ("slurm", "examples/slurm/policy.toml"),
    ],
)
def test_guides_show_the_examples_as_they_are(guide: str, example: str) -> None:
    shown = re.findall(r"```\w+\n(.*?)```", (ROOT / f"docs/guides/{guide}.md").read_text(), re.DOTALL)
    assert (ROOT / example).read_text() in shown


def test_the_guide_to_kubeflow_shows_the_trainjob_as_it_is() -> None:
    parts = (ROOT / "examples/kubeflow/trainjob.yaml").read_text().split("---\n")
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/guides/kubeflow.md").read_text(), re.DOTALL)
    assert shown in parts and "\nkind: TrainJob\n" in shown


@pytest.mark.parametrize("guide", ["kubernetes", "kubeflow", "slurm"])
def test_manifests_within_guides_are_valid(guide: str) -> None:
    shown = re.findall(r"```yaml\n(.*?)```", (ROOT / f"docs/guides/{guide}.md").read_text(), re.DOTALL)
    for text in shown:
        for document in yaml.safe_load_all(text):
            assert isinstance(document, list) or problems(document) == []  # a list is a part of a container


def test_the_batch_script_starts_one_ringfence_run_on_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (ROOT / "examples/slurm/train.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.MULTILINE))
    assert options["nodes"] == "2" and options["ntasks-per-node"] == "1"
    (inner,) = re.findall(r"^srun .* bash -c '\n(.*?)'$", script, re.MULTILINE | re.DOTALL)
    words = shlex.split(inner.replace("\\\n", " "))
    assert words.pop(0) == "exec"
    values = {
        "SLURM_JOB_NUM_NODES": options["nodes"],
        "SLURM_NODEID": "1",
        "ENDPOINT": "one:29407",
        "SLURM_JOB_ID": "7",
    }
    read = arguments([values[word[1:]] if word.startswith("$") else word for word in words], {}, monkeypatch)
    assert (read.nnodes, read.node_rank, read.rdzv_endpoint, read.rdzv_id) == ("2", 1, "one:29407", "7")
    policy = load_policy(ROOT / "examples/slurm/policy.toml")
    assert policy.min_workers == int(read.nnodes) * int(read.nproc_per_node)
