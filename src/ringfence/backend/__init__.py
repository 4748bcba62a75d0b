"""What torch sees of ringfence: its registration, process groups and `Work`.

autoload.py         the entry point that torch calls at the end of `import torch`
torch_versions.py   the releases of torch that ringfence is tested with
groups.py           `ringfence.init` and `ringfence.assert_sealed`
process_group.py    the process group, and how torch makes one
sessions.py         which session a group belongs to
base.py             properties that torch queries; `_submit`, the way of every call
collective.py, transfers.py, sparse.py   the calls, under torch's names
overloads.py        the forms in which torch calls them
binding.py          tensors bound to the memory of a schedule
work.py             `Work`: waits for requests
sealed_group.py     the sealed group that these methods make up
inside.py           groups inside one machine that a policy permits without sealing
data_record.py      `ringfence.record_data`
sealed_store.py     a store inside a session
observe.py, trace.py, ranges.py   profiler and flight recorder
default_backend.py, dynamo.py     what torch expects of its own backends
"""
