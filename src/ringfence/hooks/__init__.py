"""Collectives with fewer bytes, for links that are slower than the workers.

int8.py      `all_reduce` with int8 on the wire, and the same as a communication hook of DDP with error feedback
pieces.py    a piece of a tensor on its way: quantised, exchanged, summed, quantised again, gathered
blocks.py    blocks of int8 values with a scale each
stages.py    the threads of the hook, and futures that fail as DDP needs it
"""

from ringfence.hooks import int8

__all__ = ["int8"]
