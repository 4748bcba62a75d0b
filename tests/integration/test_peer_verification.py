"""Peer verification after real joins, with what each worker kept of its admission."""

from __future__ import annotations

import gc
import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric import ec

from ringfence import keys
from ringfence.admission.peer_verification import PeerVerifier, Presentation
from ringfence.admission.policy import Policy, Prover
from ringfence.admission.proofs import bundle, snp
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.backend import inside
from ringfence.errors import AdmissionError
from ringfence.session.join import Membership
from tests import provers
from tests.integration.join_cluster import SECRET, World
from tests.integration.test_admit_by_gpu_and_token import POLICY, pem
from tests.integration.token_service import signer_in
from tests.pool import Pool, values
from tests.unit import snp_mint
from tests.unit.token_mint import key_set

SIZE = 6


def test_all_pairs_pass_peer_verification_after_a_join() -> None:
    vm = snp_mint.foundry()
    policy = Policy((snp.verifier(vm.rules, time.time, known=vm.roots),))
    prover = provers.of_snp(lambda data: (vm.report(data), vm.certificate()))
    with World(SIZE) as world:
        world.start(range(SIZE), admission=dict.fromkeys(range(SIZE), (policy, prover)))
        known = [peer_verifier_of(member) for member in world.members()]
        for one, mine in enumerate(known):
            for two, theirs in enumerate(known):
                assert mine.due(two) == theirs.due(one)
                if mine.due(two):
                    mine.verify(two, theirs.presentation)
        assert known[5].due(0) and known[0].verified(5) and not known[0].due(4)


def peer_verifier_of(member: Membership) -> PeerVerifier:
    assert member.peer_verifier is not None
    return member.peer_verifier


@pytest.mark.promise("Once a run has formed, a worker keeps no shared secret, and no key from it that admits.")
def test_with_a_secret_no_peer_verifier_is_kept() -> None:
    with World(SIZE) as world:
        world.start(range(SIZE))
        assert [member.peer_verifier for member in world.members()] == [None] * SIZE


def held_by(top: object) -> list[object]:
    """All objects that can be reached from one, but for code."""
    found, left = {id(top): top}, [top]
    while left:
        for each in gc.get_referents(left.pop()):
            if id(each) not in found and not isinstance(each, type | ModuleType | FunctionType):
                found[id(each)] = each
                left.append(each)
    return list(found.values())


@pytest.mark.promise("Once a run has formed, a worker keeps no shared secret, and no key from it that admits.")
@pytest.mark.parametrize("together", [False, True], ids=["either", "both"])
def test_a_run_by_secret_and_hardware_keeps_no_key_that_admits(together: bool) -> None:
    """Ranks 1 and 5 were admitted by the secret, if that is enough: peer verification needs no key for them."""
    vm, shared = snp_mint.foundry(), SharedSecret(SECRET, "none")
    hardware = snp.verifier(vm.rules, time.time, known=vm.roots)
    prover: Prover = provers.of_snp(lambda data: (vm.report(data), vm.certificate()))
    policy = Policy((bundle.BundleVerifier([shared, hardware]),)) if together else Policy((shared, hardware))
    shown: Prover = bundle.BundleProver([shared, prover]) if together else prover
    admission = {rank: (policy, shown if together or rank not in (1, 5) else shared) for rank in range(SIZE)}
    assert any(isinstance(each, keys.Secret) for each in held_by(policy)), "the search finds what there is"
    with World(SIZE) as world:
        world.start(range(SIZE), admission=admission)
        known = [peer_verifier_of(member) for member in world.members()]
    for mine in known:
        assert not any(isinstance(each, keys.Secret | SharedSecret) for each in held_by(mine))
        for two in (rank for rank in range(SIZE) if mine.due(rank)):
            mine.verify(two, known[two].presentation)
            shown_by_two = Presentation.decode(known[two].presentation)
            forged = replace(shown_by_two, proof=bytes([shown_by_two.proof[0] ^ 1]) + shown_by_two.proof[1:])
            with pytest.raises(AdmissionError, match=f"worker {two}"):
                mine.verify(two, forged.encode())
        assert known[4].due(5) and not (known[1].due(5) or known[5].due(1))


def add_up_and_tell_whom_it_met() -> tuple[float, set[int], list[int]]:
    tensor = torch.full((4,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:  # siblings: they have one parent, and never met
        dist.send(tensor, 2)
    elif dist.get_rank() == 2:
        dist.recv(tensor, 1)
    engine: Any = dist.group.WORLD._session.engine
    known = engine.acceptor.peer_verifier
    return (
        float(tensor[0]),
        set(engine.acceptor.verified),
        [rank for rank in range(dist.get_world_size()) if known.verified(rank)],
    )


def by_token(tmp_path: Path) -> dict[str, str | None]:
    """Return the environment of workers that a token service admits."""
    (tmp_path / "service.key").write_bytes(pem(ec.generate_private_key(ec.SECP384R1())))
    (tmp_path / "keys.json").write_bytes(key_set(signer_in(tmp_path / "service.key")))
    (tmp_path / "policy.toml").write_text(POLICY)
    command = [sys.executable, "-m", "tests.integration.token_service", str(tmp_path / "service.key"), json.dumps({})]
    return {
        "RINGFENCE_POLICY": str(tmp_path / "policy.toml"),
        "RINGFENCE_TOKEN_COMMAND": shlex.join(command),
        "RINGFENCE_SECRET_FILE": None,
    }


def verify_all_members() -> list[int]:
    """As before a group inside a machine links all its members without sealing."""
    inside._verify_peers(dist.new_group(backend="ringfence"))
    known = dist.group.WORLD._session.engine.acceptor.peer_verifier
    return [rank for rank in range(dist.get_world_size()) if known.verified(rank)]


def test_all_members_of_an_inside_group_verify_each_other(pool: Pool, tmp_path: Path) -> None:
    """Ranks 1 and 2 have not met in the tree; no collective has linked them."""
    assert values(pool.run(verify_all_members, 3, env=by_token(tmp_path), renew=True)) == [[], [2], [1]]


def test_workers_admitted_by_tokens_meet_and_add_up(pool: Pool, tmp_path: Path) -> None:
    found = values(pool.run(add_up_and_tell_whom_it_met, 3, env=by_token(tmp_path), renew=True))
    assert [total for total, _, _ in found] == [3.0] * 3
    assert found[0][1:] == (set(), []), "rank 0 met both in the tree"
    assert found[1][1:] == ({2}, [2]), "it dialled, and both verified"
    assert found[2][1:] == (set(), [1])
