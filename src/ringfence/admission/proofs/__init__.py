"""What a worker can show to be admitted: one kind of proof a file, each a `policy.Verifier` and a `policy.Prover`."""
