"""The bytes between two workers of the roster (spec/link.md). `runtime/links.py` has the connections themselves.

hello.py           the handshake of a link, in one round trip
seal.py            AES-256-GCM with counters and a key ratchet: where a frame's counter is checked
frames.py          the header of a frame, and the description of a call
segments.py        how a chunk is divided
evidence_frame.py  the proofs of a peer verification
tag_chain.py       hashes over the tags of all frames, for a record of the run
unsealed.py        frames inside one machine
"""
