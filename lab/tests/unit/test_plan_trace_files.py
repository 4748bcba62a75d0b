"""Traces of profilers: recorded ones are understood, and files that are broken, hostile or of something else are refused."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.errors import ConfigurationError
from ringfence_lab.plan.json_stream import JsonStream
from ringfence_lab.plan.recorded import Recording, elements_of, operation_of, width_of
from ringfence_lab.plan.trace_files import read

TRACES = Path(__file__).parents[1] / "data" / "traces"
ELEMENTS = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 16 + 16  # of the recorded model


def in_blocks(content: bytes, size: int = 4096) -> Iterator[bytes]:
    return (content[at : at + size] for at in range(0, len(content), size))


class Blocks(RawIOBase):
    """A file of which at most `size` bytes are read at a time."""

    def __init__(self, content: bytes, size: int) -> None:
        self._blocks = in_blocks(content, size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = next(self._blocks, b"")
        buffer[: len(block)] = block
        return len(block)


def opened(content: bytes, size: int = 4096) -> BufferedReader:
    return BufferedReader(Blocks(content, size))


def recorded(name: str) -> Recording:
    return read(opened((TRACES / name).read_bytes()), name)


def test_a_kineto_trace_of_gloo() -> None:
    found = recorded("ddp-rank0.json.gz")
    assert (found.backend, found.rank, found.workers, found.on_device) == ("gloo", 0, 2, False)
    assert [window.number for window in found.windows] == [1, 2, 3]
    assert {call.operation for call in found.calls} == {"all_reduce"}
    assert sum(call.bytes for call in found.calls) == 3 * 4 * ELEMENTS
    assert sum(gradient.elements for gradient in found.gradients) == 3 * ELEMENTS
    assert all(call.issued <= call.begun <= call.ended for call in found.calls)


def test_collectives_of_fsdp_by_the_call_that_handed_them_over() -> None:
    """torch's Gloo does a reduce-scatter as an all-reduce; the operator says what was asked for."""
    found = recorded("fsdp2-rank0.json.gz")
    whole = dict.fromkeys(("all_gather", "reduce_scatter"), 0)
    for call in found.calls:
        whole[call.operation] += call.bytes
    assert whole["reduce_scatter"] == 3 * 4 * ELEMENTS
    assert whole["all_gather"] == 2 * whole["reduce_scatter"]


def test_an_execution_trace_has_the_same_collectives_and_no_times() -> None:
    graph, timed = recorded("ddp-execution-trace-rank0.json.gz"), recorded("ddp-rank0.json.gz")
    assert not graph.timed
    assert graph.workers == 2
    assert [call.key for call in graph.calls] == [call.key for call in timed.calls]
    assert [each.elements for each in graph.gradients] == [each.elements for each in timed.gradients]


def test_an_nccl_trace_by_the_fields_of_its_kernels_and_calls() -> None:
    """The last all-reduce of a step has no fields of its own; the call with its external id has them."""
    found = recorded("nccl-hand-made.json")
    assert (found.backend, found.workers, found.on_device) == ("nccl", 4, True)
    assert [call.key for call in found.calls[:3]] == [
        ("all_reduce", 26_214_400, 4),
        ("all_reduce", 26_214_400, 4),
        ("all_reduce", 10_485_760, 4),
    ]
    assert [window.number for window in found.windows] == [5, 6]


def test_recorded_traces_do_not_name_the_machine() -> None:
    for file in TRACES.glob("*.json.gz"):
        found = json.loads(gzip.decompress(file.read_bytes()))
        assert not {"host_name", "traceName"} & found.keys()
        assert "/" not in json.dumps([event.get("name") for event in found.get("traceEvents", ())])


