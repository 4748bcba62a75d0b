"""Collective algorithms as schedules: data that the runtime executes, tests check and the planner simulates."""

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
