"""The manifests in examples/, and what their containers run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

ROOT = Path(__file__).parents[1]
OVERLAYS = sorted(ROOT.glob("examples/kubernetes/overlays/*/kustomization.yaml"))
FILES = sorted([*ROOT.glob("examples/kubernetes/*.yaml"), *ROOT.glob("examples/kubeflow/*.yaml"), *OVERLAYS])


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def documents(file: Path) -> list[dict[str, Any]]:
    """As Kubernetes gets them. A kustomization stands for what it makes."""
    if file.name == "kustomization.yaml":
        return kustomized(file)
    return parsed(file.read_text())


def parsed(text: str) -> list[Any]:
    """As Kubernetes reads them: YAML 1.1, where 0440 is an octal number."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def kustomized(file: Path) -> list[dict[str, Any]]:
    """Apply the fields of Kustomize that the examples have. A nightly test compares the result with kubectl's."""
    (fields,) = parsed(file.read_text())
    assert fields.pop("apiVersion") == "kustomize.config.k8s.io/v1beta1" and fields.pop("kind") == "Kustomization"
    made: list[dict[str, Any]] = []
    for name in fields.pop("resources"):
        place = file.parent / name
        made += documents(place / "kustomization.yaml" if place.is_dir() else place)
    for each in fields.pop("configMapGenerator", []):
        data = {name: (file.parent / name).read_text() for name in each.pop("files")}
        made.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": each.pop("name")}, "data": data})
        assert not each and fields["generatorOptions"] == {"disableNameSuffixHash": True}
    for each in fields.pop("patches", []):
        wanted = each["target"]
        (target,) = (one for one in made if (one["kind"], one["metadata"]["name"]) == (wanted["kind"], wanted["name"]))
        (operations,) = parsed((file.parent / each["path"]).read_text())
        jsonpatch.apply_patch(target, operations, in_place=True)
    if "namespace" in fields:
        namespace = fields.pop("namespace")
        for one in made:
            one["metadata"]["namespace"] = namespace
    assert set(fields) <= {"generatorOptions"}, f"{name_of(file)}: {sorted(fields)} is not known here"
    return made


def of_kind(file: Path, *kinds: str) -> dict[str, Any]:
    (found,) = (each for each in documents(file) if each["kind"] in kinds)
    return found


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = (each for each in items if each["name"] == name)
    return found


def job_of(file: Path) -> dict[str, Any]:
    """The specification of the Job that has the training nodes as its pods."""
    document = of_kind(file, "Job", "JobSet", "TrainingRuntime")
    if document["kind"] == "Job":
        return dict(document["spec"])
    jobset = document["spec"]["template"]["spec"] if document["kind"] == "TrainingRuntime" else document["spec"]
    return dict(named(jobset["replicatedJobs"], "node")["template"]["spec"])


def policy_of(file: Path) -> str:
    (text,) = (each["data"]["policy.toml"] for each in documents(file) if "policy.toml" in each.get("data", {}))
    return str(text)


def pod_of(file: Path) -> dict[str, Any]:
    return dict(job_of(file)["template"]["spec"])


class Node:
    """What `ringfence run` gets on one node: its command line and its environment."""

    def __init__(self, file: Path) -> None:
        container = named(pod_of(file)["containers"], "node")
        self.env = {each["name"]: each.get("value", "1") for each in container["env"]}  # "1" stands for a field's value
        self.command: list[str] = container.get("command", [])
        if not self.command:  # Trainer sets these variables: pkg/runtime/framework/plugins/torch of kubeflow/trainer
            document = of_kind(file, "TrainJob")
            trainer, job = document["spec"]["trainer"], document["metadata"]["name"]
            self.command = trainer["command"]
            self.env |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
            self.env |= {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": f"{job}-node-0-0.{job}", "PET_MASTER_PORT": "29500"}

    def expanded(self) -> list[str]:
        """The command as Kubernetes starts it: $(NAME) is replaced by the variable of the container."""
        return [re.sub(r"\$\((\w+)\)", lambda found: self.env[found[1]], word) for word in self.command]
