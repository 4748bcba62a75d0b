"""Build the wheels and the source archive from the files that git knows: see scripts/wheels.

The source archive is built first and the wheels from what it contains, so that it is complete. Timestamps are those of the last
commit, and nothing of the machine that builds gets into the files: the same sources and compiler give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from scripts.wheel_contents import LAB, check_archive, check_wheel, print_wheel

ROOT = Path(__file__).parents[1]
PLATFORM = f"manylinux_2_28_{platform.machine()}"  # as torch's own wheels; auditwheel refuses a binary that needs more
EVERYWHERE = {"/", "//", "/usr/", "/usr/local/"}
HOOK = "import setuptools.build_meta as build, sys; getattr(build, sys.argv[1])(sys.argv[2])"


def run(command: list[str], folder: Path, **settings: str) -> str:
    """Run a command in a folder with a few settings more; what it prints is shown only if it fails."""
    environment = {**os.environ, **settings}
    done = subprocess.run(command, cwd=folder, env=environment, umask=0o022, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def tracked_files() -> list[str]:
    """Every file of the project, as git names it; what was deleted and not yet committed is left out."""
    names = run(["git", "ls-files", "-z"], ROOT).split("\0")
    return sorted(name for name in names if name and (ROOT / name).is_file())


def time_of_sources() -> int:
    """When the last commit was made, in seconds: the time of every file in what is built."""
    return int(run(["git", "log", "-1", "--format=%ct"], ROOT))


def build_archive(files: list[str], work: Path, epoch: int) -> Path:
    """Build the source archive from copies of the files."""
    tree = work / "tree"
    for name in files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    made = work / "archive"
    run([sys.executable, "-c", HOOK, "build_sdist", str(made)], tree)
    (archive,) = made.iterdir()
    normalise(archive, epoch)
    return archive


def normalise(archive: Path, epoch: int) -> None:
    """Write a source archive again without the time, the user and the order of this build."""
    plain = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            contents = old.extractfile(member)
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, contents)
    archive.write_bytes(gzip.compress(plain.getvalue(), mtime=epoch))


def build_wheel(archive: Path, work: Path, kind: str, epoch: int) -> Path:
    """Build a wheel from the source archive: the product's, `compiled` or `pure`, or the one of the `lab`."""
    source, made = work / kind / "source", work / kind / "wheel"
    with tarfile.open(archive) as packed:
        packed.extractall(source, filter="data")
    (tree,) = source.iterdir()
    settings = {
        "SOURCE_DATE_EPOCH": str(epoch),
        "RINGFENCE_BUILD": "compiled" if kind == "compiled" else "pure",
        "CC": "gcc",
        "LDSHARED": "gcc -shared",  # Python's own command may name the folder that Python was installed in
        "LDFLAGS": "-Wl,--strip-all",
    }
    project = tree / "lab" if kind == "lab" else tree
    run([sys.executable, "-c", HOOK, "build_wheel", str(made)], project, **settings)
    (wheel,) = made.iterdir()
    if kind != "compiled":
        return wheel
    repaired = work / kind / "repaired"
    options = ["--plat", PLATFORM, "--only-plat", "--wheel-dir", str(repaired)]
    run([sys.executable, "-m", "auditwheel", "repair", *options, str(wheel)], tree, **settings)
    (wheel,) = repaired.iterdir()
    return wheel


def build_all(out: Path) -> list[Path]:
    """Build and check all four; returns where they are."""
    files = tracked_files()
    epoch = time_of_sources()
    with tempfile.TemporaryDirectory(prefix="ringfence-wheels-") as folder:
        work = Path(folder)
        archive = build_archive(files, work, epoch)
        compiled, pure, lab = (build_wheel(archive, work, kind, epoch) for kind in ("compiled", "pure", "lab"))
        here = {f"{place}/" for place in (work, ROOT, Path.home(), sys.prefix, sys.base_prefix)} - EVERYWHERE
        problems = [
            *check_wheel(compiled, files, f"cp311-abi3-{PLATFORM}", here),
            *check_wheel(pure, files, "py3-none-any", here),
            *check_wheel(lab, files, "py3-none-any", here, LAB),
            *check_archive(archive, files, here),
        ]
        if problems:
            raise SystemExit("\n".join(problems))
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(file, out / file.name)) for file in (compiled, pure, lab, archive)]


def check_built(wheels: list[Path]) -> None:
    """Check compiled wheels that another tool built from the same files, cibuildwheel for example."""
    files = tracked_files()
    here = {f"{ROOT}/", f"{Path.home()}/"} - EVERYWHERE
    problems = [problem for wheel in wheels for problem in check_wheel(wheel, files, f"cp311-abi3-{PLATFORM}", here)]
    if problems:
        raise SystemExit("\n".join(problems))


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/wheels", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder to write to (default: dist)")
    parser.add_argument("--twice", action="store_true", help="build everything again and fail if a byte differs")
    parser.add_argument("--list", action="store_true", help="list the files in the wheels with their sizes")
    parser.add_argument(
        "--check", type=Path, nargs="+", metavar="WHEEL", help="build nothing; check these compiled wheels"
    )
    asked = parser.parse_args()
    if asked.check:
        check_built(asked.check)
        return
    made = build_all(asked.out)
    if asked.list:
        for wheel in made[:3]:
            print_wheel(wheel)
    for file in made:
        print(f"{digest(file)}  {file.stat().st_size:>9,} bytes  {file.name}")
    if asked.twice:
        with tempfile.TemporaryDirectory() as folder:
            pairs = zip(made, build_all(Path(folder)), strict=True)
            different = [first.name for first, second in pairs if digest(first) != digest(second)]
        if different:
            raise SystemExit(f"a second build gave other bytes: {', '.join(different)}")
        print("A second build gave the same bytes.")


if __name__ == "__main__":
    main()
