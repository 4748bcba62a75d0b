"""Write the schemas that examples/ are checked against, into tests/data/schemas, from packages that publish them.

    python -m venv build/schemas
    build/schemas/bin/pip install kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
    build/schemas/bin/pip install cloudcoil.models.cert_manager==1.17.1.0
    build/schemas/bin/python -m scripts.schemas

Kept are the kinds that the examples use and what these refer to, without descriptions. Every object with named fields is
closed, so that a misspelt field is an error, and no field may be null. tests/data/schemas/README.md has the sources.
"""

from __future__ import annotations

import importlib
import importlib.resources
import json
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[1] / "tests" / "data" / "schemas"
PREFIX: Final = "#/$defs/"
META: Final = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
DROPPED: Final = {"description", "title", "default", "format"}  # formats such as int32 are no formats of JSON Schema
KUBERNETES: Final = {
    "v1 ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "v1 Secret": "io.k8s.api.core.v1.Secret",
    "v1 Service": "io.k8s.api.core.v1.Service",
    "v1 ServiceAccount": "io.k8s.api.core.v1.ServiceAccount",
    "batch/v1 Job": "io.k8s.api.batch.v1.Job",
    "networking.k8s.io/v1 NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
}
TRAINER: Final = {
    "jobset.x-k8s.io/v1alpha2 JobSet": "JobsetV1alpha2JobSet",
    "trainer.kubeflow.org/v1alpha1 TrainJob": "TrainerV1alpha1TrainJob",
    "trainer.kubeflow.org/v1alpha1 TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
CERT_MANAGER: Final = {
    "cert-manager.io/v1 Certificate": "Certificate",
    "cert-manager.io/v1 Issuer": "Issuer",
}


def tidy(node: Any) -> Any:
    """A schema without prose and null, whose objects take their named fields only."""
    if isinstance(node, list):
        return [tidy(each) for each in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key not in DROPPED and not key.startswith("x-")}
    if "anyOf" in kept:
        others = [each for each in kept["anyOf"] if each != {"type": "null"}]
        if len(others) == 1:
            kept = {**{key: value for key, value in kept.items() if key != "anyOf"}, **others[0]}
    if isinstance(kept.get("type"), list):
        types = [each for each in kept["type"] if each != "null"]
        kept["type"] = types[0] if len(types) == 1 else types
    fields = node.get("properties")
    result = {key: tidy(value) for key, value in kept.items() if key != "properties"}
    if isinstance(fields, dict):  # a field may be called title or description
        result["properties"] = {name: tidy(value) for name, value in fields.items()}
        result.setdefault("additionalProperties", False)
    return result


def references(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*(references(each) for each in node))
    if not isinstance(node, dict):
        return set()
    found = set().union(*(references(each) for each in node.values()))
    target = node.get("$ref")
    return found | {target.rpartition(PREFIX)[2]} if isinstance(target, str) else found


def renamed(node: Any, names: dict[str, str]) -> Any:
    """The schema with its references renamed, all to definitions of one document."""
    if isinstance(node, list):
        return [renamed(each, names) for each in node]
    if not isinstance(node, dict):
        return node
    result = {key: renamed(value, names) for key, value in node.items()}
    if isinstance(node.get("$ref"), str):
        name = node["$ref"].rpartition(PREFIX)[2]
        result["$ref"] = PREFIX + names.get(name, name)
    return result


def reachable(definitions: dict[str, Any], roots: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pending = sorted(roots)
    while pending:
        name = pending.pop()
        if name in definitions and name not in found:
            found[name] = definitions[name]
            pending += sorted(references(found[name]))
    return {name: found[name] for name in sorted(found)}


def kubernetes() -> dict[str, Any]:
    package = importlib.resources.files("kubernetes_validate")
    text = (package / "kubernetes-json-schema" / "v1.37.0-local-strict" / "_definitions.json").read_text()
    return {name: renamed(tidy(schema), {}) for name, schema in json.loads(text)["$defs"].items()}


def of_models(models: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The definitions that Pydantic derives from these models, under the names given."""
    found: dict[str, Any] = {}
    for name, model in models.items():
        schema = model.model_json_schema(by_alias=True)
        found |= {names.get(each, each): renamed(tidy(value), names) for each, value in schema.pop("$defs").items()}
        found[names.get(name, name)] = renamed(tidy(schema), names)
    return found


def write(file: str, kinds: dict[str, str], definitions: dict[str, Any]) -> None:
    """One line for each definition, so that a new version of a source gives a readable difference."""
    lines = (f"    {json.dumps(name)}: {json.dumps(definitions[name], sort_keys=True)}" for name in definitions)
    head = json.dumps({kind: PREFIX + name for kind, name in kinds.items()}, indent=2).replace("\n", "\n  ")
    body = ",\n".join(lines)
    (FOLDER / file).write_text(f'{{\n  "kinds": {head},\n  "$defs": {{\n{body}\n  }}\n}}\n')


def main() -> None:
    core = kubernetes()
    compact = {"".join(part[:1].upper() + part[1:] for part in name.split(".")): name for name in core}
    trainer_models = importlib.import_module("kubeflow_trainer_api.models")
    trainer = of_models({name: getattr(trainer_models, name) for name in TRAINER.values()}, compact)
    trainer = {name: schema for name, schema in trainer.items() if name not in core}
    issued_models = importlib.import_module("cloudcoil.models.cert_manager.v1")
    issued = {name: getattr(issued_models, name) for name in CERT_MANAGER.values()}
    local = set().union(*(model.model_json_schema()["$defs"] for model in issued.values()), issued)
    certificates = of_models(issued, {name: f"cert-manager.io.v1.{name}" for name in local} | {"ObjectMeta": META})
    del certificates[META]

    used = set(KUBERNETES.values()) | {META}
    for schema in (*trainer.values(), *certificates.values()):
        used |= references(schema)
    write("kubernetes.json", KUBERNETES, reachable(core, used))
    write("kubeflow-trainer.json", TRAINER, reachable(trainer, set(TRAINER.values())))
    kinds = {kind: f"cert-manager.io.v1.{name}" for kind, name in CERT_MANAGER.items()}
    write("cert-manager.json", kinds, reachable(certificates, set(kinds.values())))


if __name__ == "__main__":
    main()
