"""Staging of device tensors: a collective on a GPU is executed in passes over pinned host memory.

    caller          records an event on its current stream, and returns
    device thread   waits for that event -> copies a pass to a pinned slot (stream `down`) -> waits for the copy
    progress loop   executes the pass on the slot, as on host tensors: seals, sends, opens, reduces
    device thread   copies the results back (stream `up`), records the event that `Work.wait()` orders its stream after

    call.py, tensors.py      a call on device tensors, and the slices of its passes
    collective.py            a collective, pass by pass; transfer.py: a send or receive, piece by piece
    device_thread.py         the thread of a device
    slots.py                 its pinned memory

Passes overlap: while one is on the network, the next ones are copied down and earlier ones up. The pinned slots of a device
are bounded. Copies are never issued in the caller's thread or in the progress loop, because in confidential mode they block
the issuing thread.
"""
