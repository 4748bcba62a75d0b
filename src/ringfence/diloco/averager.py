"""`DiLoCo`: the outer step, its state, and how a site catches up.

All sites begin a round with the same *agreed* parameters. Each takes `every` steps of the inner optimizer. Its
pseudo-gradient is the agreed parameters minus those that it has come to. The outer optimizer steps from the agreed parameters
along the average of the pseudo-gradients, on all workers alike.
"""

from __future__ import annotations

import copy
import secrets
from types import TracebackType
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ringfence.backend.groups import check_group_sealed
from ringfence.diloco import outer_state, standing
from ringfence.diloco.standing import Standing, Table, local
from ringfence.errors import MismatchError
from ringfence.hooks.int8 import all_reduce as int8_all_reduce

_KINDS: Final = ("replicas", "shards")
_BUCKET: Final = 1 << 24  # elements of one all-reduce: further ones are prepared while it is under way


class DiLoCo:
    """Averages the models of several sites after every so many steps of the inner optimizer.

    The loop stays as it is: `inner.step()` takes the outer step when it is due. Then it raises, on every worker and before a
    parameter is changed, MismatchError if they differ in parameters or steps, FloatingPointError if a value is not finite,
    and the error of a collective if a worker is lost (`catch_up`).

        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with ringfence.DiLoCo(model, inner, outer, every=100):
            ...  # forward, backward, inner.step()

    If a site has several workers, which hold replicas (DDP) or shards (FSDP2) of one model, give both dimensions of a mesh of
    sites and workers: `group=mesh.get_group("site"), site=mesh.get_group("worker")`. Each worker then averages its part
    with its counterparts in the other sites, so that the model crosses between sites once, and not once for each worker.

    Only parameters that require a gradient are averaged. Buffers, such as the statistics of BatchNorm, and the state of the
    inner optimizer stay those of each worker. Keep parameters in float32.

    It keeps the agreed parameters and what the outer optimizer has, such as momentum, and with int8 what rounding has lost.
    An outer step, or a site that catches up, takes two to four times the memory of the parameters more. A CRC-32 of the
    agreed parameters, of the outer optimizer's state and, if a site has several workers, of the pseudo-gradient is computed
    on the CPU in each outer step: about a third of a nanosecond for a byte that this worker holds, and the copy from its
    device. If the outer optimizer itself fails, this worker has no state until it takes that of another site (`catch_up`)
    or a saved one.

    Creating it is a collective: all workers must begin with equal parameters, or take the state of the site that is furthest.

    Args:
        model: The module, also within DDP or after `fully_shard`.
        inner: The optimizer that the loop calls.
        outer: An optimizer of the same parameters, which only this object calls.
        every: How many inner steps are between two outer steps.
        group: The workers that average: one of each site. Default: all workers, each of which is a site.
        site: The workers of this site, as many as in every other.
        int8: Average with int8 on the wire (`ringfence.hooks.int8.all_reduce`), a quarter of the bytes. What rounding has
            lost is added the next time.

    Raises:
        ValueError: `outer` has other parameters than the model, or `every` is less than 1.
        ConfigurationError: A group is not sealed.
        MismatchError: On every worker: they begin with different parameters, or have a different `every`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer,
        every: int,
        group: Any = None,
        site: Any = None,
        int8: bool = False,
    ) -> None:
        named = list(model.named_parameters())  # tied ones once
        self._names = [name for name, parameter in named if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in named if parameter.requires_grad]
        given = [parameter for entry in outer.param_groups for parameter in entry["params"]]
        if {id(each) for each in given} != {id(each) for each in self._parameters} or not given:
            raise ValueError(
                "the outer optimizer must have exactly the parameters of the model that require a gradient"
            )
        if every < 1:
            raise ValueError(f"every= is a number of inner steps, at least 1, and not {every}")
        self.inner, self.outer, self.every = inner, outer, every
        self.outer_steps, self.steps = 0, 0
        self._contributes, self._int8 = True, int8
        self._agreed = [parameter.detach().clone() for parameter in self._parameters]
        # Of each pair: the first for parameters that all workers hold alike, the second for shards.
        self._average: tuple[int, list[torch.Tensor]] | None = None  # with its number
        self._residuals = [torch.empty(0), torch.empty(0)]  # what int8 has lost so far,
        self._new_residuals = self._residuals  # and once the step with this average is taken
        self._taken = 0  # the number of the average of the last outer step
        self._frozen = standing.checksums(each for each in named if not each[1].requires_grad)
        # Of frozen and agreed parameters, and of the outer optimizer's state.
        self._checksums: tuple[int, int] | None = None
        self.catch_up(group, site)
        self._handle = inner.register_step_post_hook(self._after_inner_step)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the inner optimizer alone from now on. The model keeps the parameters that it has."""
        self._handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last outer step: agreed parameters, the outer optimizer, and what int8 has lost.

        Inner steps since then are not in it: save after an outer step. Tensors are not copied. All but `residuals`, whose
        names begin with the rank, is the same on all workers.

        Raises:
            RuntimeError: The outer optimizer has failed.
        """
        if self.outer_steps == standing.LOST:
            raise RuntimeError("DiLoCo: the outer optimizer has failed: this worker has no state until it catches up")
        new = not self.outer.state
        outer = (self._copy_of_outer() if new else self.outer).state_dict()
        agreed = dict(zip(self._names, self._agreed, strict=True))
        state = {"agreed": agreed, "outer": outer, "outer_is_new": new, "outer_steps": self.outer_steps}
        residuals = {f"{dist.get_rank()}.{kind}": each for kind, each in zip(_KINDS, self._residuals, strict=True)}
        return state | ({"residuals": residuals} if self._int8 else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved state, and give the model its agreed parameters. All workers must do so together.

        Leave `residuals` out if there are more or fewer workers than before.

        Raises:
            ValueError: It is of another model, of another outer optimizer, or of another number of workers. Nothing is
                changed then.
        """
        saved, own = state["agreed"], dict(zip(self._names, self._agreed, strict=True))
        if _kinds_of(saved) != _kinds_of(own):
            raise ValueError("this state is of a model with other parameters: names, shapes or dtypes differ")
        names = [f"{dist.get_rank()}.{kind}" for kind in _KINDS]
        lost = [state.get("residuals", {}).get(name) for name in names]
        pairs = list(zip(lost, self._residuals, strict=True))
        if any(each is not None and each.shape != residual.shape for each, residual in pairs):
            raise ValueError("this state has residuals of another number of workers: leave them out")
        steps, new = int(state["outer_steps"]), bool(state["outer_is_new"])
        self.outer.load_state_dict(state["outer"])  # if it refuses, nothing has changed
        self._average = self._checksums = None
        if new:
            self.outer.state.clear()
        for each, residual in pairs:
            residual.zero_() if each is None else residual.copy_(each)
        with torch.no_grad():
            for name, agreed in own.items():
                agreed.copy_(saved[name])
        self.outer_steps, self._taken = steps, 0
        self._begin_round()

    # -- loss and return ---------------------------------------------------------------------------------------------

    def catch_up(self, group: Any = None, site: Any = None) -> None:
        """Go on in new process groups, after `ringfence.rejoin()`. A collective: new workers create their DiLoCo meanwhile.

        A site that is behind takes the agreed parameters and the state of the outer optimizer from the one that is furthest. It
        goes on from them with an empty inner optimizer, and contributes from the next round on; so does a site whose
        workers stopped at different steps. All others keep their inner steps. An outer step that a loss has interrupted
        is taken now. Of sites that have taken different outer steps of the same number, those with one of them are behind.
        So are those whose outer optimizer has failed.

        Args:
            group, site: The new groups, as in the constructor.

        Raises:
            MismatchError: On every worker: they have different agreed parameters, another state of the outer optimizer or
                another `every`, or no site is complete.
        """
        self._group = dist.group.WORLD if group is None else group
        self._site = site
        for each in (self._group, *([] if site is None else [site])):
            check_group_sealed(each)
        with torch.no_grad():
            table = self._exchange()
            standing.require_equal(standing.all_of(table), "every")
            if late := standing.missed_the_step(table):
                if dist.get_rank() in late:
                    self._step_outer()
                table = self._exchange()
            self._average = None
            self._take_over(table)
            self._measure()
            if self.steps >= self.every:
                self._outer_step()

    def _measure(self) -> None:
        """Note how many elements a pseudo-gradient has, filled up to as many for each worker of the site."""
        members = 1 if self._site is None else dist.get_world_size(self._site)
        sizes = [sum(each.numel() for each, _ in self._pairs(sharded)) for sharded in (False, True)]
        self._sizes = [-(-sizes[0] // members) * members, sizes[1]]
        if self._int8 and [each.numel() for each in self._residuals] != [self._sizes[0] // members, self._sizes[1]]:
            self._residuals = [self._zeros(self._sizes[0] // members), self._zeros(self._sizes[1])]

    def _take_over(self, table: Table) -> None:
        """Bring this worker's site to the state of the site that is furthest, if it is behind."""
        whole = [row for row in table if len({worker.history for worker in row}) == 1]
        if not whole:
            raise MismatchError("DiLoCo: in each site, workers stopped at different outer steps: load a checkpoint")
        furthest = max(row[0].history for row in whole)
        if furthest[0] == standing.LOST:
            raise MismatchError("DiLoCo: the outer optimizer has failed in every site: load a checkpoint")
        complete = [row for row in whole if row[0].history == furthest]
        keep = [row for row in complete if len({worker.steps for worker in row}) == 1]
        standing.require_one_model(complete)
        if len(complete) < len(table):
            self._broadcast_state(table.index(complete[0]))
        mine = table[dist.get_rank(self._group)]
        if mine not in keep:
            self.outer_steps, self._taken = furthest
            self._begin_round()
            self.inner.state.clear()
            self.steps = max((row[0].steps for row in keep), default=0)
            self._contributes = self.steps == 0
            for residual in self._residuals:  # those of another worker would be added twice
                residual.zero_()
        if not any(worker.contributes for row in keep for worker in row):
            self._contributes = True

    def _broadcast_state(self, source: int) -> None:
        """Give all sites the agreed parameters and the outer optimizer of one. A replica crosses once for a site.

        A site takes them when it has all of them. If this breaks off before, it has the state that it had.
        """
        sends, rank = dist.get_rank(self._group) == source, dist.get_global_rank(self._group, source)
        agreed = self._agreed if sends else [each.clone() for each in self._agreed]
        settings = [{**entry, "params": None} for entry in self.outer.param_groups]
        sent: list[Any] = [(settings, outer_state.described(self.outer)) if sends else None]
        dist.broadcast_object_list(sent, rank, self._group)
        settings, described = sent[0]
        state = outer_state.of(self.outer) if sends else outer_state.empty(self.outer, described)
        for like, tensor in (*zip(agreed, agreed, strict=True), *outer_state.tensors(state)):
            replica = self._site is not None and not isinstance(like, DTensor)
            if not replica or dist.get_rank(self._site) == 0:
                dist.broadcast(local(tensor), rank, self._group)
            if replica:
                dist.broadcast(tensor, dist.get_global_rank(self._site, 0), self._site)
        if not sends:
            for entry, given in zip(self.outer.param_groups, settings, strict=True):
                entry.update({**given, "params": entry["params"]})
            self.outer.state.clear()
            self.outer.state.update({parameter: own for parameter, own in state if own})
            self._agreed, self._checksums = agreed, None

    def _copy_of_outer(self) -> torch.optim.Optimizer:
        """Return a copy of the outer optimizer that has state, for a load to write into.

        If it has taken no step, its copy takes one: what that leaves is of the right shape, and of no meaning.
        """
        outer = copy.deepcopy(self.outer)
        if not outer.state:
            for parameter in (each for entry in outer.param_groups for each in entry["params"]):
                parameter.grad = torch.zeros_like(parameter)
            outer.step()
        return outer

    # -- the outer step ----------------------------------------------------------------------------------------------

    def _after_inner_step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps >= self.every:
            with torch.no_grad():
                self._outer_step()

    def _outer_step(self) -> None:
        """Average the pseudo-gradients and step. Nothing changes before the average is complete on all workers."""
        replicas, shards = average = [self._delta(sharded) for sharded in (False, True)]
        change = 0 if self._site is None else standing.checksum(replicas)
        table = self._exchange(_is_finite(replicas, shards), change, 1 + secrets.randbits(62))
        standing.require_equal(standing.all_of(table), "steps")
        standing.require_state(table)
        standing.require_one_model(table)
        standing.require_finite(table, "the pseudo-gradient")
        for row in table:
            standing.require_equal(row, "change")
        contributors = sum(row[0].contributes for row in table)
        self._new_residuals = [
            self._reduce(replicas, contributors, self._residuals[0], self._site),
            self._reduce(shards, contributors, self._residuals[1], None),
        ]
        self._average = table[0][0].average, average
        standing.require_finite(self._exchange(_is_finite(replicas, shards)), "the average")
        self._step_outer()

    def _pairs(self, sharded: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return agreed and current values of the parameters of which this worker holds a shard, or of the others."""
        return [
            (local(agreed), local(parameter))
            for agreed, parameter in zip(self._agreed, self._parameters, strict=True)
            if isinstance(parameter, DTensor) is sharded
        ]

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, device=local(self._agreed[0]).device)

    def _delta(self, sharded: bool) -> torch.Tensor:
        """Return this worker's pseudo-gradient as one float32 tensor; zeros if it does not contribute."""
        whole, end = self._zeros(self._sizes[sharded]), 0
        for agreed, parameter in self._pairs(sharded) if self._contributes else ():
            start, end = end, end + agreed.numel()
            whole[start:end].view_as(agreed).copy_(agreed).sub_(parameter)
        return whole

    def _reduce(self, whole: torch.Tensor, contributors: int, residual: torch.Tensor, site: Any) -> torch.Tensor:
        """Average over the sites in place. Workers of a site, if one is given, each average a part and gather all parts.

        Returns what int8 has lost now. It counts when the step is taken, and not before.
        """
        residual = residual.clone()
        if not whole.numel():
            return residual
        parts = [whole] if site is None else list(whole.view(dist.get_world_size(site), -1).unbind())
        part = parts[0 if site is None else dist.get_rank(site)]
        if self._int8:
            int8_all_reduce(part, self._group, residual=residual)
        else:
            works = [dist.all_reduce(bucket, group=self._group, async_op=True) for bucket in part.split(_BUCKET)]
            for work in works:
                work.wait()
        part /= contributors
        if site is not None:
            dist.all_gather(parts, part.clone(), group=site)
        return residual

    def _step_outer(self) -> None:
        """Take the outer step with the average that is there, and begin the next round."""
        assert self._average is not None
        (number, average), self._average = self._average, None  # used once: if this fails, the worker is behind
        kept, places = [parameter.grad for parameter in self._parameters], [0, 0]
        steps, self.outer_steps = self.outer_steps, standing.LOST  # until the optimizer has taken the whole step
        try:
            for parameter, agreed in zip(self._parameters, self._agreed, strict=True):
                parameter.copy_(agreed)
                parameter.grad = torch.empty_like(parameter)
                gradient, sharded = local(parameter.grad), isinstance(parameter, DTensor)
                end = places[sharded] + gradient.numel()
                gradient.copy_(average[sharded][places[sharded] : end].view_as(gradient))
                places[sharded] = end
            self.outer.step()
        finally:
            for parameter, own in zip(self._parameters, kept, strict=True):
                parameter.grad = own
        for parameter, agreed in zip(self._parameters, self._agreed, strict=True):
            agreed.copy_(parameter)
        self._checksums, self._residuals = None, self._new_residuals
        self.outer_steps, self._taken = steps + 1, number
        self._begin_round()

    def _begin_round(self) -> None:
        self.steps, self._contributes = 0, True
        with torch.no_grad():
            for parameter, agreed in zip(self._parameters, self._agreed, strict=True):
                parameter.copy_(agreed)

    def _exchange(self, finite: bool = True, change: int = 0, number: int = 0) -> Table:
        """Exchange the standings of all workers; `number` is what the next average may be known by."""
        if self._checksums is None:
            agreed = standing.checksums(zip(self._names, self._agreed, strict=True), self._frozen)
            self._checksums = outer_state.checksums(self.outer, agreed)
        own = Standing(
            rank=dist.get_rank(),
            every=self.every,
            outer_steps=self.outer_steps,
            steps=self.steps,
            contributes=self._contributes,
            finite=finite,
            change=change,
            replicas=self._checksums[0],
            shards=self._checksums[1],
            average=number or (self._average[0] if self._average is not None else 0),
            taken=self._taken,
        )
        return standing.exchange(own, local(self._agreed[0]).device, self._group, self._site)


def _kinds_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (each.shape, each.dtype) for name, each in tensors.items()}


def _is_finite(*tensors: torch.Tensor) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors)
