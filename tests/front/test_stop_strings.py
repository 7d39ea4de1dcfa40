"""Stop strings must not depend on how the text is cut into tokens."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counted_lines import num_lines
from quire.dialogue.reasoning.formats import REASONING_FORMATS, ExpectedReasoning
from quire.dialogue.reasoning.text import ReasoningText
from quire.front.text.stop_strings import StoppableText, StopStrings


class Pieces:
    """A decoder whose token i is the piece i of a list."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


def run(pieces, stop, *, include=False, may_stop_from=0):
    """Return the final text, the stop string, the token that completed it, and the text after each token."""
    text = StoppableText(Pieces(pieces), StopStrings(stop), include_stop=include)
    shown = []
    for index in range(len(pieces)):
        word = text.push(index, may_stop=index >= may_stop_from)
        shown.append(text.text)
        if word is not None:
            return text.text, word, index, shown
    assert text.finish(may_stop=True) is None
    return text.text, None, None, [*shown, text.text]


def naive(whole: str, stop, include):
    """Character by character: the first stop string to be complete, the longest of several."""
    for end in range(1, len(whole) + 1):
        found = [word for word in stop if whole[:end].endswith(word)]
        if found:
            word = max(found, key=len)
            return whole[: end if include else end - len(word)], word
    return whole, None


@settings(max_examples=400)
@given(
    st.lists(st.text("ab", max_size=4), max_size=16),
    st.lists(st.text("ab", min_size=1, max_size=8), max_size=3, unique=True),
    st.booleans(),
)
def test_equals_the_naive_search(pieces, stop, include):
    text, word, _, shown = run(pieces, stop, include=include)
    assert (text, word) == naive("".join(pieces), stop, include)
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before), "released text is never taken back"


def test_the_token_that_completes_it_is_told():
    assert run(["x", "ST", "OP", "y"], ["STOP"])[:3] == ("x", "STOP", 2)


def test_kept_if_asked_for():
    assert run(["x", "ST", "OPy"], ["STOP"], include=True)[:2] == ("xSTOP", "STOP")


def test_text_that_may_begin_one_waits():
    *_, shown = run(["a", "S", "T", "x"], ["STOP"])
    assert shown == ["a", "a", "a", "aSTx", "aSTx"]


def test_not_looked_for_before_min_tokens():
    assert run(["STOP", "a", "STOP", "b"], ["STOP"], may_stop_from=1)[:3] == ("STOPa", "STOP", 2)


def test_may_begin_before_min_tokens_and_end_after():
    assert run(["ST", "OP"], ["STOP"], may_stop_from=1)[:3] == ("", "STOP", 1)


def test_completions_share_their_stop_strings():
    shared = StopStrings(["abab", "c"])
    first, second = (StoppableText(Pieces(["ab", "ab"]), shared, include_stop=False) for _ in range(2))
    assert first.push(0, may_stop=True) is None
    assert second.push(0, may_stop=True) is None
    assert second.push(1, may_stop=True) == first.push(1, may_stop=True) == "abab"


def test_the_cost_does_not_grow_with_the_length_of_stop_strings():
    """Text that is nearly a stop string at each of its characters: the worst case of comparing anew."""

    def cost(length):
        text = StoppableText(Pieces(["a"]), StopStrings(["a" * length + "b"]), include_stop=False)
        text.push(0, may_stop=True)
        return num_lines(lambda: [text.push(0, may_stop=True) for _ in range(4000)])

    assert cost(1000) < 1.5 * cost(10)


THINK = REASONING_FORMATS["think"]


def run_thinking(pieces, stop, *, is_open=False, include=False):
    """Return the final text, the stop string and the text after each token."""
    reasoning = ReasoningText(ExpectedReasoning(THINK, is_open))
    text = StoppableText(Pieces(pieces), StopStrings(stop), include_stop=include, reasoning=reasoning)
    shown = []
    for index in range(len(pieces)):
        word = text.push(index, may_stop=True)
        shown.append(text.text)
        if word is not None:
            return text.text, word, shown
    word = text.finish(may_stop=True)
    return text.text, word, [*shown, text.text]


