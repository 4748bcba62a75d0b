"""Collective algorithms as schedules: data that the runtime executes, tests check and the planner simulates."""

from ringfence.collectives.schedule import Action, Buffer, Dependency, Place, Schedule, Step
from ringfence.collectives.selection import Collective, ScheduleId, Table, build, choose

__all__ = [
    "choose",
    "build",
    "Collective",
    "ScheduleId",
    "Table",
    "Schedule",
    "Step",
    "Action",
    "Buffer",
    "Place",
    "Dependency",
]
