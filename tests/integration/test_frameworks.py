"""The examples for frameworks train over sealed links with the losses of Gloo; without ringfence they are refused.

The gate runs the cheapest, the nightly run one more; ``--full`` runs them all, and needs `scripts/install --frameworks`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.config.private_files import new_secret_file

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
ALL = sorted(file.stem.removeprefix("train_") for file in FOLDER.glob("train_*.py"))
CHEAP = ["accelerate", "mesh"]
NAMES = {"fabric", "lightning", "ray"}  # these take the backend's name; the others use the existing group
NEEDS_A_GROUP = {"torchtitan"}  # would ask for NCCL
UNCHANGED = ["accelerate", "hf_trainer", "lightning"]  # the guide says that they need no change under `ringfence run`
SECONDS = 1500  # of one run: DeepSpeed compiles an operator on first use, beside whatever else the machine does

# The namespace has only a loopback interface, so nothing is downloaded.
ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
LAUNCHER = "--nnodes 1 --node-rank 0 --master-addr 127.0.0.1 --master-port 29500 --nproc-per-node"
PYTHON = Path(sys.executable).parent

pytestmark = pytest.mark.timeout(2 * SECONDS + 10)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        refused = metafunc.function is test_example_without_ringfence_is_refused
        unchanged = metafunc.function is test_an_unchanged_script_runs_sealed_under_ringfence_run
        names = ALL if full else CHEAP[:1] if refused else CHEAP  # test_guard.py tests the refused mesh
        if unchanged:
            names = UNCHANGED if full else UNCHANGED[:1]
        workers = [4 if full and name == "mesh" else 2 for name in names]  # two of each dimension
        cases = [
            pytest.param(name, count, id=name, marks=pytest.mark.nightly)  # a minute each
            for name, count in zip(names, workers, strict=True)
        ]
        metafunc.parametrize(("name", "workers"), cases)


def source_of(name: str) -> str:
    return (FOLDER / f"train_{name}.py").read_text()


def without_ringfence(name: str, group: str = "") -> str:
    """The script without its lines for ringfence. `group`: replaces the call of init()."""
    text = re.sub(r"^( *)ringfence\.init\(\).*$", rf"\1{group}", source_of(name), flags=re.MULTILINE)
    text = re.sub(r"^( *)ringfence\.assert_sealed\(\)$", r"\1pass", text, flags=re.MULTILINE)
    text = text.replace('"ringfence"', '"gloo"')
    assert text != source_of(name)
    return text


def run(
    name: str, workers: int, text: str, folder: Path, *arguments: str, sealed_launch: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with its launcher, or with `ringfence run`, in its own network namespace."""
    script, secret = folder / f"train_{name}.py", folder / "secret"
    script.write_text(text)
    if not secret.exists():
        new_secret_file(secret)
    bare = {key: value for key, value in os.environ.items() if not key.startswith(("RINGFENCE_", "TORCH_", "RAY_"))}
    environment = bare | {
        "PATH": f"{PYTHON}:{os.environ['PATH']}",
        "RAY_raylet_start_wait_time_s": "600",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TORCH_EXTENSIONS_DIR": str(folder.parent / "extensions"),  # DeepSpeed's cache of compiled operators
        "RINGFENCE_SECRET_FILE": str(secret),
    }
    torchrun = (str(PYTHON / "torchrun"), *LAUNCHER.split(), str(workers))
    launcher = (sys.executable,) if name == "ray" else torchrun
    if sealed_launch:
        launcher = (str(PYTHON / "ringfence"), "run", "--nproc-per-node", str(workers))
    return subprocess.run(
        [*ALONE, *launcher, str(script), *arguments],
        cwd=folder,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def losses(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The losses of each training step, to six digits. Ray prints each line twice."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"(epoch \d+|step \d+): loss (\d\.\d{6})", done.stdout + done.stderr))
    values = [float(loss) for loss in found.values()]
    assert len(values) >= 3 and values[-1] < values[0], done.stdout
    return found


def test_example_trains_sealed_with_the_losses_of_gloo(name: str, workers: int, tmp_path: Path) -> None:
    sealed = run(name, workers, source_of(name), tmp_path, RINGFENCE_REQUIRE="1")
    assert f" {workers} workers, run " in sealed.stdout + sealed.stderr, sealed.stderr
    group = '__import__("torch").distributed.init_process_group("gloo")' if name in NEEDS_A_GROUP else "pass"
    gloo = run(name, workers, without_ringfence(name, group), tmp_path)
    assert "NOT protected, although RINGFENCE_SECRET_FILE is set" in gloo.stdout + gloo.stderr
    assert f" {workers} workers, run " not in gloo.stdout + gloo.stderr
    assert losses(sealed) == losses(gloo)


def test_an_unchanged_script_runs_sealed_under_ringfence_run(name: str, workers: int, tmp_path: Path) -> None:
    """With the losses that the example has, which calls ringfence itself."""
    sealed = run(name, workers, source_of(name), tmp_path, RINGFENCE_REQUIRE="1")
    text = without_ringfence(name, "pass").replace("import ringfence\n", "")
    unchanged = run(name, workers, text, tmp_path, sealed_launch=True)
    assert f" {workers} workers, run " in unchanged.stdout + unchanged.stderr, unchanged.stderr
    assert losses(unchanged) == losses(sealed)


@pytest.mark.promise("A framework that would make an unprotected group is refused under `RINGFENCE_REQUIRE=1`.")
def test_example_without_ringfence_is_refused(name: str, workers: int, tmp_path: Path) -> None:
    done = run(name, workers, without_ringfence(name, "pass"), tmp_path, RINGFENCE_REQUIRE="1")
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert "which is not protected, and RINGFENCE_REQUIRE=1 refuses it" in said
    assert not re.search(r"loss \d", said)


def test_example_has_assert_sealed_and_one_more_line() -> None:
    assert set(CHEAP) <= set(ALL) and len(ALL) == 8
    for name in ALL:
        lines = [line.strip() for line in source_of(name).split('"""', 2)[2].splitlines() if "ringfence" in line]
        rest = [line for line in lines if line not in ("import ringfence", "ringfence.assert_sealed()")]
        assert len(rest) == 1, name
        assert ('backend="ringfence"' if name in NAMES else "ringfence.init()  # before") in rest[0]
        assert "ringfence.assert_sealed()" in lines and len(source_of(name).splitlines()) <= 75