def naive_thinking(whole, stop, is_open, include):
    """The reasoning by regular expressions on the whole text, and the naive search in what follows."""
    start = "" if is_open else r"\s*<think>"
    if not is_open and not re.match(start, whole):
        return naive(whole, stop, include)
    found = re.match(start + r".*?(?:</think>\s*|\Z)", whole, re.DOTALL)
    text, word = naive(whole[found.end() :], stop, include)
    return found.group() + text, word


ANSWERS = [
    ("\n<think>a\nSTOP</think>\n\nbSTOPc", False),
    ("aSTOP</think>\n\n\n b\n\nc", True),
    ("a</thinkST</think>OPbSTOc", True),  # the second spans the end mark
    ("a</think>ink>b", True),
    ("\n\n<thinSTOP", False),
    ("\n\nno reasoning\n\nhere", False),
    ("STOP", False),
    ("<think>STOP", False),
    (" \n", False),
]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("whole", "is_open"), ANSWERS)
def test_they_do_not_count_in_a_reasoning_at_any_split(whole, is_open, include):
    stop = ["STOP", "\n\n", "</think>\n", "nk>b"]
    expected = naive_thinking(whole, stop, is_open, include)
    for first, second in itertools.combinations_with_replacement(range(len(whole) + 1), 2):
        pieces = [whole[:first], whole[first:second], whole[second:]]
        assert run_thinking(pieces, stop, is_open=is_open, include=include)[:2] == expected
    assert run_thinking(list(whole), stop, is_open=is_open, include=include)[:2] == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "S", "\n", "ST"]), max_size=12),
    st.lists(st.text("ST\n<>", min_size=1, max_size=3), min_size=1, max_size=3, unique=True),
    st.booleans(),
    st.booleans(),
)
def test_reasoning_equal_the_naive_search(pieces, stop, is_open, include):
    text, word, shown = run_thinking(pieces, stop, is_open=is_open, include=include)
    assert (text, word) == naive_thinking("".join(pieces), stop, is_open, include)
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before), "released text is never taken back"


HARMONY = "<|channel|>{}<|message|>{}<|end|>\n<|start|>assistant"
SEVERAL = (
    HARMONY.format("analysis", "a STOP") + HARMONY.format("commentary", "Well, ST")
    + HARMONY.format("analysis", "OP final") + "<|channel|>final<|message|>Yes ST{}OP"
)  # fmt: skip


@pytest.mark.parametrize(("between", "num_shown"), [("", -4), (".", None)])
def test_in_harmony_they_do_not_count_in_any_reasoning_or_header(between, num_shown):
    whole = SEVERAL.format(between)
    expected = (whole[:num_shown], "STOP" if num_shown else None)
    stop = ["STOP", "assistant", "final<", "|>", "<"]
    for pieces in ([whole], list(whole), *([whole[:at], whole[at:]] for at in range(len(whole)))):
        reading = ReasoningText(ExpectedReasoning(REASONING_FORMATS["harmony"], is_open=False))
        text = StoppableText(Pieces(pieces), StopStrings(stop), include_stop=False, reasoning=reading)
        words = [text.push(index, may_stop=True) for index in range(len(pieces))]
        words.append(None if any(words) else text.finish(may_stop=True))
        assert (text.text, next(filter(None, words), None)) == expected


def test_a_reasoning_is_shown_as_it_comes():
    *_, shown = run_thinking(["<think>", "S", "T", "</think>", "S", "x"], ["STOP"])
    assert shown[:3] == ["<think>", "<think>S", "<think>ST"]
    assert shown[3:] == [f"<think>ST</think>{rest}" for rest in ("", "", "Sx", "Sx")]
