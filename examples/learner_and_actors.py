"""Reinforcement learning with one learner and several actors: sealed weights go out, sealed trajectories come back.

    ringfence secret new run.secret && export RINGFENCE_SECRET_FILE=$PWD/run.secret
    ringfence run --nproc-per-node 4 examples/learner_and_actors.py

Worker 0 learns. The others look for the corner of a grid; each step costs 1. They exchange tensors and no objects, because
`recv_object_list` and `broadcast_object_list` unpickle, which runs code of the sender's choice. A compromised actor can only
send wrong numbers, and the learner checks their count and range.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ringfence

LEARNER = 0
SIZE, EPISODES, LONGEST = 6, 16, 20  # of the grid; that an actor plays in an update; steps of an episode
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
MOVE, RETURN = 2, 3  # columns of a trajectory, after the cell's two
LOWEST, HIGHEST = torch.tensor([0, 0, 0, -LONGEST]), torch.tensor([SIZE - 1, SIZE - 1, len(MOVES) - 1, -1])


def make_policy() -> nn.Sequential:
    """From a cell to the logits of four moves, and the return that is expected there; 549,908 bytes of weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2 * SIZE, 256), nn.Tanh(), nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 5))


def evaluate(policy: nn.Module, cells: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
    outputs = policy(nn.functional.one_hot(cells, SIZE).flatten(1).float())
    return Categorical(logits=outputs[:, :4]), outputs[:, 4]


def share(policy: nn.Module) -> None:
    """Give all actors the learner's weights as one tensor. The learner seals it once, and actors forward the ciphertext."""
    bucket = parameters_to_vector(policy.parameters()).detach()
    dist.broadcast(bucket, LEARNER)
    vector_to_parameters(bucket, policy.parameters())


def send(trajectory: torch.Tensor, update: int) -> None:
    """Send a header of fixed size, which says how many steps follow, and the steps."""
    dist.send(torch.tensor([update, len(trajectory)]), LEARNER)
    dist.send(trajectory, LEARNER)


def receive(actor: int, update: int) -> torch.Tensor:
    header = torch.empty(2, dtype=torch.int64)
    dist.recv(header, actor)
    played, length = header.tolist()
    if played != update or not 0 < length <= EPISODES * LONGEST:
        raise ValueError(f"actor {actor} announces {length} steps of update {played} in update {update}")
    trajectory = torch.empty(length, 4)
    dist.recv(trajectory, actor)
    if not ((trajectory >= LOWEST) & (trajectory <= HIGHEST)).all():  # refuses NaN too
        raise ValueError(f"actor {actor} sent numbers that are no trajectory")
    return trajectory


@torch.no_grad()
def play(policy: nn.Module) -> torch.Tensor:
    """Play all episodes side by side. Return cell, move and return of every step that was taken."""
    cells, going, steps = torch.randint(1, SIZE, (EPISODES, 2)), torch.ones(EPISODES, dtype=torch.bool), []
    for _ in range(LONGEST):
        moves = evaluate(policy, cells)[0].sample()
        steps.append(torch.cat([cells, moves[:, None], going[:, None]], dim=1).float())
        cells = (cells + MOVES[moves]).clamp(0, SIZE - 1)
        going = going & cells.any(dim=1)  # until the corner 0, 0
    taken = torch.stack(steps)
    taken[:, :, RETURN] = -taken[:, :, RETURN].flip(0).cumsum(0).flip(0)  # from here on
    return taken[taken[:, :, RETURN] < 0]


def learn(policy: nn.Module, optimizer: torch.optim.Optimizer, steps: torch.Tensor) -> None:
    chosen, expected = evaluate(policy, steps[:, :MOVE].long())
    gain = steps[:, RETURN] / LONGEST - expected
    loss = gain.square().mean() - (gain.detach() * chosen.log_prob(steps[:, MOVE])).mean()
    optimizer.zero_grad()
    (loss - 0.01 * chosen.entropy().mean()).backward()
    optimizer.step()


def train(updates: int) -> list[float]:
    """Return the mean return of each update's episodes, on the learner."""
    policy, actors, returns = make_policy(), range(1, dist.get_world_size()), []
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())  # actors play different episodes
    for update in range(updates):
        share(policy)
        if dist.get_rank() != LEARNER:
            send(play(policy), update)
            continue
        steps = torch.cat([receive(actor, update) for actor in actors])
        learn(policy, optimizer, steps)
        returns.append(-len(steps) / (EPISODES * len(actors)))  # each step costs 1
        if update % 10 == 0:
            print(f"update {update}: mean return {returns[-1]:.2f}", flush=True)
    return returns


def main() -> None:
    parser = argparse.ArgumentParser(description="Reinforcement learning with one learner and several actors.")
    parser.add_argument("--updates", type=int, default=61)
    updates = parser.parse_args().updates
    dist.init_process_group("ringfence")
    train(updates)
    if dist.get_rank() == LEARNER:
        for peer in ringfence.counters().peers:
            print(f"to worker {peer.worker}: {peer.sealed_sent} bytes sealed, {peer.local_sent} in shared memory")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
