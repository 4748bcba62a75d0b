"""DCP's planners without pickle: values are encoded before anything is written, and decoded by a strict parser."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType

from ringfence import keys
from ringfence.checkpoint import nested_keys, overlaps, values
from ringfence.checkpoint.index import Path, name_of
from ringfence.checkpoint.ranks import portable_errors
from ringfence.checkpoint.tensors import dtype_name
from ringfence.errors import CheckpointError

KEY_NOTE: Final = 0  # where planner data has a KeyNote; its other keys are names, which are texts
_PLANNING = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan")


@portable_errors(*_PLANNING)
class SealedSavePlanner(DefaultSavePlanner):  # type: ignore[misc]
    """Plans a save. What a sealed checkpoint cannot hold is refused while planning, by name."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._key_note = nested_keys.note_of(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self._encoded: dict[str, bytes] = {}
        for item in plan.items:
            name = item.index.fqn
            _check_path(self.mappings.get(name, (name,)))
            found = self.state_dict[name]
            if item.type == WriteItemType.BYTE_IO:
                self._encoded[name] = values.encode(found, name)
            else:
                dtype_name(found, name)
        self.plan = dataclasses.replace(plan, planner_data={**self.mappings, KEY_NOTE: self._key_note})
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan for all ranks; the metadata that the writer gets has the note of all of them."""
        plans, metadata = super().create_global_plan(all_plans)
        note = nested_keys.merged(plan.planner_data[KEY_NOTE] for plan in all_plans)
        self.metadata = dataclasses.replace(metadata, planner_data={**metadata.planner_data, KEY_NOTE: note})
        return plans, self.metadata

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._encoded[write_item.index.fqn])
        return object

    def size_of(self, item: WriteItem) -> int:
        """Return how many bytes an item of the plan has."""
        if item.type == WriteItemType.BYTE_IO:
            return len(self._encoded[item.index.fqn])
        return int(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize)


@portable_errors("set_up_planner")
class Refusal(SealedSavePlanner):
    """Fails the plan of a save, with the reason why this rank cannot take part: all ranks get it."""

    def __init__(self, reason: Exception) -> None:
        super().__init__()
        self._reason = reason

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise self._reason


def _check_path(path: Path) -> None:
    if len(path) > keys.CHECKPOINT_PATH_PARTS or any(isinstance(part, str) and len(part) > 10_000 for part in path):
        raise CheckpointError(
            f"the name {name_of(path)[:80]}... is too long for a checkpoint: save it under a shorter one"
        )


@portable_errors(*_PLANNING)
class SealedLoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """Plans a load. Values replace those of the state that is loaded into."""

    def create_local_plan(self) -> LoadPlan:
        """Plan to fill tied tensors once.

        What the others of them would be filled with is `planner_data`: pairs of reads, which the reader must find equal.
        Raises CheckpointError if tensors share memory in another way.
        """
        plan = super().create_local_plan()
        reads: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                reads.setdefault(item.dest_index, []).append(item)
        found = list(reads)
        same = overlaps.tied([(index.fqn, self.lookup_tensor(index).detach()) for index in found])
        pairs = [pair for place, first in same for pair in _paired(reads[found[first]], reads[found[place]])]
        repeated = {found[place] for place, _ in same}
        kept = [item for item in plan.items if item.type != LoadItemType.TENSOR or item.dest_index not in repeated]
        return dataclasses.replace(plan, items=kept, planner_data=pairs)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        if isinstance(self.state_dict[name], torch.Tensor):
            raise CheckpointError(f"{name} is a tensor in the state, and not one in the checkpoint")
        place(self.original_state_dict, self.mappings[name], values.decode(value.getvalue()))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return super().resolve_tensor(read_item).detach()


def _paired(ones: list[ReadItem], others: list[ReadItem]) -> list[tuple[ReadItem, ReadItem]]:
    """Return the reads of two tied tensors that fill the same memory. Raises CheckpointError if not all do."""
    pairs = list(zip(sorted(ones, key=_box), sorted(others, key=_box), strict=False))
    if len(ones) != len(others) or any(_box(one) != _box(other) for one, other in pairs):
        raise overlaps.not_equal(ones[0].dest_index.fqn, others[0].dest_index.fqn)
    return pairs


def _box(item: ReadItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(item.dest_offsets), tuple(item.lengths)


def place(root: Any, path: Path, value: Any) -> None:
    """Put a value into nested dicts and lists. Planners write all keys of a path as texts, also those that are numbers."""
    container = root
    for part in path[:-1]:
        container = container[_key_in(container, part)]
    container[_key_in(container, path[-1])] = value


def _key_in(container: Any, part: str | int) -> Any:
    if isinstance(container, Mapping) and part not in container:
        return next((key for key in container if str(key) == part), part)
    return part
