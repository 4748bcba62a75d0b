"""All that is fuzzed, by name. Importing it imports the parsers, so a fuzzer that instruments them imports it late."""

from __future__ import annotations

from tests.fuzz import (
    azure_targets,
    checkpoint_targets,
    launch_targets,
    peer_verification_targets,
    place_targets,
    policy_targets,
    proof_targets,
    record_targets,
    wire_targets,
)

_MODULES = (
    wire_targets,
    launch_targets,
    checkpoint_targets,
    place_targets,
    peer_verification_targets,
    policy_targets,
    proof_targets,
    record_targets,
    azure_targets,
)
TARGETS = {each.name: each for module in _MODULES for each in module.TARGETS}
