"""The model: whether a point lies in the unit circle."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.layers(points)
