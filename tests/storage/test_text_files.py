"""What people hand in as text and JSON, and what they are told where it cannot be read."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdmlm.storage.text_files import decode, json_lines, parse_json, visible


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    assert decode("\ufeffgrün".encode(), "a.txt") == "grün"


def test_other_encodings_are_named_with_the_byte() -> None:
    with pytest.raises(ValueError, match=r"^a\.txt is not UTF-8 text \(byte 2\): convert it to UTF-8\.$"):
        decode("grün".encode("latin-1"), "a.txt")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("[1,\n2,,]", None, r"^a, line 2: not JSON \("),
        ("{", 7, r"^a, line 7: not JSON \("),
        ("[" * 100_000, 7, r"^a, line 7: not JSON \(nested too deeply\)\.$"),
        ("[" * 100_000, None, r"^a: not JSON \(nested too deeply\)\.$"),
        ("1" * 5000, 7, r"^a, line 7: not JSON \(Exceeds the limit"),
    ],
)
def test_what_is_no_json_is_named_with_its_line(text: str, line: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text, "a", line)


@given(
    st.lists(st.dictionaries(st.text(), st.text() | st.integers())), st.sampled_from(["\n", "\n\n", "\r\n", "\n \n"])
)
def test_json_lines_gives_every_object_with_its_line(rows: list[dict[str, object]], between: str) -> None:
    text = between.join(json.dumps(row, ensure_ascii=False) for row in rows) + between
    found = list(json_lines(text, "a.jsonl"))
    assert [row for _, row in found] == rows
    step = between.count("\n")
    assert [where for where, _ in found] == [f"a.jsonl, line {1 + step * n}" for n in range(len(rows))]


def test_a_line_that_is_no_object_is_named() -> None:
    with pytest.raises(ValueError, match=r"^a, line 3: expected an object with the key b, found list\.$"):
        list(json_lines('{"b": 1}\n\n[1]', "a", " with the key b"))


def test_every_hidden_character_becomes_visible() -> None:
    """All of Unicode: control, format, separator and surrogate characters, and what is drawn as nothing."""
    fillers = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u3164\uffa0\U000e0100"
    for code in range(0x110000):
        character = chr(code)
        hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") or character in fillers
        if character in "\n\t":
            assert visible(character) == character
        elif hidden:
            shown = visible(character)
            assert shown.isascii()
            assert shown.isprintable()
            assert int(shown[2:], 16) == code
        elif visible(character) != character:  # a few unassigned ones beside them
            assert unicodedata.category(character) in ("Cn", "Mn")
    assert visible("\x1b[2J\x1b[32m Yes, verified\r\n") == r"\x1b[2J\x1b[32m Yes, verified\x0d" + "\n"
    assert visible("a\nb\t", keep="") == r"a\x0ab\x09"
    assert visible("été 日本 👍🏽 \u00a0") == "été 日本 👍🏽 \u00a0"
    assert visible(visible("\u202e")) == visible("\u202e")
