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
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.proof_claims import claim_problems, write_claims
from tests.spec_sections import section_problems

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "formal"
LIMIT_SECONDS: Final = 900.0  # for one run of the prover, on a machine that does other things too
BASE: Final = "as specified"
RAW: Final = {"proved": "true", "reachable": "false", "attack": "false"}  # expected verdicts in the words of the prover

_QUERY: Final = re.compile(r"\(\*QUERY ([a-z0-9-]+)\*\)")
_CHECK: Final = re.compile(r"\(\*CHECK ([a-z0-9-]+)\*\)(.*?)\(\*ELSE(.*?)\*\)", re.DOTALL)
_VERDICT: Final = re.compile(r"^Query (.*) (is true|is false|cannot be proved)\.$", re.MULTILINE)


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
    if absent := set(removed) - marks(texts):
        raise ValueError(f"no file marks the check {', '.join(sorted(absent))}")
    return {
        name: _CHECK.sub(lambda found: found[3] if found[1] in removed else found[0], text)
        for name, text in texts.items()
    }


def marks(texts: Mapping[str, str]) -> set[str]:
    """Return the checks that files mark."""
    return {found[1] for text in texts.values() for found in _CHECK.finditer(text)}


def queries(texts: Mapping[str, str]) -> dict[str, str]:
    """Return each query by its name, in their order, which is also that of the verdicts."""
    parts = [part for text in texts.values() for part in _QUERY.split(text)[1:]]
    return {name: part.partition(".\n")[0] for name, part in zip(parts[::2], parts[1::2], strict=True)}


def named(query: str) -> list[str]:
    """Return the names in a query, of a file or in the prover's words, without the numbers that the prover adds."""
    names = re.findall(r"[A-Za-z][\w']*", query.partition(";")[2] or query)
    return [re.sub(r"_p?\d+$", "", name) for name in names if name not in ("not", "phase")]


def digest(prover: str, model: Model, texts: Mapping[str, str], entry: Mapping[str, Any]) -> str:
    """Return the digest of all that decides the verdicts of a model, in its order, and of the verdicts."""
    row = [model.name, model.files, *(list(part.items()) for part in (model.expected, model.mutants, model.limits))]
    verdicts = [(each, list(found["verdicts"].items())) for each, found in entry["variants"].items()]
    return hashlib.sha256(json.dumps([prover, row, list(texts.items()), entry["words"], verdicts]).encode()).hexdigest()


def removed(variant: str) -> Sequence[str]:
    """Return the checks that a variant removes."""
    return () if variant == BASE else variant.split("+")


# -- running the prover ---------------------------------------------------------------------------------------------


def prover() -> str:
    """Return the path of ProVerif."""
    named = os.environ.get("PROVERIF") or shutil.which("proverif")
    if not named or not shutil.which(named):
        raise ProverError("ProVerif was not found: put `proverif` in the path, or set PROVERIF to its path")
    return named


def version(path: str) -> str:
    text = subprocess.run([path, "--help"], capture_output=True, text=True, check=False, timeout=30).stdout  # noqa: S603
    found = re.search(r"proverif (\d+\.\d+\w*)", text, re.IGNORECASE)
    if found is None:
        raise ProverError(f"{path} does not print the version of ProVerif")
    return f"ProVerif {found[1]}"


def run(path: str, texts: Mapping[str, str]) -> tuple[dict[str, tuple[str, str]], float]:
    """Return the prover's words for each query and its verdict (`true`, `false`, `unknown`), and the CPU seconds of it all."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_text(text)
        *libraries, last = texts
        arguments = [part for name in libraries for part in ("-lib", name)]
        start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        try:
            done = subprocess.run(  # noqa: S603
                [path, *arguments, last], cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(queries(texts), ("", "unknown")), LIMIT_SECONDS
    _, mark, summary = done.stdout.partition("Verification summary:")
    verdicts = {"is true": "true", "is false": "false", "cannot be proved": "unknown"}
    found = [(words, verdicts[each]) for words, each in _VERDICT.findall(summary)]
    if not mark or len(found) != len(queries(texts)):
        raise ProverError(f"{last}: {len(found)} verdicts for {len(queries(texts))} queries\n{done.stdout[-2000:]}")
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start
    return dict(zip(queries(texts), found, strict=True)), seconds


def prove(path: str, model: Model, folder: Path = FOLDER) -> dict[str, Any]:
    """Return the record of one model: what was proved in the prover's words, and the verdicts of all variants."""
    texts = sources(model, folder)
    entry: dict[str, Any] = {"digest": "", "words": {}, "variants": {}}
    for variant in (BASE, *model.variants):
        found, seconds = run(path, mutate(texts, removed(variant)))
        verdicts = {name: verdict for name, (_, verdict) in found.items()}
        entry["words"] = entry["words"] or {name: words for name, (words, _) in found.items()}
        entry["variants"][variant] = {"seconds": round(seconds, 1), "verdicts": verdicts}
        attacked = ", ".join(attacks(model, verdicts)) or "nothing"
        print(f"{model.name:28} {variant:30} {seconds:6.1f} s  attacks on {attacked}", flush=True)
    return {**entry, "digest": digest(version(path), model, texts, entry)}


# -- checking the record --------------------------------------------------------------------------------------------


