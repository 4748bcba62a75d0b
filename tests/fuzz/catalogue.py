"""All that is fuzzed, by name. Importing it imports the parsers, so a fuzzer that instruments them imports it late."""

from __future__ import annotations

from tests.fuzz import policy_targets, proof_targets, wire_targets

TARGETS = {each.name: each for each in (*wire_targets.TARGETS, *policy_targets.TARGETS, *proof_targets.TARGETS)}
