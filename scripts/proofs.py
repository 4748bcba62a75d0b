"""`scripts/prove`: run the models of formal/ and their mutants, record the verdicts, and check that the record fits the models.

A model is a list of files, the last one with the process. Files mark what a mutant removes, `(*CHECK name*) … (*ELSE …*)`, and
the name of each query, `(*QUERY name*)`. formal/models.toml says which verdict each query must have.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.proof_claims import claim_problems, write_claims

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "formal"
LIMIT_SECONDS: Final = 300.0  # for one run of the prover; the slowest takes a tenth of that on an idle machine
BASE: Final = "as specified"
RAW: Final = {"proved": "true", "reachable": "false", "attack": "false"}  # expected verdicts in the words of the prover

_QUERY: Final = re.compile(r"\(\*QUERY ([a-z0-9-]+)\*\)")
_CHECK: Final = re.compile(r"\(\*CHECK ([a-z0-9-]+)\*\)(.*?)\(\*ELSE(.*?)\*\)", re.DOTALL)
_VERDICT: Final = re.compile(r"^Query .* (is true|is false|cannot be proved)\.$", re.MULTILINE)


class ProverError(Exception):
    """The prover is missing, failed, or printed something unexpected."""


@dataclass(frozen=True)
class Model:
    """One row of formal/models.toml."""

    name: str
    about: str
    files: tuple[str, ...]
    expected: Mapping[str, str]
    mutants: Mapping[str, Sequence[str]]
    limits: Mapping[str, Sequence[str]]

    @property
    def variants(self) -> dict[str, Sequence[str]]:
        """Mutants and limits: what is removed, joined by `+`, and the queries that must then have an attack."""
        return {**self.mutants, **self.limits}


def models(folder: Path = FOLDER) -> list[Model]:
    """Return the models of a folder. Raises TypeError if a table has an unknown key or lacks a required one."""
    tables = tomllib.loads((folder / "models.toml").read_text())["model"]
    return [Model(**{"mutants": {}, "limits": {}, **table, "files": tuple(table["files"])}) for table in tables]


def sources(model: Model, folder: Path = FOLDER) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in model.files}


def mutate(texts: Mapping[str, str], removed: Sequence[str]) -> dict[str, str]:
    """Return the files of a mutant, in which each named check is replaced. Raises ValueError for a check that is not marked."""
    absent = set(removed) - {found[1] for text in texts.values() for found in _CHECK.finditer(text)}
    if absent:
        raise ValueError(f"no file marks the check {', '.join(sorted(absent))}")
    return {
        name: _CHECK.sub(lambda found: found[3] if found[1] in removed else found[0], text)
        for name, text in texts.items()
    }


def queries(texts: Mapping[str, str]) -> list[str]:
    """Return the names of the queries in their order, which is also that of the verdicts."""
    return [name for text in texts.values() for name in _QUERY.findall(text)]


def digests(texts: Mapping[str, str]) -> dict[str, str]:
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


# -- running the prover ---------------------------------------------------------------------------------------------


def prover() -> str:
    """Return the path of ProVerif."""
    named = os.environ.get("PROVERIF") or shutil.which("proverif")
    if not named or not shutil.which(named):
        raise ProverError(
            "ProVerif was not found: install it and put `proverif` in the path, or set PROVERIF to its path"
        )
    return named


def version(path: str) -> str:
    text = subprocess.run([path, "--help"], capture_output=True, text=True, check=False, timeout=30).stdout  # noqa: S603
    found = re.search(r"proverif (\d+\.\d+\w*)", text, re.IGNORECASE)
    if found is None:
        raise ProverError(f"{path} does not print the version of ProVerif")
    return f"ProVerif {found[1]}"


def run(path: str, texts: Mapping[str, str]) -> tuple[dict[str, str], float]:
    """Return the prover's verdict on each query (`true`, `false`, `unknown`) and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_text(text)
        *libraries, last = texts
        arguments = [part for name in libraries for part in ("-lib", name)]
        start = time.monotonic()
        try:
            done = subprocess.run(  # noqa: S603
                [path, *arguments, last], cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(queries(texts), "unknown"), time.monotonic() - start
    _, mark, summary = done.stdout.partition("Verification summary:")
    words = {"is true": "true", "is false": "false", "cannot be proved": "unknown"}
    found = [words[each] for each in _VERDICT.findall(summary)]
    if not mark or len(found) != len(queries(texts)):
        raise ProverError(f"{last}: {len(found)} verdicts for {len(queries(texts))} queries\n{done.stdout[-2000:]}")
    return dict(zip(queries(texts), found, strict=True)), time.monotonic() - start


def prove(path: str, model: Model, folder: Path = FOLDER) -> dict[str, Any]:
    """Return the record of one model: the digests of its files, and the verdicts of all its variants."""
    texts = sources(model, folder)
    record: dict[str, Any] = {"files": digests(texts), "variants": {}}
    for variant in (BASE, *model.variants):
        removed = () if variant == BASE else variant.split("+")
        verdicts, seconds = run(path, mutate(texts, removed))
        record["variants"][variant] = {"seconds": round(seconds, 1), "verdicts": verdicts}
        wrong = list(variant_problems(model, variant, verdicts))
        print(f"{model.name:28} {variant:28} {seconds:6.1f} s  {summary_of(model, variant, verdicts)}", flush=True)
        for problem in wrong:
            print(f"    {problem}", flush=True)
    return record


def summary_of(model: Model, variant: str, verdicts: Mapping[str, str]) -> str:
    if variant != BASE:
        return f"attacks on {', '.join(name for name in model.variants[variant] if verdicts[name] == 'false')}"
    kinds = [kind for name, kind in model.expected.items() if verdicts[name] == RAW[kind]]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in RAW if kind in kinds)


