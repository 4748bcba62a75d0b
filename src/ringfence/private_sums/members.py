"""The members of a group, from the roster and the policy, which are equal on all workers: so all refuse the same groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from ringfence.admission.policy import PrivateSumTerms
from ringfence.admission.roster import Worker
from ringfence.errors import PrivateSumError
from ringfence.keys import SAME_HOST

Members = dict[str, tuple[int, ...]]  # the ranks of each member's workers, by its name


def members_of(
    terms: PrivateSumTerms | None, workers: Sequence[Worker], roster: Sequence[Worker], same_host: str
) -> Members:
    """Return the members of a group of some workers of a roster, in the order of their names.

    Raises PrivateSumError if the policy permits no private sum of them.
    """
    if terms is None:
        raise PrivateSumError(
            "the policy has no [private_sum], so it does not say how many colluding members to withstand: add the table, and "
            "a member to each rule"
        )
    outside = [worker.rank for worker in workers if not worker.member]
    if outside:
        raise PrivateSumError(
            f"worker {outside[0]} was admitted by a rule without a member: a private sum is of members that the policy names"
        )
    names = sorted({worker.member for worker in workers})
    if len(names) < terms.min_members:
        raise PrivateSumError(
            f"the group has workers of {', '.join(names)}, and the policy asks for {terms.min_members} members (min_members): "
            "the difference of two sums would be somebody's contribution"
        )
    if missing := sorted({worker.member for worker in roster if worker.member} - set(names)):
        raise PrivateSumError(
            f"the group has no worker of {', '.join(missing)}: sums of groups with and without a member tell its contribution"
        )
    members = {name: tuple(worker.rank for worker in workers if worker.member == name) for name in names}
    if same_host != SAME_HOST[1]:
        _check_machines(workers)
    return members


def _check_machines(workers: Sequence[Worker]) -> None:
    """Raise PrivateSumError if two members are on one machine, where their links are not sealed."""
    for one, other in combinations(workers, 2):
        if one.member != other.member and _host(one) == _host(other):
            raise PrivateSumError(
                f"workers {one.rank} and {other.rank}, of {one.member} and {other.member}, have one address, and the seeds of "
                'their masks would pass a Unix socket unsealed: set same_host = "sealed" in the policy'
            )


def _host(worker: Worker) -> str:
    return worker.address.rpartition(":")[0]
