"""Admission: decides which workers join a run, without access to sockets, clocks or files.

handshake.py              two workers admit each other: Hello, Proof, policy.verify(), Admit. Start here
binding.py                what a proof covers: one worker, one connection, one direction
policy.py                 `verify()`, the only way to an `Admitted`
policy_file/              the policy as written
proofs/                   the kinds of proof
roots/                    the root certificates of hardware vendors
tree.py                   entries up, roster and session secret down, acknowledgements up, go
entry.py, roster.py       a worker in the roster, and all of them with one digest
agreement.py              signatures of the roster, so that nobody shows two
peer_verification.py      workers that did not meet in the tree
renewal.py                workers verify their neighbours in the tree again
messages.py, encoding.py  the bytes: strict codecs
"""
