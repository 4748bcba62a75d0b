"""Workers of `ringfence run --rejoin` that join the next round in place, without a new process."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Final

from ringfence import keys
from ringfence.admission.encoding import Reader
from ringfence.errors import AbortedError, ConfigurationError, PeerLostError
from ringfence.guard import AGENT
from ringfence.launch.agent_client import AgentClient
from ringfence.launch.messages import Answer, CallResult, Notice, Operation, from_json, text_of, to_json
from ringfence.launch.spares import OF_A_ROUND
from ringfence.log import announce

_VARIABLE_BYTES: Final = 64


def rejoin(timeout: timedelta | None = None) -> None:
    """Join the next round of the run in this process, after a worker was lost or a node came or left.

    Call it where a collective has raised: it destroys all process groups, waits for the other nodes, sets ``RANK``,
    ``WORLD_SIZE`` and the other variables of the new round, and creates the default process group, with new keys. Groups of
    before, and what holds them (DDP, FSDP, a device mesh), cannot be used any more. Workers may have stopped at different
    steps: let them agree on the state, for example by loading the last checkpoint.

    Workers that have not called this when the time of ``--rejoin`` is over are started again, and so are all workers on
    a node that has lost one.

    Args:
        timeout: The new group's timeout; torch's default is half an hour.

    Raises:
        ConfigurationError: The run was not started by ``ringfence run --rejoin``, or no restarts are left.
    """
    import torch.distributed as dist

    client = _agent()
    place = to_json({"local_rank": int(os.environ["LOCAL_RANK"])})
    while True:
        if dist.is_initialized():
            dist.destroy_process_group()
        # the agent bounds the wait, and this process ends with it
        answer = client.ask(Operation.REJOIN, (place,), seconds=keys.CALL_LIMIT_MILLISECONDS / 1000)
        os.environ.update(_variables(answer))
        try:
            dist.init_process_group("ringfence", timeout=timeout)
            return
        except (PeerLostError, AbortedError, dist.DistError) as error:  # another loss; the agent limits how often
            announce(f"the round {os.environ['RINGFENCE_GENERATION']} did not form: {error}")


def round_ended() -> bool:
    """Return whether this worker has to join another round: a node has left the run, or one waits to join it.

    It asks the agent of this machine and sends nothing over the network. Workers may see the change at different steps: let
    one rank decide for all, or let those that go on find their groups gone.

    Raises:
        ConfigurationError: The run was not started by ``ringfence run``.
    """
    answer = _agent().ask(Operation.STATUS)
    return bool(answer.parts) and Notice.read(Reader(answer.parts[0])).ends(os.environ["RINGFENCE_GENERATION"])


def _agent() -> AgentClient:
    if AGENT not in os.environ:
        raise ConfigurationError("this process has no agent: start the script with `ringfence run --rejoin`")
    return _client(os.environ[AGENT])


@functools.cache
def _client(path: str) -> AgentClient:
    return AgentClient(path)


def _variables(answer: Answer) -> dict[str, str]:
    if answer.result is not CallResult.OK:
        raise ConfigurationError(f"this worker cannot rejoin: {answer.text}")
    found = from_json(answer.parts[0])
    return {name: text_of(found, name, _VARIABLE_BYTES) for name in sorted(found) if name in OF_A_ROUND}
