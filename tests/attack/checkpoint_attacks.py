"""Changes to a sealed checkpoint by someone who controls the storage: `python -m tests.attack.checkpoint_attacks 10000`.

The attacker has two checkpoints that were saved under the same key-encryption key, and older copies of one of them. Each attack
changes a copy; loading must refuse it, or load the numbers that were saved.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ringfence import checkpoint
from ringfence.checkpoint.streams import SEGMENT
from ringfence.errors import CheckpointError
from tests.unit.checkpoint_samples import empty_state, is_same, key_file, small_state

Attack = Callable[[Path, Path, random.Random], None]  # (the copy, another checkpoint, chance)


def _file(folder: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(folder.iterdir()))


def _shard(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("*.shard"))))


def flip(folder: Path, _: Path, chance: random.Random) -> None:
    """Flip a bit."""
    file = _file(folder, chance)
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def flip_header(folder: Path, _: Path, chance: random.Random) -> None:
    """Flip a bit of the first 200 bytes: headers, ids, wrapped key."""
    file = _file(folder, chance)
    data = bytearray(file.read_bytes())
    data[chance.randrange(min(200, len(data)))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def overwrite(folder: Path, _: Path, chance: random.Random) -> None:
    """Overwrite a range with zeros or random bytes."""
    file = _file(folder, chance)
    data = bytearray(file.read_bytes())
    start, size = chance.randrange(len(data)), chance.randrange(1, 5000)
    new = bytes(size) if chance.random() < 0.5 else chance.randbytes(size)
    data[start : start + size] = new[: len(data) - start]
    if bytes(data) == file.read_bytes():
        data[start] ^= 1
    file.write_bytes(data)


def truncate(folder: Path, _: Path, chance: random.Random) -> None:
    file = _file(folder, chance)
    size = file.stat().st_size
    at_segment = chance.random() < 0.3 and size > SEGMENT
    os.truncate(file, SEGMENT * chance.randrange(1, -(-size // SEGMENT)) if at_segment else chance.randrange(size))


def extend(folder: Path, _: Path, chance: random.Random) -> None:
    with _file(folder, chance).open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 5000)))


def move_segments(folder: Path, _: Path, chance: random.Random) -> None:
    """Exchange two segments of a shard, or repeat one."""
    file = _shard(folder)
    data = file.read_bytes()
    parts = [data[start : start + SEGMENT] for start in range(0, len(data), SEGMENT)]
    first, second = chance.sample(range(len(parts)), 2)
    parts[first], parts[second] = parts[second], parts[first] if chance.random() < 0.5 else parts[second]
    file.write_bytes(b"".join(parts))


def delete(folder: Path, _: Path, chance: random.Random) -> None:
    _file(folder, chance).unlink()


def rename(folder: Path, _: Path, chance: random.Random) -> None:
    """Exchange the names of two files."""
    first, second = chance.sample(sorted(folder.iterdir()), 2)
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)


def mix_shard(folder: Path, other: Path, _: random.Random) -> None:
    """Put the shard of another save under the name of this one's."""
    shutil.copyfile(_shard(other), _shard(folder))


def mix_segments(folder: Path, other: Path, chance: random.Random) -> None:
    """Put a segment of another save in the place of this one's."""
    ours, theirs = _shard(folder), _shard(other)
    data, start = bytearray(ours.read_bytes()), SEGMENT * chance.randrange(2)
    data[start : start + SEGMENT] = theirs.read_bytes()[start : start + SEGMENT]
    ours.write_bytes(data)


def mix_index(folder: Path, other: Path, chance: random.Random) -> None:
    """Put the index of another save here, or parts of it: its wrapped key, or its sealed part."""
    ours, theirs = (folder / "index").read_bytes(), (other / "index").read_bytes()
    cut = chance.choice([0, 34, 34 + 2 + 21, len(ours) // 2, chance.randrange(len(ours))])
    (folder / "index").write_bytes(
        theirs[:cut] + ours[cut:] if chance.random() < 0.5 and cut else ours[:cut] + theirs[cut:]
    )


ATTACKS: tuple[Attack, ...] = (
    flip,
    flip_header,
    overwrite,
    truncate,
    extend,
    move_segments,
    delete,
    rename,
    mix_shard,
    mix_segments,
    mix_index,
)


def run(root: Path, count: int, seed: int = 0) -> Counter[str]:
    """Try attacks; return how many of each kind were refused. Raises AssertionError for wrong numbers."""
    key = key_file(root)
    ours, theirs, copy = root / "ours", root / "theirs", root / "copy"
    checkpoint.save(small_state(), ours, key=key, step=1, threads=1)
    checkpoint.save(small_state(2.0), theirs, key=key, step=1, threads=1)
    chance, refused = random.Random(seed), Counter[str]()
    for number in range(count):
        attack = ATTACKS[number % len(ATTACKS)]
        shutil.copytree(ours, copy)
        attack(copy, theirs, chance)
        state = empty_state()
        try:
            checkpoint.load(state, copy, key=key, threads=1)
        except CheckpointError:
            refused[attack.__name__] += 1
        else:
            assert is_same(state, small_state()), (
                f"wrong numbers after {attack.__name__}, attack {number} of seed {seed}"
            )
            assert _is_untouched(ours, copy), f"{attack.__name__}, attack {number} of seed {seed}, was not noticed"
        shutil.rmtree(copy)
    return refused


def _is_untouched(ours: Path, copy: Path) -> bool:
    """Whether an attack has changed nothing, for example by mixing in the same bytes."""
    return all((copy / file.name).read_bytes() == file.read_bytes() for file in ours.iterdir())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ringfence-attacks-") as folder:
        wanted = int(sys.argv[1])
        found = run(Path(folder), wanted)
        print(f"{wanted:,} attacks, {sum(found.values()):,} refused, none with wrong numbers: {dict(found)}")
