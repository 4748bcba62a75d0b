"""Collective algorithms as schedules: data that the runtime executes, tests check and the planner simulates.

schedule.py                             steps, their chunks and what they wait for; builder.py makes them
selection.py                            which schedule a collective gets, from its size, the group and the thresholds
passes.py                               how a large collective is divided
ring.py, halving.py, doubling.py        all-reduce, reduce-scatter, all-gather: few workers, many, small tensors
tree.py                                 broadcast and reduce
bruck.py, direct.py, scatter_gather.py  gathering, scattering, all to all
two_levels.py                           groups whose members share machines
counts.py                               what a collective costs one worker: rounds, seals, bytes, copies, memory
"""

from ringfence.collectives.passes import Passes
from ringfence.collectives.schedule import Action, Buffer, Collective, Dependency, Place, Schedule, Step
from ringfence.collectives.selection import ScheduleId, Thresholds, build, choose, chooser, divide

__all__ = [
    "choose",
    "chooser",
    "build",
    "divide",
    "Passes",
    "Collective",
    "ScheduleId",
    "Thresholds",
    "Schedule",
    "Step",
    "Action",
    "Buffer",
    "Place",
    "Dependency",
]
