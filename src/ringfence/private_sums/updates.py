"""`ringfence.private_mean`, which bounds what one rank can change, and `ringfence.private_hook` for DDP."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ringfence.errors import PrivateSumError
from ringfence.private_sums.pairs import private_group
from ringfence.private_sums.summing import sum_in


def private_mean(
    parameters: Iterable[torch.Tensor],
    samples: int,
    *,
    clip: float,
    largest_share: float = 1.0,
    group: Any = None,
    fixed: torch.dtype = torch.int32,
) -> None:
    """Replace the gradients of parameters by their private mean over a group, weighted by samples. Call it after backward.

    Experimental. Each rank's update is clipped: if the norm of all its gradients together exceeds `clip`, they are scaled
    down to it. Then it is weighted by the rank's share of all samples. So a rank moves the mean by at most its share times
    `clip`, whatever its gradients are. A masked norm cannot be checked by others: attestation and the record of the run say
    which code clipped.

    Args:
        parameters: What the gradients belong to: the same on all ranks. A missing gradient counts as zero.
        samples: The weight of this rank: how many samples it has. All ranks learn the sum.
        clip: The largest norm of an update.
        largest_share: Of a member with all its workers. What exceeds it is dropped, and the mean is smaller by that.
        group: A ringfence process group. Default: the default group.
        fixed: As for `private_sum`.

    Raises:
        PrivateSumError: As `private_sum` does; also if the norm of an update is not a finite number, or samples cannot add up.
    """
    private, count = private_group(group), torch.zeros(1, dtype=torch.int64, device="cpu")
    refusal, also = None, b""
    try:
        each = [parameter for parameter in parameters if parameter.requires_grad]
        samples = operator.index(samples)
        if not clip > 0 or not 0 < largest_share <= 1 or samples < 0 or not each:
            raise PrivateSumError("private_mean needs parameters, samples >= 0, clip > 0 and 0 < largest_share <= 1")
        also = struct.pack(">dd", clip, largest_share)
        update = torch.cat([_gradient(parameter) for parameter in each])
        norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
        if not math.isfinite(norm):  # of float64: it would be scaled to zeros
            raise PrivateSumError("private_mean: the norm of this rank's update is not a finite number")
        count.fill_(samples)
    except Exception as error:  # the other ranks would wait for this one
        refusal = error
    limit = 2**62 // private.size
    total = int(sum_in(private, count, bound=limit, fixed=torch.int64, also=also, refusal=refusal))
    if total <= 0:
        raise PrivateSumError("no rank has samples, or one has sent a negative number of them")
    if total < samples:
        refusal = PrivateSumError(f"all ranks together say {total} samples, and this one has {samples}")
    share = min(samples / total, largest_share / private.own_workers)
    update.mul_(share * min(1.0, clip / norm) if norm else share)
    bound = clip * largest_share * (1 + 2**-10)  # rounding in float32 may exceed the product
    mean = sum_in(private, update, bound=bound, fixed=fixed, refusal=refusal)
    for parameter, part in zip(each, mean.split([parameter.numel() for parameter in each]), strict=True):
        shaped = part.view(parameter.shape).to(parameter.dtype)
        parameter.grad = shaped.clone() if parameter.grad is None else parameter.grad.detach().copy_(shaped)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The flat gradient, in float32 or float64."""
    dtype = torch.float64 if parameter.dtype is torch.float64 else torch.float32
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
    return parameter.grad.detach().to(dtype).reshape(-1)


def private_hook(
    *, bound: float, group: Any = None, fixed: torch.dtype = torch.int32
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """Return a communication hook for DDP that averages gradients by private sums: `ddp.register_comm_hook(None, hook)`.

    Experimental. It does not clip or weigh: use `private_mean` without DDP for that. DDP itself broadcasts rank 0's parameters,
    and its buffers before each forward pass: pass broadcast_buffers=False.

    Args:
        bound: The largest magnitude of a gradient's value, as for `private_sum`.
        group: The process group of DDP. Default: the default group.
        fixed: As for `private_sum`.

    Returns:
        The hook. It raises PrivateSumError in `backward`, as `private_sum` does.
    """

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        private, gradients = private_group(group), bucket.buffer()
        total = sum_in(private, gradients, bound=bound, fixed=fixed)
        device = gradients.device  # those that follow wait for this stream of it
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[device] if device.type != "cpu" else []
        )
        future.set_result(gradients.copy_(total.div_(private.size)))
        return future

    # DDP compares annotations with these types, and they are texts in this module.
    hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})
    return hook
