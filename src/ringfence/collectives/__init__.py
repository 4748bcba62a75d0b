"""Collectives as data: schedules that the runtime runs, tests check and the planner prices."""

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
