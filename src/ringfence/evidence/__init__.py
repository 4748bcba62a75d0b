"""Collectors of evidence on this machine: from its TEE, from its GPUs, from a verifier service."""
