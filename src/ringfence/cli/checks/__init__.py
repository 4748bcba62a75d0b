"""The checks of `ringfence doctor`.

check.py          the result of one
software.py       Python, torch, packages, TLS, the backend, the data plane
hardware.py       CPU, memory, TEE
device.py         the accelerator
configuration.py  settings, policy, credentials, ports
group.py          a group of one worker
"""
