"""Grammars that are slow for every token end their own requests."""

from __future__ import annotations

import numpy as np
import pytest
from test_grammars import SpellingGrammar, masks, plan, reported, request
from test_llguidance_backend import BACKEND, TOKENIZER

from quire.errors import InvalidRequestError
from quire.grammar.manager import GrammarManager
from quire.grammar.time_limit import BURST, TimeLimitedGrammar
from quire.grammar.trials import TriedGrammars
from quire.structured_outputs import StructuredOutputsParams

LIMIT = 0.25  # seconds; sums of it are exact


class SlowGrammar(SpellingGrammar):
    """Takes `seconds` for each call; `accept` calls `num_valid`."""

    now = 0.0
    seconds = 0.0

    def num_valid(self, token_ids):
        SlowGrammar.now += SlowGrammar.seconds
        return super().num_valid(token_ids)

    def fill_bitmask(self, row):
        SlowGrammar.now += SlowGrammar.seconds
        super().fill_bitmask(row)

    def copy(self):
        return SlowGrammar("".join(map(chr, self.word)))


def limited(word: str, seconds: float) -> TimeLimitedGrammar:
    SlowGrammar.seconds = seconds
    return TimeLimitedGrammar(SlowGrammar(word), LIMIT, clock=lambda: SlowGrammar.now)


class SlowWords:
    """Words, of which those that begin with `s` are slow."""

    vocab_size = 256

    def compile(self, spec):
        word = spec.regex
        return limited(word, 3 * BURST * LIMIT) if word.startswith("s") else SpellingGrammar(word)

    compile_slowly = compile


CALLS = {
    "accept": lambda grammar: grammar.accept([ord("a")]),
    "num_valid": lambda grammar: grammar.num_valid([ord("a")]),
    "fill_bitmask": lambda grammar: grammar.fill_bitmask(np.zeros(4, dtype=np.int32)),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_limit_holds_on_average(call):
    grammar = limited("a" * 10 * BURST, LIMIT)
    for _ in range(3 * BURST):
        CALLS[call](grammar)
    SlowGrammar.seconds = BURST * LIMIT
    CALLS[call](grammar)  # one token may be slow
    SlowGrammar.seconds = LIMIT / 2
    CALLS[call](grammar)
    SlowGrammar.seconds = 10 * LIMIT
    with pytest.raises(InvalidRequestError, match=r"0.25 s for each token \(max_grammar_time_per_token\)"):
        CALLS[call](grammar)


def test_a_long_output_followed_at_once_may_take_longer():
    tokens = [ord("a")] * 2 * BURST
    limited("a" * 2 * BURST, len(tokens) * LIMIT).accept(tokens)
    with pytest.raises(InvalidRequestError):
        limited("a" * 2 * BURST, 2 * len(tokens) * LIMIT).accept(tokens)


def test_a_copy_begins_anew():
    grammar = limited("ab", 3 * BURST * LIMIT)
    for _ in range(2):
        copy = grammar.copy()
        with pytest.raises(InvalidRequestError):
            copy.accept([ord("a")])
    SlowGrammar.seconds = 0.0
    assert grammar.copy().accept([ord("a"), ord("b")])


def test_a_slow_grammar_ends_its_own_request_alone():
    grammars = GrammarManager(SlowWords())
    for request_id, word in (("slow", "slow"), ("a", "ab"), ("b", "ab")):
        grammars.start(request(request_id, word))
    assert reported(grammars, 3) == {"slow": None, "a": None, "b": None}
    step = plan({"a": "a", "slow": "", "b": ""})
    assert masks(grammars, step) == {"a": ["a", "b"], "slow": ["*"], "b": ["a"]}
    assert "max_grammar_time_per_token" in str(grammars.error("slow"))
    assert not grammars.accept("slow", [ord("s")])
    assert grammars.error("a") is None
    assert grammars.accept("a", [ord("a")])
    grammars.shutdown()


def test_grammars_from_the_trial_process_are_limited():
    spec = StructuredOutputsParams(grammar='start: s\ns: s s | "a" | "b"')  # quick to compile, slow to follow
    tokens = TOKENIZER.encode("abab", add_special_tokens=False)
    for seconds_per_token, error in ((0.0, None), (1e-9, "1e-09 s for each token")):
        tried = TriedGrammars(BACKEND, seconds_per_token=seconds_per_token)
        grammar = tried.compile(spec)
        tried.close()
        if error is None:
            assert grammar.accept(tokens)
        else:
            with pytest.raises(InvalidRequestError, match=error):
                grammar.accept(tokens)