def problems(record: Mapping[str, Any], folder: Path = FOLDER) -> Iterator[str]:
    """Yield where a record does not fit the models of a folder, and what the models lack."""
    listed = models(folder)
    yield from unused(listed, folder)
    for name in sorted(set(record["models"]) ^ {model.name for model in listed}):
        yield f"{name}: in the record or in models.toml, not in both"
    for model in listed:
        texts = sources(model, folder)
        yield from model_problems(model, texts)
        if (entry := record["models"].get(model.name)) is None:
            continue
        if list(entry["variants"]) != [BASE, *model.variants]:
            yield f"{model.name}: the record has other variants than models.toml"
        elif entry["digest"] != digest(record["prover"], model, texts, entry):
            yield f"{model.name}: its files, its table or its verdicts changed after it was proved"
        for name, text in queries(texts).items():
            if named(text) != named(entry["words"].get(name, "")):
                yield f"{model.name}: the prover was asked something else as {name}"
        for variant, found in entry["variants"].items():
            if variant in (BASE, *model.variants):
                yield from variant_problems(model, variant, found["verdicts"])


def unused(listed: Sequence[Model], folder: Path) -> Iterator[str]:
    """Yield files that no model has, and checks that are marked, but that no mutant removes."""
    files = {file: text for model in listed for file, text in sources(model, folder).items()}
    for file in sorted({str(path.relative_to(folder)) for path in folder.rglob("*.pv*")} - set(files)):
        yield f"{file}: no model of models.toml has this file"
    marked = {(file, name) for file, text in files.items() for name in marks({file: text})}
    used = {
        (file, name) for model in listed for file in model.files for each in model.variants for name in removed(each)
    }
    for file, name in sorted(marked - used):
        yield f"{file}: no mutant removes the check {name}"


def model_problems(model: Model, texts: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the rows of one model in models.toml."""
    if list(queries(texts)) != list(model.expected):
        yield f"{model.name}: models.toml expects other queries than the files have, or in another order"
    if "reachable" not in model.expected.values():
        yield f"{model.name}: no query shows that its good end is reachable"
    attacked = {name for found in model.variants.values() for name in found}
    for name, kind in model.expected.items():
        if kind == "proved" and name not in attacked:
            yield f"{model.name}: no mutant has an attack on {name}"
    for name in sorted({name for variant in model.variants for name in removed(variant)} - marks(texts)):
        yield f"{model.name}: no file marks the check {name}"


def attacks(model: Model, verdicts: Mapping[str, str]) -> list[str]:
    """Return the properties of which an attack was found."""
    return [name for name, kind in model.expected.items() if kind == "proved" and verdicts[name] == "false"]


def variant_problems(model: Model, variant: str, verdicts: Mapping[str, str]) -> Iterator[str]:
    """Yield where the verdicts of a model or of a mutant are not the expected ones."""
    if list(verdicts) != list(model.expected):
        yield f"{model.name}, {variant}: the record has other queries than models.toml"
        return
    for name, kind in model.expected.items():
        if (variant == BASE or kind == "reachable") and verdicts[name] != RAW[kind]:
            yield f"{model.name}, {variant}: {name} must be {kind}, and the prover says {verdicts[name]}"
    if variant != BASE and (not attacks(model, verdicts) or list(model.variants[variant]) != attacks(model, verdicts)):
        found = ", ".join(attacks(model, verdicts)) or "nothing"
        yield f"{model.name}, {variant}: attacks on {found}, and models.toml lists {', '.join(model.variants[variant])}"


def names_of(listed: Sequence[Model]) -> list[str]:
    """Return every query as `model/query`, and every attack of a variant as `model/query@variant`."""
    names = [f"{model.name}/{query}" for model in listed for query in model.expected]
    rows = [(model.name, *row) for model in listed for row in model.variants.items()]
    return [*names, *(f"{name}/{query}@{variant}" for name, variant, found in rows for query in found)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the prover or check the record; return the exit status."""
    parser = argparse.ArgumentParser("scripts/prove", description="Run the models in formal/, or check their record.")
    parser.add_argument("--check", action="store_true", help="run nothing; fail if formal/verdicts.json does not fit")
    parser.add_argument("--only", metavar="MODEL", action="append", help="run this model only, and keep other verdicts")
    parser.add_argument("--claims", action="store_true", help="run nothing; write the table in formal/README.md")
    options = parser.parse_args(arguments)
    path = FOLDER / "verdicts.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"prover": "", "models": {}}
    listed = models()
    names = [model.name for model in listed]
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"no model is called {', '.join(sorted(unknown))}: formal/models.toml has their names")
    if options.claims:
        write_claims(FOLDER)
    elif not options.check:
        try:
            record = updated(record, listed, options.only)
        except ProverError as error:
            print(error, file=sys.stderr)
            return 2
        path.write_text(json.dumps(record, indent=1) + "\n")
        write_claims(FOLDER)
    found = [*problems(record), *claim_problems(FOLDER, names_of(listed)), *section_problems(names, FOLDER)]
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(totals(record))
    return 1 if found else 0


def updated(record: dict[str, Any], listed: Sequence[Model], only: Sequence[str] | None) -> dict[str, Any]:
    """Return the record with new verdicts of all or some models. Verdicts of another version of the prover are dropped."""
    path = prover()
    name = version(path)
    found = dict(record["models"]) if record["prover"] == name else {}
    found |= {model.name: prove(path, model) for model in listed if not only or model.name in only}
    return {"prover": name, "models": {model.name: found[model.name] for model in listed if model.name in found}}


def totals(record: Mapping[str, Any]) -> str:
    variants = [each for entry in record["models"].values() for each in entry["variants"].values()]
    count, seconds = sum(len(each["verdicts"]) for each in variants), sum(each["seconds"] for each in variants)
    return f"{record['prover']}: {len(record['models'])} models, {len(variants)} runs, {count} verdicts, {seconds:.0f} s of CPU"


if __name__ == "__main__":
    sys.exit(main())
