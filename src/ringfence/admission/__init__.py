"""Admission: decides which workers join a run, without access to sockets, clocks or files.

    Hello ──► Proof ──► policy.verify() ──► Admit        one edge of the tree      handshake.py
    entries up ──► roster and session secret down ──► acknowledgements up ──► go    tree.py

Start with `handshake.py`; `messages.py` has the encodings, `tree.py` the messages of the tree.
"""
