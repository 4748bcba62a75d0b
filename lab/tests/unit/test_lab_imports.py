"""The layers of the lab: no cycle of files, a planner that is pure, and commands that import nothing without sealing."""

from __future__ import annotations

from pathlib import Path

from tests.unit.test_imports import cycle_in, import_graph, imports_from_outside, imports_of, large_constructors

LAB = Path(__file__).parents[2] / "src" / "ringfence_lab"
FILES = sorted(LAB.rglob("*.py"))
MEASURING = {"unsealed", "variants", "worker", "training", "profile", "replay", "rings"}
MEASURING |= {"tee_worker", "device_ring"}  # what makes a variant: it runs in the benchmark's own processes


def test_the_import_graph_of_files_has_no_cycle() -> None:
    cycle = cycle_in(import_graph(FILES, LAB.parent))
    assert not cycle, f"these files import each other: {' -> '.join(cycle)}"


def test_the_planner_imports_nothing_outside() -> None:
    assert not {file.name: found for file in (LAB / "plan").rglob("*.py") if (found := imports_from_outside(file))}


def test_constructors_take_at_most_eight_arguments() -> None:
    assert not {file.name: found for file in FILES if (found := large_constructors(file))}


def variant_makers(file: Path) -> list[str]:
    imported = {name for name in imports_of(file) if name.startswith("ringfence_lab")}
    return sorted(name for name in imported if MEASURING & set(name.split(".")))


def test_commands_do_not_import_what_makes_a_variant() -> None:
    assert not {file.name: found for file in (LAB / "cli").glob("*.py") if (found := variant_makers(file))}
    assert variant_makers(LAB / "bench" / "worker.py"), "the check finds nothing"
