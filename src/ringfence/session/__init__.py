"""A worker's session, from joining to goodbye.

session.py             the session: joins, makes the engine and its links, ends
join/                  the way in: dial, prove, verify, until all workers hold the roster
members.py             the ranks of a session that some workers of a run form
proof_thread.py         its proofs while it goes on, if the policy has workers verified again
fresh_credentials.py    policy and credentials as they are now, for those
metrics.py             its counters as an OpenMetrics file
recording.py           its record: the thread that writes the log
head_exchange.py       the heads of all workers' previous logs, through the store
rendezvous_warning.py  a warning about launchers whose rendezvous anybody can change
"""
