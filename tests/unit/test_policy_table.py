"""The strict TOML reader: what is not asked for, or not of the form asked for, is an error that names the place."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.admission.policy_file.toml_table import FILE_BYTES, POLICY_BYTES, TomlTable, parse
from ringfence.errors import ConfigurationError, PolicyError

FILES = {"ca.pem": b"certificates", "two.pem": b"more", "huge": bytes(FILE_BYTES + 1)}


def read(path: str, limit: int) -> bytes:
    if path not in FILES:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    return FILES[path][:limit]


def table(text: str) -> TomlTable:
    return parse(text.encode(), read)


def test_every_form() -> None:
    root = table(
        'name = "x"\nnames = ["a", "b"]\none = "a"\ncount = 7\non = true\nage = "12h"\nmr = "00ff"\nmrs = ["00ff", "0102"]\n'
        'ca = "ca.pem"\ncas = ["ca.pem", "two.pem"]\n[inner]\ndeep = 1\n[[rule]]\na = 1\n[[rule]]\nb = 2\n'
    )
    assert root.text("name") == "x"
    assert root.texts("names") == ("a", "b")
    assert root.texts("one") == ("a",)
    assert root.number("count") == 7
    assert root.flag("on") is True
    assert root.duration("age") == 12 * 3600
    assert root.hexes("mr", 2) == (b"\x00\xff",)
    assert root.hexes("mrs", 2) == (b"\x00\xff", b"\x01\x02")
    assert root.file("ca") == b"certificates"
    assert root.files("cas") == (b"certificates", b"more")
    assert root.table("inner").number("deep") == 1
    first, second = root.tables("rule")
    assert (first.number("a"), second.number("b")) == (1, 2)
    root.done()


def test_defaults_come_back_as_they_are() -> None:
    root = table("")
    assert root.text("a", None) is None
    assert root.texts("b", ()) == ()
    assert root.number("c", 3) == 3
    assert root.flag("d", False) is False
    assert root.hexes("e", 48, None) is None
    assert root.file("f", b"") == b""
    assert root.duration("g", None) is None
    assert root.table("h", None) is None
    assert root.tables("i", ()) == ()
    root.done()


def test_an_unknown_key_is_named_with_the_known_ones() -> None:
    root = table('measurement = "00"\nmesurement = "00"')
    root.hexes("measurement", 1)
    with pytest.raises(PolicyError, match="the policy: unknown key 'mesurement'; known here: measurement"):
        root.done()


def test_an_unknown_key_inside_is_found_from_the_root() -> None:
    root = table("[tdx]\ndebug = true")
    root.table("tdx")
    with pytest.raises(PolicyError, match="the policy, tdx: unknown key 'debug'; known here: none"):
        root.done()


Ask = Callable[[TomlTable], object]


@pytest.mark.parametrize(
    ("text", "ask", "says"),
    [
        ("", lambda t: t.text("x"), "x is missing"),
        ("x = 1", lambda t: t.text("x"), "printable characters; it is 1"),
        ('x = ""', lambda t: t.text("x"), "1 to 4096"),
        ('x = "a\\nb"', lambda t: t.text("x"), "printable"),
        ('x = "c"', lambda t: t.text("x", allowed=("a", "b")), "one of a, b; it is 'c'"),
        ("x = []", lambda t: t.texts("x"), "at least one"),
        ('x = ["a", "a"]', lambda t: t.texts("x"), "none of them twice"),
        ('x = ["a", 1]', lambda t: t.texts("x"), "must be"),
        ("x = true", lambda t: t.number("x"), "a whole number"),
        ("x = 1.0", lambda t: t.number("x"), "a whole number"),
        ("x = -1", lambda t: t.number("x"), "from 0"),
        ("x = 9", lambda t: t.number("x", most=8), "to 8"),
        ("x = 0x" + "f" * 6000, lambda t: t.number("x"), "a number of 24000 bits"),
        ("x = 1", lambda t: t.flag("x"), "true or false"),
        ("x = 60", lambda t: t.duration("x"), "a duration such as"),
        ('x = "0s"', lambda t: t.duration("x"), "a duration such as"),
        ('x = "1.5h"', lambda t: t.duration("x"), "a duration such as"),
        ('x = "00"', lambda t: t.hexes("x", 2), "4 hexadecimal digits"),
        ('x = "00FF"', lambda t: t.hexes("x", 2), "4 hexadecimal digits"),
        ('x = "0x00"', lambda t: t.hexes("x", 2), "4 hexadecimal digits"),
        ('x = "gone"', lambda t: t.file("x"), "x: cannot read gone: No such file"),
        ('x = "huge"', lambda t: t.file("x"), "huge has more than"),
        ("x = 1", lambda t: t.table("x"), "must be a table"),
        ("x = []", lambda t: t.tables("x"), r"one or more tables: \[\[x\]\]"),
        ("x = [1]", lambda t: t.tables("x"), "one or more tables"),
        ("x." + "a." * 3000 + "b = 1", lambda t: t.number("x"), "it is a table"),
    ],
)
def test_what_is_refused(text: str, ask: Ask, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        ask(table(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"\xff", "not UTF-8"),
        (b"x = ", "not TOML"),
        (b"x = 1\nx = 2", "not TOML"),
        (b"x = " + b"9" * 5000, "not TOML"),
        (b"x = " + b"[" * 100_000, "not TOML"),
        (b"#" * (POLICY_BYTES + 1), "more than"),
    ],
    ids=["bytes", "half a line", "twice", "digits", "brackets", "size"],
)
def test_what_is_not_a_table(text: bytes, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        parse(text, read)


def test_a_policy_error_is_a_fault_of_this_machine() -> None:
    assert issubclass(PolicyError, ConfigurationError)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_table_or_a_policy_error(data: bytes) -> None:
    try:
        parse(data, read).done()
    except PolicyError:
        return  # every other exception fails this test


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=64))
def test_hexadecimal_comes_back_as_bytes(value: bytes) -> None:
    assert table(f'x = "{value.hex()}"').hexes("x", len(value)) == (value,)
