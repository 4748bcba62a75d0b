"""First contact after real joins: what workers kept of their admission is what those who never met them judge."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric import ec

from ringfence.admission.policy import Policy
from ringfence.admission.proofs import snp
from tests.pool import Pool, values
from tests.process.join_world import World
from tests.process.test_admit_by_gpu_and_token import POLICY, pem
from tests.process.token_service import signer_in
from tests.pure import snp_mint
from tests.pure.mint_token import key_set

SIZE = 6


def test_after_a_join_everybody_passes_with_everybody_it_never_met() -> None:
    vm = snp_mint.foundry()
    policy = Policy((snp.SnpVerifier(vm.rules, time.time, known=vm.roots),))
    prover = snp.SnpProver(lambda data: (vm.report(data), vm.certificate()))
    with World(SIZE) as world:
        world.start(range(SIZE), admission=dict.fromkeys(range(SIZE), (policy, prover)))
        known = [member.acquaintances for member in world.members()]
        for one, mine in enumerate(known):
            for two, theirs in enumerate(known):
                assert mine.due(two) == theirs.due(one)
                if mine.due(two):
                    mine.judge(two, theirs.showing)
        assert known[5].due(0) and known[0].judged(5) and not known[0].due(4)


def test_under_a_secret_nobody_is_to_be_judged_again() -> None:
    with World(SIZE) as world:
        world.start(range(SIZE))
        assert not any(member.acquaintances.due(rank) for member in world.members() for rank in range(SIZE))


def add_up_and_tell_whom_it_met() -> tuple[float, set[int], list[int]]:
    from ringfence import backend

    tensor = torch.full((4,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:  # siblings: they have one parent, and never met
        dist.send(tensor, 2)
    elif dist.get_rank() == 2:
        dist.recv(tensor, 1)
    engine: Any = backend._session.engine  # type: ignore[union-attr]
    known = engine.acquaintances
    return float(tensor[0]), set(engine._met), [rank for rank in range(dist.get_world_size()) if known.judged(rank)]


def test_workers_admitted_by_tokens_meet_and_add_up(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "service.key").write_bytes(pem(ec.generate_private_key(ec.SECP384R1())))
    (tmp_path / "keys.json").write_bytes(key_set(signer_in(tmp_path / "service.key")))
    (tmp_path / "policy.toml").write_text(POLICY)
    command = [sys.executable, "-m", "tests.process.token_service", str(tmp_path / "service.key"), json.dumps({})]
    env = {
        "RINGFENCE_POLICY": str(tmp_path / "policy.toml"),
        "RINGFENCE_TOKEN_COMMAND": shlex.join(command),
        "RINGFENCE_SECRET_FILE": None,
    }
    found = values(pool.run(add_up_and_tell_whom_it_met, 3, env=env, renew=True))
    assert [total for total, _, _ in found] == [3.0] * 3
    assert found[0][1:] == (set(), []), "rank 0 met both in the tree"
    assert found[1][1:] == ({2}, [2]), "it dialled, and both judged"
    assert found[2][1:] == (set(), [1])
