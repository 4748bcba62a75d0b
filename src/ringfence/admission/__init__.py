"""Admission: who may join a run, decided without touching a socket, a clock or a file.

    Hello ──► Proof ──► policy.verify() ──► Admit        one edge of the tree      handshake.py
    entries up ──► roster and session secret down ──► acknowledgements up ──► go    tree.py

Start reading at `handshake.py`; the bytes are in `messages.py`, the tree's traffic in `tree.py`.
"""
