"""Workers in processes of their own that are admitted by hardware evidence: all is real but the chip.

The chip is a key in the test's process, which answers what a worker's kernel asks it: 64 bytes and a level in, a report out.
Collecting, proving, verifying, TLS and the tree run in the worker, under a root that is handed to the verifier's constructor.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from ringfence import keys
from ringfence.admission.policy import Policy, Prover, Verifier
from ringfence.admission.proofs import snp, tdx
from ringfence.admission.proofs.snp_chain import line
from ringfence.admission.proofs.snp_report import PRODUCTS
from ringfence.config.settings import Settings
from ringfence.errors import RingfenceError
from ringfence.evidence import guest, tsm
from ringfence.runtime.control import Bye
from ringfence.session.join import join
from tests import provers
from tests.fake_tsm import Kernel
from tests.integration.admitted_worker import FolderStore
from tests.limits import FAR, HANG

TIMEOUT = FAR
Chip = Callable[[bytes, int], bytes]


@dataclass(frozen=True)
class Plan:
    """What a worker is told, besides its rank: which rules it verifies by, under which roots, and what it is itself."""

    kind: str  #                          of proof that it shows
    tdx_rules: tdx.Rules | None = None
    tdx_root: bytes | None = None
    snp_rules: snp.Rules | None = None
    snp_roots: Mapping[str, bytes] | None = None  # product: PEM
    auxblob: bytes = b""  #               what its host hands over
    seconds: float = 0.0  #               that its chip takes for a report
    patience: float = keys.EVIDENCE_SECONDS

    def verifiers(self) -> list[Verifier]:
        found: list[Verifier] = []
        if self.tdx_rules is not None:
            found.append(tdx.verifier(self.tdx_rules, time.time, root=self.tdx_root))
        if self.snp_rules is not None:
            known = None
            if self.snp_roots is not None:
                known = {name: line(PRODUCTS[name], pem) for name, pem in self.snp_roots.items()}
            found.append(snp.verifier(self.snp_rules, time.time, known=known))
        return found

    def prover(self, chip: Chip) -> Prover:
        if self.kind == "tdx":
            td = Kernel(tsm.TDX, chip)
            return provers.of_tdx(lambda data: guest.tdx(data, td))
        vm = Kernel(tsm.SNP, chip, auxblob=self.auxblob, level_floor=0)
        return provers.of_snp(lambda data: guest.snp(data, vm))


def work(pipe: Connection, folder: str, rank: int, size: int, plan: Plan, timeout: float) -> None:
    """The worker's process: join, say how it went, wait until all have, leave."""

    asking = threading.Lock()  # a kernel makes one report after the other
    keys.EVIDENCE_SECONDS = plan.patience  # type: ignore[misc]

    def chip(report_data: bytes, level: int) -> bytes:
        with asking:
            time.sleep(plan.seconds)
            pipe.send(("chip", report_data, level))
            report: bytes = pipe.recv()
        return report

    admission = Policy(tuple(plan.verifiers())), plan.prover(chip)
    began = time.monotonic()
    try:
        store = FolderStore(Path(folder))
        member = join(store, rank, size, Settings(), ("127.0.0.1", 1), timeout, b"", admission=admission)
    except RingfenceError as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        return
    how = sorted({each.proof_name for each in member.roster.admitted})
    key = keys.digest(b"test", member.session_key.reveal()).hex()
    pipe.send(("joined", member.roster.digest.hex(), key, how, time.monotonic() - began))
    pipe.recv()
    for edge in member.edges:
        edge.send(Bye(rank))
        edge.close()


def run(
    folder: Path, plans: Sequence[Plan], chips: Sequence[Chip], timeout: float = TIMEOUT
) -> list[tuple[object, ...]]:
    """Run a worker for each plan, each with its chip, and return their results by rank."""
    context = multiprocessing.get_context("spawn")
    folder.mkdir(parents=True, exist_ok=True)
    pipes, processes = [], []
    for rank, plan in enumerate(plans):
        near, far = context.Pipe()
        process = context.Process(target=work, args=(far, str(folder), rank, len(plans), plan, timeout), daemon=True)
        process.start()
        far.close()
        pipes.append(near)
        processes.append(process)
    said: dict[int, tuple[object, ...]] = {}
    deadline = time.monotonic() + timeout + 60
    while len(said) < len(plans):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in said]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        assert ready, f"workers hang: {said}"
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            what, *values = pipes[rank].recv()
            if what == "chip":
                pipes[rank].send(chips[rank](*values))
            else:
                said[rank] = (what, *values)
    for rank, process in enumerate(processes):
        if said[rank][0] == "joined":
            pipes[rank].send("leave")
        process.join(HANG)
        assert process.exitcode == 0
    return [said[rank] for rank in range(len(plans))]
