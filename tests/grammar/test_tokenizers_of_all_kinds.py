"""Masks, grammars and the engine's own decoder agree, whatever a tokenizer does to texts."""

from __future__ import annotations

import functools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from quire.errors import InvalidRequestError
from quire.front.text.detokenizer import DecoderFactory
from quire.grammar.llguidance_backend import LLGuidanceBackend
from quire.structured_outputs import StructuredOutputsParams
from tokenizers_for_tests import ADDED, CORPUS, KINDS, byte_level, of_kind

MARKS = ["<s>", "</s>", "<unk>", *(token.content for token in ADDED)]
PIECES = [*MARKS, " ", "  ", "\n", "a", "The", "É", "é", "e\u0301", "ﬁ", "漢", "🙂", "tool", "▁", "##s", "Ġ"]
WORDS = CORPUS[0].split(" ")
texts = st.lists(st.sampled_from(PIECES + WORDS) | st.text(max_size=2), max_size=6).map("".join)
ALL_BYTES = [kind for kind in KINDS if kind.startswith("byte")]


@functools.cache
def backend_of(kind: str) -> LLGuidanceBackend:
    tokenizer = of_kind(kind)
    return LLGuidanceBackend(tokenizer.backend.to_str, tokenizer.vocab_size, lambda: tokenizer.eos_token_ids)


def allowed(grammar, vocab_size: int) -> list[int]:
    row = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    grammar.fill_bitmask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def written(kind: str, fields, rng: random.Random) -> str | None:
    """Return what a model that samples at random writes; None if the request is refused when it comes.

    Of what a mask allows, the grammar must accept everything.
    """
    tokenizer = of_kind(kind)
    try:
        grammar = backend_of(kind).compile(StructuredOutputsParams(**fields))
    except InvalidRequestError as error:
        assert "no token" in str(error)
        return None
    decoder = DecoderFactory(tokenizer).make(
        rng.choice([[], [1], tokenizer.token_bytes.anchor[0]]), skip_special_tokens=True, is_verbatim=True
    )
    text = ""
    for _ in range(200):
        choices = allowed(grammar, tokenizer.vocab_size)
        for token in rng.sample(choices, min(len(choices), 10)):
            assert grammar.num_valid([token]) == 1
        token = rng.choice(choices)
        assert grammar.accept([token])
        if token in tokenizer.eos_token_ids:
            return text + decoder.flush()
        text += decoder.push(token)
    raise AssertionError(f"no end after {text!r}")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(KINDS)), texts.filter(bool), st.randoms(use_true_random=False))
def test_a_forced_text_comes_out_as_it_is_or_is_refused(kind, text, rng):
    found = written(kind, {"choice": [text]}, rng)
    assert found == text or (found is None and kind not in ALL_BYTES)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(ALL_BYTES), st.lists(texts, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_one_of_several_texts_comes_out_whatever_they_share(kind, choices, rng):
    assert written(kind, {"choice": choices}, rng) in choices


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(ALL_BYTES), texts, st.randoms(use_true_random=False))
def test_keys_and_values_of_a_schema(kind, text, rng):
    schema = {"type": "object", "properties": {text: {"enum": [text, 1]}}, "required": [text]}
    found = json.loads(written(kind, {"json": schema}, rng))
    assert found in ({text: text}, {text: 1})


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_a_vocabulary_can_write_are_not_refused(kind):
    text = "the tools" if kind not in ("words", "word pieces") else " the tools"
    assert written(kind, {"choice": [text]}, random.Random(1)) == text


def test_tokens_that_are_longer_than_llguidance_can_take_are_never_allowed():
    tokenizer = byte_level(eos_token_ids=[1])
    tokenizer.backend.add_tokens([AddedToken(content) for content in ("x" * 1025, "y" * 1024)])
    eos = tokenizer.eos_token_ids
    vocab_size = tokenizer.vocab_size + 2
    backend = LLGuidanceBackend(tokenizer.backend.to_str, vocab_size, lambda: eos)
    found = allowed(backend.compile(StructuredOutputsParams(regex="[xy]*")), vocab_size)
    assert {len(tokenizer.token_bytes.of(token)) for token in found if token not in eos} == {1, 1024}


def test_marks_are_no_text_but_come_where_a_grammar_names_them():
    tokenizer = of_kind("byte level")
    backend = backend_of("byte level")
    [call, mask, tools] = (tokenizer.added_token_id(text) for text in ("<tool_call>", "<mask>", "[TOOLS]"))
    anything = allowed(backend.compile(StructuredOutputsParams(regex="(?s:.)*")), tokenizer.vocab_size)
    assert not {call, mask} & set(anything)
    assert tools in anything
    for named in ("<tool_call>", f"<[{call}]>"):
        grammar = backend.compile(StructuredOutputsParams(grammar=f'start: {named} "a"'))
        assert allowed(grammar, tokenizer.vocab_size) == [call]
        assert grammar.accept([call])
        assert not grammar.accept([mask])


def test_tokens_that_the_model_does_not_have_are_in_no_spelling():
    tokenizer = of_kind("byte level")
    vocab_size = 262  # the special tokens and all bytes: no merges
    backend = LLGuidanceBackend(tokenizer.backend.to_str, vocab_size, lambda: tokenizer.eos_token_ids)
    grammar, tokens = backend.compile(StructuredOutputsParams(choice=["use the tools"])), []
    while (found := allowed(grammar, vocab_size)) != list(tokenizer.eos_token_ids):
        tokens.append(found[0])
        assert grammar.accept(tokens[-1:])
    assert max(tokens) < vocab_size
    assert tokenizer.decode(tokens) == "use the tools"
