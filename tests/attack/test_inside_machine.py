"""Two machines with two workers each: what an observer of the network between them sees of groups inside the machines.

Network namespaces stand for machines. A complete capture of the cable between them is searched for parameters, gradients and
a sentence that the workers tell each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ringfence
from ringfence.backend import inside
from ringfence.errors import RingfenceError
from ringfence.runtime import same_machine
from tests.attack.eavesdrop import Capture
from tests.integration.inside import SENTENCE, Records, alone, hybrid_losses, kind, mesh_of, tell, write_policy
from tests.integration.netns import ADDRESSES, Hosts
from tests.limits import FAR, HANG
from tests.pool import Pool, values

SIDES = ("near", "near", "far", "far")  # where each rank lives
WORLD = len(SIDES)
SEALED, INSIDE = "RingfenceProcessGroup ringfence", "inside gloo"
SHORT = timedelta(seconds=5)  # for what must not connect
ACROSS = ((0, 2), (1, 3), (0, 1, 2, 3), (0, 3))

pytestmark = pytest.mark.processes


class Machines:
    """Workers on two machines, and the captures of what they send."""

    def __init__(self, hosts: Hosts, pool: Pool, folder: Path) -> None:
        self.pool = pool
        self._hosts = hosts
        self._policy = write_policy(folder)

    def run(self, function: Any, *args: Any, backend: str = "ringfence", policy: bool = True) -> list[Any]:
        """Form a run, capture the cable and the near machine's loopback while the function runs; return the results."""
        common = self._policy if policy else {}
        env = [
            {**common, "RINGFENCE_INTERFACE": ADDRESSES[side], "GLOO_SOCKET_IFNAME": "cable", "LOCAL_WORLD_SIZE": "2"}
            for side in SIDES
        ]
        values(self.pool.join(backend, WORLD, seconds=60, env=env, renew=True))
        near = self._hosts.names["near"]
        with Capture(near, "cable") as self.cable, Capture(near) as self.loopback:
            results = values(self.pool.start(function, WORLD, args).wait(HANG))
        self.cable.assert_complete()
        return results


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Hosts() as hosts, Pool([hosts.prefix(side) for side in SIDES]) as pool:
        yield Machines(hosts, pool, tmp_path_factory.mktemp("policy"))


def train(override: dict[str, str] | None) -> dict[str, Any]:
    mesh = mesh_of(override)
    groups = {name: mesh.get_group(name) for name in ("outer", "inner")}
    found: dict[str, Any] = {"kinds": [kind(group) for group in groups.values()]}
    found["losses"], found["samples"] = hybrid_losses(mesh)
    found["told"] = [tell(group) for group in groups.values()]
    return found


def check(machines: Machines, results: list[dict[str, Any]], kinds: list[str]) -> None:
    """Losses are those of one process, and what was sent inside a machine did not leave it."""
    reference = alone()
    samples = sorted({sample for found in results for sample in found["samples"]})
    assert len(samples) > 20
    for found in results:
        assert found["kinds"] == kinds
        assert found["losses"] == pytest.approx(reference, rel=1e-5)
        assert found["told"] == [True, True]
    assert machines.cable.size > 10_000
    assert not machines.cable.contains([SENTENCE, *samples])
    assert machines.loopback.contains([SENTENCE]) and machines.loopback.contains(samples)


@pytest.mark.promise("A mesh with a plaintext inside sends no plaintext between machines.")
def test_a_mesh_with_an_inside_backend_sends_no_plaintext_between_machines(machines: Machines) -> None:
    """HSDP, sharded over Gloo inside the machines and replicated over ringfence between them."""
    check(machines, machines.run(train, {"inner": "gloo"}), [SEALED, INSIDE])


