"""The ranks that save or load together: their group must be sealed, and a failure of one is raised on all."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ringfence.backend.groups import check_group_sealed
from ringfence.errors import CheckpointError, ConfigurationError

T = TypeVar("T")
_NAMED = 3  # failures that a message lists


@dataclass(frozen=True)
class Ranks:
    """The group of a save or load. `group` is None if this process is alone."""

    group: Any
    is_first: bool

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Check a process group, by default torch's default group.

        The data key travels over it. So with more than one rank it must be ringfence's; raises CheckpointError otherwise.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls(None, True)
        group = dist.group.WORLD if group is None else group
        if dist.get_world_size(group) == 1:
            return cls(None, True)
        try:
            check_group_sealed(group)
        except ConfigurationError as error:
            raise CheckpointError(f"the key of a checkpoint would travel in clear: {error}") from error
        return cls(group, dist.get_rank(group) == 0)

    @property
    def is_alone(self) -> bool:
        return self.group is None

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on rank 0, on all ranks. What it raises is a CheckpointError on all ranks."""
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer = [make(), None]
            except Exception as error:
                if self.is_alone:
                    raise error if isinstance(error, CheckpointError) else CheckpointError(str(error)) from error
                answer = [None, str(error)]
        if not self.is_alone:
            dist.broadcast_object_list(answer, src=dist.get_global_rank(self.group, 0), group=self.group)
        if answer[1] is not None:
            raise CheckpointError(answer[1])
        return answer[0]  # type: ignore[no-any-return]


@contextlib.contextmanager
def converted(what: str) -> Iterator[None]:
    """Raise CheckpointError in place of DCP's exception, which is no Exception."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        raise error_of(what, error) from error


def portable_errors(*names: str) -> Callable[[type[T]], type[T]]:
    """Decorate a class that DCP calls: what these methods raise, every rank can be told.

    DCP pickles an exception. One that holds a lock or a socket cannot be, and then the other ranks would wait.
    """

    def decorate(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, _portable(getattr(cls, name)))
        return cls

    return decorate


def _portable(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise CheckpointError(_text_of(error)).with_traceback(error.__traceback__) from error

    return call


def _text_of(error: BaseException) -> str:
    kind = "" if isinstance(error, CheckpointError | ConfigurationError) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def error_of(what: str, error: CheckpointException) -> CheckpointError:
    """Return the CheckpointError of a failure: what each rank says, the same only once."""
    texts: dict[str, list[int]] = {}
    for rank, (failure, _) in sorted(error.failures.items()):
        texts.setdefault(_text_of(failure), []).append(rank)
    said = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items()]
    more = f"; and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
    return CheckpointError(f"{what} failed: {'; '.join(said[:_NAMED])}{more}")
