"""Patterns by ECMA-262, against Python's `re`, for which each is written a second time."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_grammars import accepts, compiled
from quire.schemas.ecma_patterns import rust_pattern

ALPHABET = 'ab1_-&~[]^/.\\" \n\u2028é😀:'
SETS = {
    "d": "0-9",
    "w": "A-Za-z0-9_",
    "s": "\\t-\\r \\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\ufeff",
}

chars = st.sampled_from(ALPHABET)
sets = st.sampled_from("dDwWsS")
atoms = st.one_of(
    chars.map(lambda char: ("char", char)),
    st.just(("any",)),
    sets.map(lambda name: ("set", name)),
    st.tuples(
        st.just("class"),
        st.booleans(),
        st.lists(st.tuples(chars, chars).map(sorted).map(tuple) | sets, max_size=4),
    ),
)
terms = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(st.just("all"), st.lists(inner, max_size=3)),
        st.tuples(st.just("either"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("repeat"), inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}"])),
    ),
    max_leaves=6,
)


def ecma(part, rng) -> str:  # noqa: PLR0911
    """A part as ECMA-262 may have it."""

    def char(one, specials):
        code = ord(one)
        ways = [rf"\u{{{code:x}}}", *([rf"\u{code:04X}"] if code < 65536 else [])]
        ways += [rf"\x{code:02x}"] if code < 256 else []
        ways += ["\\" + one] if one in "-&~[]^/.\\ :" else []
        return rng.choice([one] * (one not in specials) * 3 + ways)

    match part:
        case ("char", one):
            return char(one, "[^.\\")
        case ("any",):
            return "."
        case ("set", name):
            return "\\" + name
        case ("class", is_negated, ranges):
            inside = [
                "\\" + one if isinstance(one, str) else
                char(one[0], "]\\^-") + ("-" + char(one[1], "]\\-") if one[0] != one[1] else "")
                for one in ranges
            ]  # fmt: skip
            return f"[{'^' * is_negated}{''.join(inside)}]"
        case ("all", items):
            return (
                rng.choice(["(", "(?:", f"(?<n{rng.randrange(10**9)}>"])
                + "".join(ecma(item, rng) for item in items)
                + ")"
            )
        case ("either", items):
            return "(" + "|".join(ecma(item, rng) for item in items) + ")"
        case ("repeat", inner, count):
            return f"(?:{ecma(inner, rng)}){count}{rng.choice(['', '?'])}"
    raise AssertionError(part)


def python(part) -> str:  # noqa: PLR0911
    """A part as Python has it."""
    match part:
        case ("char", one):
            return re.escape(one)
        case ("any",):
            return "[^\\n\\r\\u2028\\u2029]"
        case ("set", name):
            return f"[{'^' * name.isupper()}{SETS[name.lower()]}]"
        case ("class", is_negated, ranges):
            inside = [
                python(("set", one)) if isinstance(one, str) else f"[{re.escape(one[0])}-{re.escape(one[1])}]"
                for one in ranges
            ]
            either = "|".join(inside) or "(?!)"
            return f"(?:(?!{either})(?s:.))" if is_negated else f"(?:{either})"
        case ("all", items):
            return "(?:" + "".join(map(python, items)) + ")"
        case ("either", items):
            return "(?:" + "|".join(map(python, items)) + ")"
        case ("repeat", inner, count):
            return f"(?:{python(inner)}){count}"
    raise AssertionError(part)


@settings(max_examples=60)
@given(
    terms, st.booleans(), st.booleans(), st.lists(st.text(chars, max_size=4), max_size=8),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_patterns_mean_what_they_mean_in_ecma_262(part, at_start, at_end, texts, rng):
    pattern = "^" * at_start + ecma(part, rng) + "$" * at_end
    meant = re.compile(r"\A" * at_start + python(part) + r"\Z" * at_end)
    texts = [*texts, *ALPHABET, "", "ab", "1_", "[]"]
    try:
        grammar = compiled(json=json.dumps({"type": "string", "pattern": pattern}))
    except ValueError as error:
        assert "Regex is empty" in str(error)
        assert not any(map(meant.search, texts))
        return
    wrong = [
        text for text in texts
        if accepts(grammar, json.dumps(text, ensure_ascii=False)) != (meant.search(text) is not None)
    ]  # fmt: skip
    assert wrong == [], pattern


@pytest.mark.parametrize(
    ("pattern", "found", "others"),
    [
        (r"^[^\s@[\]]+@[a-z&&b~~]+$", ["a@b&~"], ["a[@b", "@b"]),
        (r"^\cA\cz\0\t\v\x41\u0042\u{1F600}\ud83d\ude00$", ["\x01\x1a\0\t\x0bAB😀😀"], ["AB"]),
        (r"^[[:alpha:]]$", [":]", "a]"], ["b", "b]"]),
        (r"^[\w-.]$", ["a", "-", "."], ["/"]),
        (r"^[a-\d-]$", ["a", "-", "5"], ["b"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^[^]$", ["\n", "a"], ["", "ab"]),
        (r"^(?:[]|a)$", ["a"], ["", "]"]),
        (r"^{[a-z]+}$", ["{ab}"], ["ab"]),
        (r"^a{2}?b{1,2}?$", ["aab", "aabb"], ["ab", "aabbb"]),
        (r"^\d\w$", ["1a"], ["\u0661a", "1é"]),
        (r"^\p{Lu}\P{L}[\p{Script=Greek}\d]$", ["A1\u03b1"], ["AA\u03b1"]),
        (r"^(?<year>\d{4})-(\d\d)$", ["1999-12"], ["99-12"]),
        (r"^\$\^\|\(\)\[\]\{\}\*\+\?\\\/$", ["$^|()[]{}*+?\\/"], [""]),
        ("^a|b$", ["ax", "xb"], ["xbx"]),
        (r'^[^\\/:*?"<>|]+$', ["a b.txt", "\n"], ['"', "\\", 'a"b', "a\\b"]),
        (r"^[^\p{P}]$", ["a", "\n"], ['"', "\\"]),
        (r"^[\0-\x1f]$", ["\n", "\x1f"], ['"', "\\", " "]),
        (r"^[^a]$", ['"', "\\", "\0"], ["a"]),
        ("", ["", "x"], []),
    ],
)
def test_examples(pattern, found, others):
    grammar = compiled(json=json.dumps({"type": "string", "pattern": pattern}))
    assert [text for text in found if not accepts(grammar, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in others if accepts(grammar, json.dumps(text, ensure_ascii=False))] == []


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a(?=b)", ["lookaround", "character 2"]),
        ("(?<!a)b", ["lookaround"]),
        (r"(a)\1", ["reference to a group"]),
        (r"(?<n>a)\k<n>", ["reference to a group"]),
        (r"a\b", ["word boundary", "character 2"]),
        (r"[\B]", ["word boundary"]),
        (r"\A", [r"escape that ECMA-262 does not have"]),
        (r"\u12", ["escape"]),
        (r"\01", ["escape"]),
        ("\\", ["escape"]),
        (r"\ud83d", ["no whole character"]),
        (r"\u{110000}", ["no whole character"]),
        ("(?i)a", ["group"]),
        ("(?P<n>a)", ["group"]),
        ("a**", ["repetition of a repetition"]),
        ("a++", ["repetition of a repetition"]),
        ("a{2}{3}", ["repetition of nothing"]),
        ("*a", ["repetition of nothing"]),
        ("(|*)", ["repetition of nothing"]),
        ("^*", ["repetition of '^'"]),
        ("a{,2}", ["{m,n}"]),
        ("a{2,1}", ["fewer"]),
        ("(a", ["would close a group"]),
        ("a)", ["')'", "character 2"]),
        ("[a", ["would close the class", "character 1"]),
        ("[b-a]", ["ends before it begins"]),
        ("(" * 100 + ")" * 100, ["64 groups"]),
        ("(" * 60_000, ["64 groups"]),
    ],
)
def test_what_is_refused(pattern, words):
    with pytest.raises(ValueError, match="the pattern") as caught:
        rust_pattern(pattern)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_escaped_underscore_is_one():
    assert rust_pattern(r"^[a-z\_\-]+\_$") == r"^[a-z_\x{2D}]+_$"


def test_a_brace_without_end_takes_linear_time():
    assert rust_pattern("a{" + "1" * 60_000) == r"a\x{7B}" + "1" * 60_000
