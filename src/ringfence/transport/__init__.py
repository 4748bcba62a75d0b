"""Connections, without knowledge of the protocol above.

tcp.py     listening, dialling, polling
tls.py     TLS 1.3 of admission and control
unix.py    Unix sockets, and which process is at the other end
outage.py  TCP that survives an outage
fork.py    what a forked child must not keep
alarm.py   timers that count while a machine is suspended
"""
