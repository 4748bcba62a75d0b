"""The kinds of proof, one in a file, each with a `policy.Verifier` and a `policy.Prover`."""
