"""The store of a round answers every call of an agent: what torch's HashStore raises, or a message cannot carry, is refused."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ringfence.admission.messages import MessageSplitter, encode
from ringfence.keys import CALL_BYTES
from ringfence.launch.messages import FROM_HOST, AgentCall, Answer, CallResult, Operation
from ringfence.launch.values import RoundStore

LARGE = b"9" * 20  # more than 64 bits


@pytest.fixture
def store() -> RoundStore:
    return RoundStore(dist.HashStore())


def ask(store: RoundStore, operation: Operation, *parts: bytes, client: int = 1, wait: int = 0) -> list[Answer]:
    return [answer for _, answer in store.call(client, AgentCall(7, operation, "", wait, parts), 0.0)]


@pytest.mark.parametrize("amount", [LARGE, b"-" + LARGE, b"9223372036854775808", b"1.5", b"", b"\xff"])
def test_an_amount_that_is_no_64_bit_number_is_refused(store: RoundStore, amount: bytes) -> None:
    assert [answer.result for answer in ask(store, Operation.ADD, b"key", amount)] == [CallResult.REFUSED]


def test_the_largest_amounts_are_added(store: RoundStore) -> None:
    assert ask(store, Operation.ADD, b"key", b"9223372036854775807")[0].parts == (b"9223372036854775807",)
    assert ask(store, Operation.ADD, b"other", b"-9223372036854775808")[0].parts == (b"-9223372036854775808",)


@pytest.mark.parametrize("value", [LARGE, b"text"])
def test_adding_to_a_value_that_is_no_counter_is_refused(store: RoundStore, value: bytes) -> None:
    ask(store, Operation.SET, b"key", value)
    assert [answer.result for answer in ask(store, Operation.ADD, b"key", b"1")] == [CallResult.REFUSED]
    assert ask(store, Operation.GET, b"key")[0].parts == (value,)


def test_values_that_fill_a_message_are_answered(store: RoundStore) -> None:
    half = bytes((CALL_BYTES - 9) // 2 - 4)
    ask(store, Operation.SET, b"one", half, b"two", half)
    (answer,) = ask(store, Operation.GET, b"one", b"two")
    reader = MessageSplitter(FROM_HOST, CALL_BYTES)
    reader.feed(encode(answer))
    assert reader.next() == answer
    assert answer.parts == (half, half)


def test_values_beyond_a_message_are_refused(store: RoundStore) -> None:
    """Also to a call that has waited for them, while the call that sets them succeeds."""
    half = bytes(CALL_BYTES // 2)
    assert ask(store, Operation.GET, b"one", b"two", client=2, wait=1000) == []
    ask(store, Operation.SET, b"one", half)
    answers = store.call(1, AgentCall(8, Operation.SET, parts=(b"two", half)), 0.0)
    assert [(client, answer.result) for client, answer in answers] == [(1, CallResult.OK), (2, CallResult.REFUSED)]
    assert "16 MiB" in answers[1][1].text