# -- checking the record --------------------------------------------------------------------------------------------


def problems(record: Mapping[str, Any], folder: Path = FOLDER) -> Iterator[str]:
    """Yield where a record does not fit the models of a folder, and what the models lack."""
    listed = models(folder)
    yield from unused_checks(listed, folder)
    for name in sorted(set(record["models"]) ^ {model.name for model in listed}):
        yield f"{name}: in the record or in models.toml, not in both"
    for model in listed:
        texts = sources(model, folder)
        yield from model_problems(model, texts)
        entry = record["models"].get(model.name)
        if entry is None:
            continue
        if entry["files"] != digests(texts):
            yield f"{model.name}: its files changed after the verdicts were recorded"
        if set(entry["variants"]) != {BASE, *model.variants}:
            yield f"{model.name}: the record has other variants than models.toml"
        for variant, found in entry["variants"].items():
            if variant in (BASE, *model.variants):
                yield from variant_problems(model, variant, found["verdicts"])


def unused_checks(listed: Sequence[Model], folder: Path) -> Iterator[str]:
    """Yield checks that are marked, but that no mutant removes."""
    marked = {
        (file, found[1])
        for model in listed
        for file, text in sources(model, folder).items()
        for found in _CHECK.finditer(text)
    }
    removed = {
        (file, name) for model in listed for file in model.files for each in model.variants for name in each.split("+")
    }
    for file, name in sorted(marked - removed):
        yield f"{file}: no mutant removes the check {name}"


def model_problems(model: Model, texts: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the rows of one model in models.toml."""
    names = queries(texts)
    if sorted(names) != sorted(model.expected) or len(set(names)) != len(names):
        yield f"{model.name}: models.toml expects other queries than the files have"
    if "reachable" not in model.expected.values():
        yield f"{model.name}: no query shows that its good end is reachable"
    attacked = {name for found in model.variants.values() for name in found}
    for name, kind in model.expected.items():
        if kind == "proved" and name not in attacked:
            yield f"{model.name}: no mutant has an attack on {name}"
    marked = {found[1] for text in texts.values() for found in _CHECK.finditer(text)}
    for variant, attacks in model.variants.items():
        for name in sorted(set(variant.split("+")) - marked):
            yield f"{model.name}: no file marks the check {name}"
        if not attacks:
            yield f"{model.name}, {variant}: no query with an attack is named"


def variant_problems(model: Model, variant: str, verdicts: Mapping[str, str]) -> Iterator[str]:
    """Yield where the verdicts of a model or of a mutant are not the expected ones."""
    if set(verdicts) != set(model.expected):
        yield f"{model.name}, {variant}: the record has other queries than models.toml"
        return
    for name, kind in model.expected.items():
        if variant == BASE or kind == "reachable":
            if verdicts[name] != RAW[kind]:
                yield f"{model.name}, {variant}: {name} must be {kind}, and the prover says {verdicts[name]}"
        elif name in model.variants[variant] and verdicts[name] != "false":
            yield f"{model.name}, {variant}: no attack on {name} was found, the prover says {verdicts[name]}"


def names_of(listed: Sequence[Model]) -> list[str]:
    """Return every query as `model/query`, and every attack of a variant as `model/query@variant`."""
    names = [f"{model.name}/{query}" for model in listed for query in model.expected]
    attacks = [
        (model.name, variant, query) for model in listed for variant, found in model.variants.items() for query in found
    ]
    return [*names, *(f"{name}/{query}@{variant}" for name, variant, query in attacks)]


# -- the command ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the prover or check the record; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/prove", description="Run the models in formal/, or check their record."
    )
    parser.add_argument("--check", action="store_true", help="run nothing; fail if formal/verdicts.json does not fit")
    parser.add_argument("--only", metavar="MODEL", action="append", help="run this model only, and keep other verdicts")
    parser.add_argument(
        "--claims", action="store_true", help="run nothing; write the table of claims in formal/README.md"
    )
    options = parser.parse_args(arguments)
    path = FOLDER / "verdicts.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"prover": "", "models": {}}
    listed = models()
    unknown = set(options.only or ()) - {model.name for model in listed}
    if unknown:
        parser.error(f"no model is called {', '.join(sorted(unknown))}: formal/models.toml has their names")
    if options.claims:
        write_claims(FOLDER)
    elif not options.check:
        try:
            record = updated(record, [model for model in listed if not options.only or model.name in options.only])
        except ProverError as error:
            print(error, file=sys.stderr)
            return 2
        record["models"] = {
            model.name: record["models"][model.name] for model in listed if model.name in record["models"]
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
        write_claims(FOLDER)
    found = [*problems(record), *claim_problems(FOLDER, names_of(listed))]
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(totals(record))
    return 1 if found else 0


def updated(record: dict[str, Any], chosen: Sequence[Model]) -> dict[str, Any]:
    """Return the record with new verdicts of the chosen models. Verdicts of another version of the prover are dropped."""
    path = prover()
    name = version(path)
    kept = record["models"] if record["prover"] == name else {}
    return {"prover": name, "models": {**kept, **{model.name: prove(path, model) for model in chosen}}}


def totals(record: Mapping[str, Any]) -> str:
    variants = [each for entry in record["models"].values() for each in entry["variants"].values()]
    count, seconds = sum(len(each["verdicts"]) for each in variants), sum(each["seconds"] for each in variants)
    mutants = len(variants) - len(record["models"])
    return f"{record['prover']}: {len(record['models'])} models, {mutants} variants, {count} verdicts, {seconds:.0f} s in all"


if __name__ == "__main__":
    sys.exit(main())
