"""The runtime of one worker in one session. Modules, from the lowest layer to the highest:

link_keys           the keys that links are made from
events              what lower layers are given: shared values, and the protocol through which they report
links               dialling, link handshake, closing
same_machine        two workers prove to each other that they are on one machine
peer_verification   two workers verify each other before their first link
pending             accepted connections that are not authenticated yet
point_to_point      transfers; tag_matching
communicator        the links and the collectives of one process group; channels, its further connections
control             messages between neighbours of the admission tree
reverification      neighbours of the tree are verified again, once in an interval
registry            the communicators of a worker
acceptor            pending connections, peer verifications, and connections for groups not created yet
requests, timers, aborts, counters   the other parts of the engine's state
engine              wires all of them; aborts the session on a failure
progress            drives the engine over TCP; gil_switch, stages, staging_times
"""