@pytest.mark.promise("A mesh with a plaintext inside sends no plaintext between machines.")
def test_an_outer_dimension_beside_a_gloo_default_sends_no_plaintext(machines: Machines) -> None:
    results = machines.run(train, {"outer": "ringfence"}, backend="gloo", policy=False)
    check(machines, results, ["RingfenceProcessGroup ringfence", "ProcessGroup gloo"])


@pytest.mark.promise("The checks of the inside of a mesh detect plaintext between machines.")
def test_the_same_search_finds_plaintext_of_a_mesh_of_gloo(machines: Machines) -> None:
    """The sentence in both dimensions, and gradients, which HSDP adds up over the outer one."""
    results = machines.run(train, None, backend="gloo", policy=False)
    assert machines.cable.contains([SENTENCE])
    assert machines.cable.contains(sorted({sample for found in results for sample in found["samples"]}))


def across() -> tuple[list[str], list[bool], list[str]]:
    """Ask for Gloo in groups that span the machines, and in both dimensions of a mesh."""
    records = Records()
    groups = [dist.new_group(list(ranks), backend="gloo") for ranks in ACROSS]
    groups.append(mesh_of({"outer": "gloo", "inner": "gloo"}).get_group("outer"))
    mine = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    ringfence.assert_sealed()
    return [kind(group) for group in mine], [tell(group) for group in mine], records.texts


@pytest.mark.promise("A group that spans machines is sealed, whatever backend a script asks for.")
def test_a_group_across_machines_is_sealed(machines: Machines) -> None:
    for kinds, told, texts in machines.run(across):
        assert set(kinds) == {SEALED} and len(kinds) >= 3
        assert all(told)
        assert any("asks for gloo and is sealed: its members are on different machines" in text for text in texts)
    assert not machines.cable.contains([SENTENCE])


# -- workers that lie about their machine -----------------------------------------------------------------------------


def equal_hints() -> tuple[str, bool, list[str]]:
    """All workers claim one place, as a lying roster or a lying worker would; the proof decides."""
    records = Records()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inside, "place", lambda: b"one machine")
        group = dist.new_group(backend="gloo")
    return kind(group), tell(group), records.texts


@pytest.mark.promise("Two workers on different machines, or of different users, cannot pass for one machine.")
def test_workers_that_claim_one_machine_do_not_pass(machines: Machines) -> None:
    for found, told, texts in machines.run(equal_hints):
        assert (found, told) == (SEALED, True)
        assert any("has no proof" in text for text in texts), texts
    assert not machines.cable.contains([SENTENCE])


def without_proof(interface: str | None) -> str:
    """The proof is disabled; with `interface`, so is the binding to the loopback interface."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inside, "place", lambda: b"one machine")
        patch.setattr(same_machine.MachineProof, "run", lambda self: self._others)
        if interface is not None:
            patch.setattr(inside, "LOOPBACK", ADDRESSES[SIDES[dist.get_rank()]])
        try:
            limit = SHORT if interface is None else timedelta(seconds=FAR)
            group = dist.new_group([0, 2], backend="gloo", timeout=limit)
        except (RingfenceError, RuntimeError) as error:
            return f"refused: {error}"
    if dist.get_rank() in (0, 2):
        assert tell(group)
        return kind(group)
    return ""


@pytest.mark.promise("The checks of the inside of a mesh detect plaintext between machines.")
def test_without_proof_and_binding_the_capture_shows_plaintext(machines: Machines) -> None:
    """Both defences are removed: then the search must find the sentence, or the tests above would show nothing."""
    results = machines.run(without_proof, "cable")
    assert [results[rank] for rank in (0, 2)] == [INSIDE] * 2
    assert machines.cable.contains([SENTENCE])


def test_without_proof_the_loopback_binding_still_keeps_plaintext_inside(machines: Machines) -> None:
    """The second defence: Gloo's listener is not reachable from another machine."""
    results = machines.run(without_proof, None)
    assert all(results[rank].startswith("refused") for rank in (0, 2)), results
    assert not machines.cable.contains([SENTENCE])
