"""Collective algorithms as schedules: data that the runtime executes, tests check and the planner simulates.

schedule.py                             steps, their chunks and what they wait for; builder.py makes them
selection.py                            which schedule a collective gets, from its size, the group and the thresholds
ring.py, tree.py, doubling.py           large tensors, small ones, small ones in few rounds
bruck.py, direct.py, scatter_gather.py  gathering, scattering, all to all
two_levels.py                           groups whose members share machines
"""

from ringfence.collectives.schedule import Action, Buffer, Dependency, Place, Schedule, Step
from ringfence.collectives.selection import Collective, ScheduleId, Thresholds, build, choose

__all__ = [
    "choose",
    "build",
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
