"""Launching: the sealed rendezvous and store behind `ringfence run` (spec/launch.md).

    messages.py      calls, answers and notices, and their frames
    rounds.py        which agents form which round: no I/O, no clock
    values.py        the store of one round: no I/O, no clock
    store_state.py   both together: what the host of the store keeps
    host.py          admits agents over TLS and serves their calls
    host_link.py     an agent's connection to the host: dials, proves itself, dials again
    agent_loop.py    the thread of an agent: serves its own machine through a Unix socket
    agent_client.py  a blocking client of that socket; agent_folder.py, where it is
    agent_admission.py  how agents prove themselves, for as long as they live
    store.py         the store that torch sees
    torchrun.py      the entry point that torch loads
    handler.py       the rendezvous handler that it creates
    elastic_agent.py torchrun's agent, with retries of a round that ends while it forms
    spares.py        processes that have imported torch and wait for a script
    worker.py        hooks in workers: our store, our backend, and an end with their agent
    rejoin.py        workers that join the next round in place; tied.py: processes that end with their parent

Agents prove themselves to the agent that hosts the store, and it to them, with the admission handshake and under the policy
of the workers. Workers reach only their own agent. Nothing is unpickled: calls have fixed fields, and rendezvous data is JSON.
"""
