"""All that is fuzzed, by name. Importing it imports the parsers, so a fuzzer that instruments them imports it late."""

from __future__ import annotations

from tests.fuzz import contact_targets, policy_targets, proof_targets, wire_targets

_ALL = (*wire_targets.TARGETS, *contact_targets.TARGETS, *policy_targets.TARGETS, *proof_targets.TARGETS)
TARGETS = {each.name: each for each in _ALL}