def event(name: str, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": 1, "dur": 1, "tid": 1, "args": args}


GLOO = {"Input Dims": [[8]], "Input type": ["float"]}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (b"", "truncated"),
        (b"   ", "truncated"),
        (b"no trace", "is not a trace"),
        (b"17", "is not a trace"),
        (b"{}", "neither traceEvents nor nodes"),
        (b"[]", "neither traceEvents nor nodes"),
        (b'{"traceEvents": [', "truncated"),
        (b'{"traceEvents": [{"ph": "X", "name": "gl', "truncated"),
        (b'{"traceEvents": [{"ph": "X"} {"ph": "X"}]}', "malformed"),
        (b'{"traceEvents": [{"ph": X}, {"ph": "Y"}]}', "malformed"),
        (b"\x1f\x8b\x08\x00", "truncated"),
        (b"\x1f\x8b\x08\x00" + b"\xff" * 50, "damaged"),
        (b'{"traceEvents": ' + b"[" * 200_000, "malformed"),
        (b'{"traceEvents": [1' + b"0" * 5000 + b"]}", "malformed"),
        (b'{"traceEvents": ["' + b"x" * (5 << 20) + b'"]}', "malformed or longer"),
        (json.dumps({"traceEvents": [event("aten::mm")]}).encode(), "no collectives"),
        (json.dumps({"traceEvents": [event("gloo:all_reduce")]}).encode(), "record_shapes=True"),
        (
            json.dumps({"traceEvents": [event("gloo:all_reduce", **GLOO), event("gloo:send")]}).encode(),
            "does not cover",
        ),
        (json.dumps({"nodes": [{"id": 1, "name": "aten::mm"}]}).encode(), "no collectives"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_a_remedy(document: bytes, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        read(opened(document), "file")


def test_sizes_are_missing_without_record_shapes() -> None:
    with pytest.raises(ConfigurationError, match="record_shapes=True"):
        recorded("ddp-without-shapes-rank0.json.gz")


def test_a_trace_that_was_cut_anywhere_is_refused() -> None:
    content = (TRACES / "ddp-rank0.json.gz").read_bytes()
    plain = gzip.decompress(content)
    for whole in (content, plain):
        for at in range(0, len(whole) - 2, len(whole) // 40):
            with pytest.raises(ConfigurationError):
                read(opened(whole[:at]), "file")


def test_a_file_larger_than_the_limit_is_refused_early() -> None:
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * (16 << 20))
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    with pytest.raises(ConfigurationError, match="has more than 4 MiB: record fewer steps"):
        read(opened(bomb), "bomb", most=4 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20


def test_memory_does_not_grow_with_events_that_say_nothing() -> None:
    one = b'{"ph": "X", "cat": "python_function", "name": "f", "ts": 1, "dur": 1, "args": {"a": [1, 2, 3]}},'
    content = b'{"traceEvents": [' + one * 60_000 + json.dumps(event("gloo:all_reduce", **GLOO)).encode() + b"]}"
    tracemalloc.start()
    found = read(opened(content), "file")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.calls) == 1
    assert peak < 4 << 20 < len(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    [
        "gloo:all_reduce",
        "c10d::allreduce_",
        "ProfilerStep#1",
        "ncclDevKernel_AllReduce",
        "record_param_comms",
        "c10d::send",
    ]
)
KEYS = st.sampled_from(
    [
        "Input Dims",
        "Input type",
        "Collective name",
        "In msg nelems",
        "Out msg nelems",
        "dtype",
        "Group size",
        "External id",
    ]
)
EVENTS = st.fixed_dictionaries(
    {
        "ph": st.just("X") | JSON,
        "cat": st.sampled_from(["user_annotation", "cpu_op", "kernel", "gpu_user_annotation"]) | JSON,
        "name": NAMES | JSON,
        "ts": st.floats() | st.integers() | JSON,
        "dur": st.floats() | st.integers() | JSON,
        "tid": st.integers() | JSON,
        "args": st.dictionaries(KEYS, JSON, max_size=8) | JSON,
    }
)
NODES = st.fixed_dictionaries(
    {
        "id": st.integers() | JSON,
        "name": NAMES | st.just("## process_group:init ##") | JSON,
        "inputs": st.dictionaries(st.sampled_from(["values", "shapes", "types"]), JSON) | JSON,
        "attrs": st.lists(st.fixed_dictionaries({"name": st.just("collective_name"), "value": JSON})) | JSON,
    }
)


def outcome(content: bytes, size: int = 4096) -> object:
    """What reading these bytes gives: a recording or a refusal, and nothing else."""
    try:
        return read(opened(content, size), "file").calls
    except ConfigurationError as error:
        return str(error)


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, max_size=6), JSON, st.integers(1, 64))
def test_any_events_are_read_or_refused(events: list[Any], info: object, size: int) -> None:
    document = {"distributedInfo": info, "record_shapes": info, "traceEvents": events}
    content = json.dumps(document).encode()
    assert outcome(content, size) == outcome(content)  # wherever it is cut into blocks


@settings(max_examples=100, deadline=None)
@given(st.lists(NODES, max_size=6))
def test_any_nodes_are_read_or_refused(nodes: list[Any]) -> None:
    outcome(json.dumps({"nodes": nodes}).encode())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30), st.binary(min_size=1, max_size=8))
def test_a_damaged_trace_is_read_or_refused(at: int, damage: bytes) -> None:
    content = (TRACES / "nccl-hand-made.json").read_bytes()
    place = at % len(content)
    outcome(content[:place] + damage + content[place + len(damage) :])


@settings(deadline=None)
@given(JSON, st.integers(1, 9))
def test_a_document_is_the_same_in_blocks_of_any_size(value: object, size: int) -> None:
    content = json.dumps({"traceEvents": [value, value], "other": value}).encode()
    members = list(JsonStream(in_blocks(content, size), "file").members(("traceEvents",), "traceEvents"))
    expected = json.loads(content, parse_constant=lambda _: None)["other"]
    assert members == [("traceEvents", expected), ("traceEvents", expected), ("other", expected)]


def test_names_and_types_of_torch() -> None:
    for name, operation in (
        ("c10d::_allgather_base_", "all_gather"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("gloo:all_reduce", "all_reduce"),
        ("nccl:broadcast", "broadcast"),
        ("all_to_allv", "all_to_all"),
        ("c10d::reduce_", None),
        ("gloo:send", None),
    ):
        assert operation_of(name) == operation
    assert [width_of(each) for each in ("float", "Float", "c10::BFloat16", "BFloat16", "long int", "Half", "thing", None)] == [
        4, 4, 2, 2, 8, 2, None, None,
    ]  # fmt: skip
    assert elements_of([[3, 4], [5]]) == 17
    assert elements_of([1 << 40, 1 << 40]) is None
