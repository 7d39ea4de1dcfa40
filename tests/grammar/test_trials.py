"""Grammars that are tried out in a process of their own, which may die of them."""

from __future__ import annotations

import json
import os
import signal

import pytest
from test_llguidance_backend import BACKEND, TOKENIZER

from quire.errors import InvalidRequestError
from quire.grammar.trials import TriedGrammars
from quire.structured_outputs import StructuredOutputsParams

PATTERNS = [{"type": "string", "pattern": f"^.*{'ab' * count}.*$"} for count in range(60)]
BOMB = StructuredOutputsParams(json=json.dumps({"allOf": PATTERNS}))  # takes minutes and gigabytes


@pytest.fixture
def tried():
    grammars = TriedGrammars(BACKEND, cpu_seconds=0.4)
    yield grammars
    grammars.close()
    assert not grammars._all


def follows(grammars: TriedGrammars, regex: str, text: str) -> bool:
    grammar = grammars.compile(StructuredOutputsParams(regex=regex))
    return grammar.accept(TOKENIZER.encode(text, add_special_tokens=False))


def test_what_is_compiled_is_what_was_asked_for(tried):
    assert follows(tried, "[a-c]+", "abc")
    assert not follows(tried, "[a-c]+", "abd")


def test_what_is_wrong_is_said_as_without_a_trial(tried):
    with pytest.raises(InvalidRequestError) as directly:
        BACKEND.compile(StructuredOutputsParams(regex="a("))
    with pytest.raises(InvalidRequestError) as tried_out:
        tried.compile(StructuredOutputsParams(regex="a("))
    assert str(tried_out.value) == str(directly.value)


def test_a_grammar_that_takes_too_much_is_refused_and_the_next_one_compiled(tried):
    with pytest.raises(InvalidRequestError, match=r"took more than .*make it simpler"):
        tried.compile(BOMB)
    [process] = tried._all
    assert follows(tried, "[a-c]+", "abc")
    assert tried._all == {process}


def test_a_process_that_has_died_is_the_error_of_one_request(tried):
    assert follows(tried, "[a-c]+", "abc")
    [process] = tried._all
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        tried.compile(StructuredOutputsParams(regex="a"))
    assert follows(tried, "[a-c]+", "abc")
