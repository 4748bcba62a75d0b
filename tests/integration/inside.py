"""What workers run in tests of groups inside one machine, and the policy that permits them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ringfence.backend.inside import is_inside
from tests.integration.strategies import Model, batches, sgd, train

POLICY = 'version = 1\ninside_machine = ["gloo", "nccl"]\n\n[[admit]]\n[admit.secret]\n'
SENTENCE = b"what the workers of this run tell each other is theirs alone. "
NAMES = ("outer", "inner")


def write_policy(folder: Path, text: str = POLICY) -> dict[str, str]:
    """Write a policy; return the environment of workers that have it."""
    path = folder / "policy.toml"
    path.write_text(text)
    return {"RINGFENCE_POLICY": str(path)}


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def hybrid_losses(mesh: DeviceMesh) -> tuple[list[float], list[bytes]]:
    """Train with HSDP: sharded inside, replicated outside. Return the losses, and bytes of parameters and gradients."""
    module = model()
    for layer in module.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    losses = train(module, sgd(module), batches(same_on_all_ranks=True))
    samples = []
    for parameter in module.parameters():
        for tensor in (parameter.full_tensor(), parameter.to_local(), parameter.grad.to_local()):
            samples += cut(tensor)
    return losses, samples


def cut(tensor: torch.Tensor) -> list[bytes]:
    """Pieces of 16 bytes from the beginning, the middle and the end, those of constant bytes left out."""
    data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    pieces = [data[start : start + 16] for start in (0, len(data) // 2, max(0, len(data) - 16))]
    return [piece for piece in pieces if len(piece) == 16 and len(set(piece)) > 4]


def alone() -> list[float]:
    """The losses of one process."""
    module = model()
    return train(module, sgd(module), batches(same_on_all_ranks=True))


def tell(group: Any) -> bool:
    """Broadcast a sentence from the first rank of a group; return whether it arrived."""
    said = torch.frombuffer(bytearray(SENTENCE * 200), dtype=torch.uint8)
    heard = said.clone() if dist.get_rank(group) == 0 else torch.zeros_like(said)
    dist.broadcast(heard, group_src=0, group=group)
    return torch.equal(heard, said)


def kind(group: Any) -> str:
    """What a group is, and what torch says it is."""
    return f"{'inside' if is_inside(group) else type(group).__name__} {dist.get_backend(group)}"


def mesh_of(override: dict[str, str] | None) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, backend_override=override)


class Records:
    """What ringfence logs in a worker."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.texts.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("ringfence")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
