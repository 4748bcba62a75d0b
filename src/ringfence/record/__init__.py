"""Signed records of what ran, and their verification (spec/record.md). Imports no torch.

envelope.py      DSSE envelopes: a payload and its signature, as bytes
signing_key.py   the Ed25519 key that signs records, and its public half
statement.py     in-toto Statements: what a payload says, and of which artifacts
code.py          the digests of the installed code, and of all that a run could import
selftest.py      what the record of a self-test says
provenance.py    what the statement of a run says, made from its logs
manifest.py      the files of a data set, and the root of a Merkle tree over them
manifest_files.py  folders, hashed into a manifest or compared with one
log.py           the log of a worker in a session: its chain and its signatures
log_file.py      writes a log, and the files that it refers to by digest
begin.py         the first line of a log: whose it is, and the roster
evidence.py      what a worker presented at its join, verified as of that time
heads.py         the heads of all workers' previous logs, which each records
folder.py        all logs of a folder
agreement.py     compares what both endpoints of each connection recorded
sessions.py      the sessions of a run: which logs are missing, where two ends disagree
claims.py        what is claimed of a run, and whether its record shows it
json_object.py   JSON with fixed names
"""
