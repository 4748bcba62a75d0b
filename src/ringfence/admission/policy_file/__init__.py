"""The policy file: TOML, read strictly. What its tables mean is said where each kind of proof is verified."""
