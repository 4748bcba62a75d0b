"""Private sums between processes: exact sums, what is refused on every rank, and keystreams that never repeat."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import ringfence
from ringfence import keys
from ringfence.private_sums import pairs, summing, updates
from ringfence.private_sums.agreement import agree
from ringfence.private_sums.fixed_point import FixedPoint
from ringfence.private_sums.pairs import PrivateGroup, private_group
from tests import device
from tests.members import PRIVATE, Consortium, policy_text
from tests.pool import Failure, Pool
from tests.unit.test_private_masks import INPUTS, chi_squared, ones_in_bits, serial_correlation

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64)
LARGE = 1 << 18  # elements; the votes and seeds of a test are far shorter
REFUSED = "PrivateSumError"


@pytest.fixture(scope="module", params=["compiled", pytest.param("python", marks=pytest.mark.nightly)])
def planes(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Workers of each data plane."""
    with Pool([["env", f"RINGFENCE_DATAPLANE={request.param}"]] * 4) as workers:
        yield workers


def values_of(rank: int, dtype: torch.dtype, elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return (torch.rand(elements, generator=generator, dtype=torch.float64) * 6 - 3).to(dtype)
    return torch.randint(-3, 4, (elements,), generator=generator).to(dtype)


def sums(elements: int, on_device: bool = False) -> dict[str, bool]:
    """Whether the private sum of each dtype is that of the rounded values of all ranks."""
    found, world = {}, range(dist.get_world_size())
    where = device.load() if on_device else torch.device("cpu")
    for fixed in (torch.int32, torch.int64):
        for dtype in DTYPES:
            mine = values_of(dist.get_rank(), dtype, elements)
            given = mine.to(where)
            total = ringfence.private_sum(given.view(-1, 7), bound=3.0, fixed=fixed)
            form = FixedPoint.fit(dtype, fixed, 3.0, len(world))
            steps = [(values_of(rank, dtype, elements).double() * 2.0**form.exponent).round().long() for rank in world]
            wanted = form.decode(torch.stack(steps).sum(0), dtype).view(-1, 7)
            same = torch.equal(total.cpu(), wanted) and torch.equal(given.cpu(), mine)
            found[f"{dtype} in {fixed}"] = same and total.device == given.device
    return found


def test_sums_are_exact_to_the_fixed_point(planes: Pool, tmp_path: Path) -> None:
    consortium = Consortium(tmp_path, ["a", "b", "c", "a"])
    for found in planes.check(sums, 4, env=consortium.environments(), args=(70_000,)):
        assert all(found.values()), found


def test_sums_of_device_tensors_are_exact(devices: Pool, tmp_path: Path) -> None:
    consortium = Consortium(tmp_path, ["a", "b", "c"])
    for found in devices.check(sums, 3, env=consortium.environments(), args=(7_000, True)):
        assert all(found.values()), found


def under_a_default_device() -> tuple[float, float]:
    """A sum and a mean of tensors on the CPU while torch creates its tensors on the device."""
    values, weight = torch.ones(70_000), torch.nn.Parameter(torch.zeros(5))
    weight.grad = torch.full((5,), 0.25)
    with device.load():
        total = ringfence.private_sum(values, bound=1.0)
        ringfence.private_mean([weight], 2, clip=1.0)
    return total.sum().item() / 70_000, weight.grad.sum().item()


def test_a_default_device_changes_no_sum(devices: Pool, tmp_path: Path) -> None:
    environments = Consortium(tmp_path, ["a", "b", "c"]).environments()
    results = devices.check(under_a_default_device, 3, env=environments)
    assert results == [(3.0, pytest.approx(1.25, abs=1e-6))] * 3


def strided_and_none() -> tuple[list[float], int]:
    every_other = torch.arange(10.0)[::2]
    return ringfence.private_sum(every_other, bound=16).tolist(), ringfence.private_sum(torch.empty(0), bound=1).numel()


def test_views_and_empty_tensors(pool: Pool, tmp_path: Path) -> None:
    environments = Consortium(tmp_path, ["a", "b", "c"]).environments()
    assert pool.check(strided_and_none, 3, env=environments) == [([0.0, 6.0, 12.0, 18.0, 24.0], 0)] * 3


def coalesced() -> tuple[float, float]:
    plain = torch.ones(4)
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(plain)
        total = ringfence.private_sum(torch.ones(4), bound=1.0)
    return plain[0].item(), total[0].item()


def test_a_coalescing_manager_puts_no_sum_off(pool: Pool, shared_folder: Path) -> None:
    """Its own calls begin at its end. A private sum that did so would return a masked contribution."""
    environments = Consortium.cached(shared_folder, "abc").environments()
    assert pool.check(coalesced, 3, env=environments) == [(3.0, 3.0)] * 3


# -- refused by the policy: nothing is sent -------------------------------------------------------------------------------


def sent() -> int:
    return sum(peer.payload_sent for peer in ringfence.counters().peers)


def refusal(call: Callable[[], Any]) -> tuple[str, int]:
    """The error of a call, and the bytes that were sent during it."""
    before = sent()
    try:
        call()
    except ringfence.PrivateSumError as error:
        return str(error), sent() - before
    return "", sent() - before


def refused_by_policy() -> tuple[str, int]:
    return refusal(lambda: ringfence.private_sum(torch.ones(LARGE), bound=1.0))


HEADS = {
    "no table": ('same_host = "sealed"\n', dict.fromkeys("abc", ""), "abc", "the policy has no"),
    "a rule without a member": (
        PRIVATE,
        {"a": "a", "b": "b", "c": "c", "d": ""},
        "abcd",
        "worker 3 was admitted by a rule",
    ),
    "too few members": (PRIVATE, {"a": "a", "b": "b", "c": "c"}, "abb", "asks for 3 members"),
    "below min_members": (
        PRIVATE + "min_members = 4\n",
        {name: name for name in "abcde"},
        "abc",
        "asks for 4 members",
    ),
    "one machine": (
        "[private_sum]\n",
        {name: name for name in "abc"},
        "abc",
        "workers 0 and 1, of a and b, have one address",
    ),
}


@pytest.mark.promise(
    "A private sum that one rank refuses is refused on every rank, before anything of a tensor is sent."
)
@pytest.mark.parametrize("name", HEADS)
def test_what_the_policy_does_not_permit_is_refused_on_every_rank(name: str, pool: Pool, tmp_path: Path) -> None:
    head, members, owners, says = HEADS[name]
    consortium = Consortium(tmp_path, [*owners], [*members])
    environments = consortium.environments(policy_text(members, head))
    for text, count in pool.check(refused_by_policy, len(owners), env=environments):
        assert says in text
        assert count == 0


def test_workers_of_one_member_may_share_a_machine(pool: Pool, tmp_path: Path) -> None:
    """Between members the roster lists other addresses, and the links inside of the member are not sealed."""
    consortium = Consortium(tmp_path, ["a", "b", "c", "a"])
    text = policy_text({name: name for name in "abc"}, "[private_sum]\n")
    environments = consortium.environments(text)
    for rank, address in enumerate(("127.0.1.1", "127.0.1.2", "127.0.1.3", "127.0.1.1")):
        environments[rank]["RINGFENCE_INTERFACE"] = address
    for found in pool.check(sums, 4, env=environments, args=(700,)):
        assert all(found.values()), found


# -- refused by agreement: nothing of a tensor is sent --------------------------------------------------------------------


def refused_together(number: int) -> tuple[str, int, float]:
    """What rank 1 does differently is refused on every rank; the next sum is right."""
    one = dist.get_rank() == 1
    large = torch.ones(LARGE)
    ringfence.private_sum(large, bound=1.0)
    changed = large.clone()
    changed[-1] = (1.1, float("nan"), float("-inf"))[number % 3]
    calls: list[Callable[[], Any]] = [
        *[lambda: ringfence.private_sum(changed if one else large, bound=1.0)] * 3,
        lambda: ringfence.private_sum(large, bound=2.0 if one else 1.0),
        lambda: ringfence.private_sum(large, bound=1.0, fixed=torch.int64 if one else torch.int32),
        lambda: ringfence.private_sum(large.double() if one else large, bound=1.0),
        lambda: ringfence.private_sum(large[1:] if one else large, bound=1.0),
        lambda: ringfence.private_sum(large.to(torch.complex64) if one else large, bound=1.0),
        lambda: ringfence.private_sum(large.to(torch.float8_e4m3fn) if one else large, bound=1.0),
        lambda: ringfence.private_sum(large.to(torch.int8) if one else large, bound=1.0),
        lambda: ringfence.private_sum(large.to_sparse() if one else large, bound=1.0),
        lambda: ringfence.private_mean([parameter(1.0)], 1, clip=2.0 if one else 1.0),
        lambda: ringfence.private_mean([parameter(1.0)], -1 if one else 1, clip=1.0),
        lambda: ringfence.private_mean([parameter(float("nan") if one else 1.0)], 1, clip=1.0),
        lambda: ringfence.private_mean([parameter(1.0)], 0, clip=1.0),
        lambda: ringfence.private_sum([1.0] if one else large, bound=1.0),  # type: ignore[arg-type]
        lambda: ringfence.private_sum(large, bound=10**400 if one else 1.0),
        lambda: ringfence.private_mean([None if one else parameter(1.0)], 1, clip=1.0),  # type: ignore[list-item]
        lambda: ringfence.private_mean([parameter(1.0)], 10**30 if one else 1, clip=1.0),
        lambda: ringfence.private_mean([parameter(1.0)], 1, clip=10**400 if one else 1.0),
        lambda: ringfence.private_mean([parameter(1.0)], 0.6 if one else 1, clip=1.0),  # type: ignore[arg-type]
        lambda: ringfence.private_mean([parameter(1e200 if one else 1.0, torch.float64)], 1, clip=1.0),
    ]
    text, count = refusal(calls[number])
    return text, count, ringfence.private_sum(large, bound=1.0)[0].item()


def parameter(gradient: float, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    found = torch.nn.Parameter(torch.zeros(LARGE, dtype=dtype))
    found.grad = torch.full((LARGE,), gradient, dtype=dtype)
    return found


BOUND, TERMS, KIND = "exceeds the bound", "with different arguments", "has no private sum"


@pytest.mark.promise(
    "A private sum that one rank refuses is refused on every rank, before anything of a tensor is sent."
)
@pytest.mark.parametrize(
    ("number", "says", "others"),
    [
        *((number, BOUND, "worker 1 refused") for number in range(3)),
        *((number, TERMS, TERMS) for number in (3, 4, 5, 6)),
        *((number, KIND, "worker 1 refused") for number in (7, 8, 9, 10)),
        (11, TERMS, TERMS),
        (12, "private_mean needs", "worker 1 refused"),
        (13, "the norm of this rank's update is not a finite number", "worker 1 refused"),
        (14, "no rank has samples", "no rank has samples"),
        (15, "a list has no private sum", "worker 1 refused"),
        (16, "OverflowError", "worker 1 refused"),
        (17, "AttributeError", "worker 1 refused"),
        (18, "OverflowError", "worker 1 refused"),
        (19, "is not a float", "worker 1 refused"),
        (20, "TypeError", "worker 1 refused"),
        (21, "the norm of this rank's update is not a finite number", "worker 1 refused"),
    ],
)
def test_what_one_rank_does_differently_is_refused_on_every_rank(
    number: int, says: str, others: str, pool: Pool, shared_folder: Path
) -> None:
    environments = Consortium.cached(shared_folder, "abc").environments()
    for rank, (text, count, total) in enumerate(pool.check(refused_together, 3, env=environments, args=(number,))):
        assert (says if rank == 1 else others) in text
        assert count < LARGE  # votes, and the sum of samples
        assert total == 3.0


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("consortium")


def overlapping() -> tuple[float, tuple[str, int], float]:
    """Sums over all workers, and over all but one of a member that has two."""
    whole = ringfence.private_sum(torch.ones(4), bound=1.0)[0].item()
    part = dist.new_group([0, 1, 2])
    found = ("", 0)
    if dist.get_rank() < 3:
        found = refusal(lambda: ringfence.private_sum(torch.ones(LARGE), part, bound=1.0))
    return whole, found, ringfence.private_sum(torch.ones(4), bound=1.0)[0].item()


@pytest.mark.promise(
    "A private sum that one rank refuses is refused on every rank, before anything of a tensor is sent."
)
def test_a_second_group_with_some_of_the_workers_is_refused(pool: Pool, tmp_path: Path) -> None:
    environments = Consortium(tmp_path, ["a", "b", "c", "a"]).environments()
    for rank, (before, (text, count), after) in enumerate(pool.check(overlapping, 4, env=environments)):
        assert (before, after) == (4.0, 4.0)
        assert ("have made private sums with others" in text) == (rank < 3)
        assert count < LARGE


def without_a_member() -> list[tuple[str, int]]:
    """Two groups of other workers, of which one has a member that the other lacks."""
    found = []
    for ranks in ([0, 2, 4], [1, 3, 5, 6]):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            found.append(refusal(lambda group=group: ringfence.private_sum(torch.ones(4), group, bound=1.0)))  # type: ignore[misc]
    return found


@pytest.mark.promise(
    "A private sum that one rank refuses is refused on every rank, before anything of a tensor is sent."
)
def test_a_group_without_one_of_the_members_is_refused(pool: Pool, tmp_path: Path) -> None:
    text = policy_text({name: name for name in "abcd"}, PRIVATE + "min_members = 3\n")
    environments = Consortium(tmp_path, [*"aabbccd"]).environments(text)
    for rank, ((says, count),) in enumerate(pool.check(without_a_member, 7, env=environments)):
        if rank in (0, 2, 4):
            assert "the group has no worker of d" in says and count == 0
        else:
            assert says == ""


def overlapping_sessions(ended: bool) -> tuple[float, tuple[str, int]]:
    """Sums over three workers, then over four: under a Gloo default group each has a session of its own."""
    total, first = 0.0, dist.new_group([0, 1, 2], backend="ringfence")
    if dist.get_rank() < 3:
        total = ringfence.private_sum(torch.ones(4), first, bound=1.0)[0].item()
        if ended:
            dist.destroy_process_group(first)
    second = dist.new_group([0, 1, 2, 3], backend="ringfence")
    before = ringfence.counters(second).peers
    try:
        ringfence.private_sum(torch.ones(LARGE), second, bound=1.0)
        text = ""
    except ringfence.PrivateSumError as error:
        text = str(error)
    count = sum(peer.payload_sent for peer in ringfence.counters(second).peers)
    return total, (text, count - sum(peer.payload_sent for peer in before))


@pytest.mark.promise(
    "A private sum that one rank refuses is refused on every rank, before anything of a tensor is sent."
)
@pytest.mark.parametrize("ended", [False, True])
def test_groups_of_several_sessions_know_each_others_sums(ended: bool, pool: Pool, tmp_path: Path) -> None:
    text = policy_text({name: name for name in "abcd"}, PRIVATE + "min_members = 3\n")
    environments = Consortium(tmp_path, ["a", "b", "c", "d"]).environments(text)
    found = pool.check(overlapping_sessions, 4, "gloo", env=environments, args=(ended,), renew=True)
    for rank, (total, (says, count)) in enumerate(found):
        assert total == (3.0 if rank < 3 else 0.0)
        assert ("have made private sums with others" if rank < 3 else "refused this private sum") in says
        assert count < LARGE


def not_sealed() -> str:
    try:
        ringfence.private_sum(torch.ones(4), bound=1.0)
    except ringfence.PrivateSumError as error:
        return str(error)
    return ""


def test_a_group_of_another_backend_is_refused(pool: Pool) -> None:
    assert all("backend ringfence" in text for text in pool.check(not_sealed, 3, "gloo"))


def average() -> str:
    try:
        ringfence.private_sum(torch.ones(4), bound=1.0, op=dist.ReduceOp.AVG)  # type: ignore[call-arg]
    except TypeError as error:
        return str(error)
    return ""


def test_there_is_no_average(pool: Pool, shared_folder: Path) -> None:
    environments = Consortium.cached(shared_folder, "abc").environments()
    assert all("op" in text for text in pool.check(average, 3, env=environments))


def forked() -> tuple[str, float]:
    ringfence.private_sum(torch.ones(4), bound=1.0)
    private, (reading, writing) = private_group(None), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            private.keystreams(private.begin())
            os.write(writing, b"masks were made")
        except ringfence.PrivateSumError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return os.read(reading, 1000).decode(), ringfence.private_sum(torch.ones(4), bound=1.0)[0].item()


@pytest.mark.promise("No keystream masks two contributions.")
def test_a_forked_child_makes_no_masks(pool: Pool, shared_folder: Path) -> None:
    environments = Consortium.cached(shared_folder, "abc").environments()
    assert (
        pool.check(forked, 3, env=environments)
        == [("this group has ended, or this is a forked child: its seeds were wiped", 3.0)] * 3
    )


def lying() -> str:
    """Worker 2 says that it has other members."""
    group = dist.group.WORLD
    exchange = type(group).exchange

    def changed(self: Any, messages: dict[int, bytes]) -> dict[int, bytes]:
        return exchange(self, {peer: bytes(32) + data[32:] for peer, data in messages.items()})

    with patch.object(type(group), "exchange", changed if dist.get_rank() == 2 else exchange):
        ringfence.private_sum(torch.ones(LARGE), bound=1.0)
    return "a sum was made"


def test_a_worker_with_another_layout_ends_the_session_on_all(pool: Pool, tmp_path: Path) -> None:
    environments = Consortium(tmp_path, ["a", "b", "c"]).environments()
    results = pool.run(lying, 3, env=environments, renew=True)
    assert all(isinstance(each, Failure) for each in results)
    assert {each.type for each in results} <= {REFUSED, "AbortedError", "PeerLostError"}
    assert any("have different members" in each.message for each in results[:2])


def contributions_sent(values: torch.Tensor) -> list[tuple[float, float, float]]:
    """Measures of what this worker gives to the all-reduce of two private sums of one tensor."""
    sent = []
    kind = type(dist.group.WORLD)
    all_reduce = kind.allreduce

    def recorded(self: Any, tensors: list[torch.Tensor], **options: Any) -> Any:
        if tensors[0].numel() == values.numel():
            sent.append(tensors[0].clone())
        return all_reduce(self, tensors, **options)

    with patch.object(kind, "allreduce", recorded):
        for _ in range(2):
            ringfence.private_sum(values, bound=1.0)
    assert len(sent) == 2
    return [measures(each) for each in (*sent, sent[0] - sent[1])]


def measures(contribution: torch.Tensor) -> tuple[float, float, float]:
    """In deviations from what random words have."""
    count = len(contribution)
    bits = max(abs(share - 0.5) for share in ones_in_bits(contribution))
    return (
        abs(chi_squared(contribution) - 255) / math.sqrt(2 * 255),
        bits * 2 * math.sqrt(count),
        abs(serial_correlation(contribution)) * math.sqrt(count),
    )


@pytest.mark.parametrize("name", INPUTS)
def test_what_is_sent_looks_random_whatever_the_input(name: str, pool: Pool, shared_folder: Path) -> None:
    """Eight deviations: less than once in 10**12 runs by chance."""
    environments = Consortium.cached(shared_folder, "abc").environments()
    for found in pool.check(contributions_sent, 3, env=environments, args=(INPUTS[name],)):
        assert max(max(each) for each in found) < 8


def seeds_held() -> list[list[int]]:
    """The length of each seed while the group lives, after its end, and after that of the session."""
    group = dist.new_group(list(range(dist.get_world_size())))
    default, other = (private_group(each) for each in (None, group))
    held = [[len(pair.seed.reveal()) for each in (default, other) for pair in each._pairs]]
    dist.destroy_process_group(group)
    dist.barrier()  # the driving thread has ended the group by then
    held.append([len(pair.seed.reveal()) for each in (default, other) for pair in each._pairs])
    dist.destroy_process_group()
    held.append([len(pair.seed.reveal()) for each in (default, other) for pair in each._pairs])
    return held


def test_seeds_are_wiped_with_their_group(pool: Pool, tmp_path: Path) -> None:
    environments = Consortium(tmp_path, ["a", "b", "c"]).environments()
    for held in pool.check(seeds_held, 3, env=environments, renew=True):
        assert held == [[32, 32, 32, 32], [32, 32, 0, 0], [0, 0, 0, 0]]


# -- keystreams -----------------------------------------------------------------------------------------------------------


def keystreams_used() -> list[str]:
    """The key and first counter block of each keystream of calls in two groups of equal workers."""
    used = []
    derive = keys.private_sum_mask

    def recorded(seed: Any, call: int) -> tuple[bytes, bytes]:
        key, counter = derive(seed, call)
        used.append((key + counter).hex())
        return key, counter

    with patch.object(keys, "private_sum_mask", recorded):
        again = dist.new_group(list(range(dist.get_world_size())))
        for group in (None, again, None, again):
            ringfence.private_sum(torch.ones(4), group, bound=1.0)
        with pytest.raises(ringfence.PrivateSumError):
            ringfence.private_sum(torch.ones(4), bound=0.5)
        dist.destroy_process_group(again)
        third = dist.new_group(list(range(dist.get_world_size())))
        ringfence.private_sum(torch.ones(4), third, bound=1.0)
    return used


@pytest.mark.promise("No keystream masks two contributions.")
def test_no_keystream_is_used_twice(pool: Pool, tmp_path: Path) -> None:
    """Over calls, groups with one name and the same workers, and sessions of the same processes and of new ones."""
    environments = Consortium(tmp_path, ["a", "b", "c", "d"]).environments()
    used: dict[str, set[tuple[int, int]]] = {}
    for session in range(3):
        with pool.fresh() as fresh:
            found = (fresh if session == 2 else pool).check(keystreams_used, 4, env=environments, renew=True)
        for rank, each in enumerate(found):
            assert len(each) == len(set(each)) == 6 * 2  # of two pairs
            for key in each:
                used.setdefault(key, set()).add((session, rank))
    assert all(len(ranks) == 2 and len({session for session, _ in ranks}) == 1 for ranks in used.values())
    assert len(used) == 3 * 6 * 4  # four pairs


# -- threads --------------------------------------------------------------------------------------------------------------


class Watched:
    """The lock of a group, and whether a thread has had to wait for it."""

    def __init__(self, lock: Any, waited: threading.Event) -> None:
        self.lock, self.waited = lock, waited

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.waited.set()
            self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def two_threads() -> tuple[float, float]:
    """Between a sum's agreement and its messages, another thread gets as far as it can with a sum of the same group.

    Without a lock it agrees as well; then ranks send the contributions of the two sums in different orders.
    """
    private, moved, sent = private_group(None), threading.Event(), threading.Event()
    lock = private.one_sum
    private.one_sum = Watched(lock, moved)  # type: ignore[assignment]
    found: list[float] = []
    other = threading.Thread(
        target=lambda: found.append(ringfence.private_sum(torch.full((4,), 0.5), bound=1.0)[0].item())
    )

    def agreed(*given: Any) -> None:
        agree(*given)
        if threading.current_thread() is other:
            moved.set()
            if dist.get_rank() == 0:
                sent.wait()
        else:
            other.start()
            moved.wait()
            if dist.get_rank() and not lock.locked():
                other.join()

    with patch.object(summing, "agree", agreed):
        first = ringfence.private_sum(torch.ones(4), bound=1.0)[0].item()
        sent.set()
        other.join()
    return first, found[0]


def test_sums_of_two_threads_are_apart(pool: Pool, tmp_path: Path) -> None:
    environments = Consortium(tmp_path, ["a", "b", "c"]).environments()
    assert pool.check(two_threads, 3, env=environments) == [(3.0, 1.5)] * 3


def created_by_two_threads() -> tuple[float, float, int]:
    """While one thread creates what a group keeps for its private sums, another one asks for it."""
    group, asked, made, found = dist.new_group(list(range(dist.get_world_size()))), threading.Event(), [], []
    pairs._creating[group] = Watched(threading.Lock(), asked)  # type: ignore[assignment]
    create = PrivateGroup.__init__

    def sum_once() -> None:
        found.append(ringfence.private_sum(torch.ones(4), group, bound=1.0)[0].item())

    other = threading.Thread(target=sum_once)

    def created(self: Any, given: Any) -> None:
        made.append(self)
        if len(made) == 1:
            other.start()
            asked.wait()
        asked.set()
        create(self, given)

    with patch.object(PrivateGroup, "__init__", created):
        sum_once()
        other.join()
    return found[0], found[1], len(made)


def test_two_threads_create_one_private_group(pool: Pool, tmp_path: Path) -> None:
    environments = Consortium(tmp_path, ["a", "b", "c"]).environments()
    assert pool.check(created_by_two_threads, 3, env=environments) == [(3.0, 3.0, 1)] * 3


# -- means and the hook ---------------------------------------------------------------------------------------------------

NEGATIVE = "or one has sent a negative number"
SAMPLES, CLIP = (497, 300, 197, 6), 1.0  # the last one has 0.6 % of the data


def mean_of(scale: float, largest_share: float, clip: float = CLIP) -> list[float]:
    """The mean gradient if the last rank scales its own."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    weights = [
        torch.nn.Parameter(torch.zeros(3, 5)),
        torch.nn.Parameter(torch.zeros(4)),
        torch.nn.Parameter(torch.ones(2)),
    ]
    for weight in weights[:2]:
        weight.grad = torch.rand(weight.shape, generator=generator) * 0.1 * (scale if rank == 3 else 1.0)
    ringfence.private_mean(weights, SAMPLES[rank], clip=clip, largest_share=largest_share)
    assert all(weight.grad is not None and weight.grad.shape == weight.shape for weight in weights)
    return [float(value) for weight in weights for value in weight.grad.view(-1)]


def gradients(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.cat([torch.rand(15, generator=generator), torch.rand(4, generator=generator)]) * 0.1


def test_a_mean_is_weighted_by_samples(pool: Pool, shared_folder: Path) -> None:
    environments = Consortium.cached(shared_folder, "abcd").environments()
    wanted = sum(gradients(rank) * (count / sum(SAMPLES)) for rank, count in enumerate(SAMPLES))
    for found in pool.check(mean_of, 4, env=environments, args=(1.0, 1.0)):
        assert found == pytest.approx([*wanted.tolist(), 0.0, 0.0], abs=1e-7)


@pytest.mark.promise("A worker that scales its update moves a private mean by no more than its share times the clip.")
@pytest.mark.parametrize("scale", [1000.0, -1000.0, 1e30])
def test_a_scaled_update_moves_the_mean_by_no_more_than_its_bound(
    scale: float, pool: Pool, shared_folder: Path
) -> None:
    environments = Consortium.cached(shared_folder, "abcd").environments()
    honest = torch.tensor(pool.check(mean_of, 4, env=environments, args=(1.0, 1.0))[0])
    scaled = torch.tensor(pool.check(mean_of, 4, env=environments, args=(scale, 1.0))[0])
    moved = float((scaled - honest).norm())
    share = SAMPLES[3] / sum(SAMPLES)
    own = share * float(gradients(3).norm())  # what its update, which is not clipped, contributes
    assert moved <= share * CLIP + own + 1e-6
    assert moved >= share * CLIP - own - 1e-6  # it was clipped to the bound, and not dropped


def test_without_a_clip_a_scaled_update_would_decide_the_mean(pool: Pool, shared_folder: Path) -> None:
    """The worker with 0.6 % of the samples, as far as a clip that clips nothing lets it."""
    environments = Consortium.cached(shared_folder, "abcd").environments()
    honest, scaled = (
        torch.tensor(pool.check(mean_of, 4, env=environments, args=(scale, 1.0, 1e4))[0]) for scale in (1.0, 1000.0)
    )
    assert float((scaled - honest).norm() / honest.norm()) > 5


def lying_of_samples(samples: int) -> tuple[str, int]:
    """Worker 1 sends another number of samples than a private mean lets it."""

    def lied(private: Any, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        one = dist.get_rank() == 1 and tensor.numel() == 1
        return summing.sum_in(private, torch.tensor([samples]) if one else tensor, **options)

    with patch.object(updates, "sum_in", lied):
        own = 0 if dist.get_rank() == 1 else 3
        return refusal(lambda: ringfence.private_mean([parameter(1.0)], own, clip=1.0))


@pytest.mark.parametrize(
    ("samples", "says"), [(-5, "together say 1 samples, and this one has 3"), (-6, NEGATIVE), (-100, NEGATIVE)]
)
def test_negative_samples_turn_no_update_round(samples: int, says: str, pool: Pool, shared_folder: Path) -> None:
    environments = Consortium.cached(shared_folder, "abc").environments()
    for rank, (text, count) in enumerate(pool.check(lying_of_samples, 3, env=environments, args=(samples,))):
        assert ("refused this private sum" if rank == 1 and samples == -5 else says) in text
        assert count < LARGE


def test_no_member_has_more_than_the_largest_share(pool: Pool, shared_folder: Path) -> None:
    environments = Consortium.cached(shared_folder, "abcd").environments()
    shares = [min(count / sum(SAMPLES), 0.3) for count in SAMPLES]
    wanted = sum(gradients(rank) * share for rank, share in enumerate(shares))
    for found in pool.check(mean_of, 4, env=environments, args=(1.0, 0.3)):
        assert found == pytest.approx([*wanted.tolist(), 0.0, 0.0], abs=1e-7)


def trained(bound: float, on_device: bool = False) -> list[float] | str:
    where = device.load() if on_device else torch.device("cpu")
    with device.behaviour(jitter=1e-4) if on_device else contextlib.nullcontext():
        return trained_on(where, bound)


def trained_on(where: torch.device, bound: float) -> list[float] | str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(where)
    replica = DistributedDataParallel(model, broadcast_buffers=False)
    replica.register_comm_hook(None, ringfence.private_hook(bound=bound))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    try:
        for _ in range(3):
            optimizer.zero_grad()
            replica(torch.rand(8, 4, generator=generator).to(where)).square().mean().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return [float(value) for weight in model.parameters() for value in weight.detach().view(-1)]


def two_hooks() -> str:
    replica = DistributedDataParallel(torch.nn.Linear(2, 2))
    replica.register_comm_hook(None, ringfence.private_hook(bound=1.0))
    try:
        replica.register_comm_hook(None, fp16_compress_hook)
    except RuntimeError as error:
        return str(error)
    return ""


def test_ddp_takes_no_hook_that_compresses_beside_it(pool: Pool, shared_folder: Path) -> None:
    environments = Consortium.cached(shared_folder, "abc").environments()
    assert all("can only be called once" in text for text in pool.check(two_hooks, 3, env=environments))


def trained_alone(world: int) -> list[float]:
    """The same training in one process, with the mean of all ranks' gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generators = [torch.Generator().manual_seed(rank) for rank in range(world)]
    for _ in range(3):
        optimizer.zero_grad()
        for generator in generators:
            (model(torch.rand(8, 4, generator=generator)).square().mean() / world).backward()
        optimizer.step()
    return [float(value) for weight in model.parameters() for value in weight.detach().view(-1)]


def test_ddp_trains_as_one_process_does(pool: Pool, shared_folder: Path) -> None:
    environments = Consortium.cached(shared_folder, "abc").environments()
    results = pool.check(trained, 3, env=environments, args=(8.0,))
    assert results[0] == results[1] == results[2]
    assert results[0] == pytest.approx(trained_alone(3), abs=1e-5)


def test_ddp_trains_on_devices_as_one_process_does(devices: Pool, tmp_path: Path) -> None:
    environments = Consortium(tmp_path, ["a", "b", "c"]).environments()
    results = devices.check(trained, 3, env=environments, args=(8.0, True))
    assert results[0] == results[1] == results[2]
    assert results[0] == pytest.approx(trained_alone(3), abs=1e-5)


def test_a_gradient_beyond_the_bound_ends_backward_on_every_rank(pool: Pool, shared_folder: Path) -> None:
    environments = Consortium.cached(shared_folder, "abc").environments()
    for text in pool.check(trained, 3, env=environments, args=(1e-6,)):
        assert BOUND in text or "refused this private sum" in text
