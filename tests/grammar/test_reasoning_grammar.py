"""Reasoning before structured output, against their definition and grammars that are not rolled back."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_llguidance_backend import BACKEND, EOS, NUM_TOKENS, TOKENIZER, VOCAB, allowed

from quire.errors import InvalidRequestError
from quire.grammar.reasoning import ReasoningEnd, ReasoningGrammar
from quire.sampling_params import SamplingParams
from quire.structured_outputs import ReasoningParams, StructuredOutputsParams

SCHEMA = (
    '{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], '
    '"additionalProperties": false}'
)
ALL = set(range(-(-VOCAB // 32) * 32))
TOKEN_MARK = TOKENIZER.added_token_id("<|user|>")
TEXT, TOKEN = "</think>", "<|user|>"


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def reasoning(end=TEXT, **fields):
    return ReasoningParams(
        **{
            "start": "<think>",
            "end": end,
            "start_token_ids": tuple(encode("<think>")),
            "end_token_id": TOKENIZER.added_token_id(end),
            "is_open": True,
            "closing_token_ids": tuple(encode(f"\nSo.{end}\n")),
            **fields,
        }
    )


def grammar_of(params, structure=SCHEMA):
    inner = None if structure is None else BACKEND.compile(StructuredOutputsParams(json=structure))
    return ReasoningGrammar(params, inner, ReasoningEnd(params, BACKEND.spelling), BACKEND.spelling)


def accepts(grammar, token):
    found = grammar.num_valid([token]) == 1
    assert grammar.accept([token]) == found
    if found:
        grammar.rollback(1)
    return found


PARAMS = st.builds(
    reasoning,
    end=st.sampled_from([TEXT, TOKEN]),
    is_open=st.booleans(),
    budget=st.sampled_from([None, 0, 1, 4]),
    bridge_token_ids=st.sampled_from([(), tuple(encode("then: "))]),
)


@given(PARAMS, st.sampled_from([SCHEMA, None]), st.data())
@settings(max_examples=40, deadline=None)
def test_a_grammar_that_goes_back_is_like_one_that_did_not(params, structure, data):
    grammar, tokens = grammar_of(params, structure), []
    marks = encode("<think>") + encode("a </thi") + encode(TEXT) + [TOKEN_MARK, EOS[0]] + encode('{"a": 22}')
    script = encode("<think>hm</th a</think>") + encode('{"a": 22}')
    for _ in range(data.draw(st.integers(1, 12))):
        if tokens and data.draw(st.booleans()):
            count = data.draw(st.integers(1, len(tokens)))
            grammar.rollback(count)
            del tokens[len(tokens) - count :]
        else:
            piece = data.draw(st.lists(st.sampled_from(marks), max_size=4) | st.just(script))
            if grammar.accept(piece):
                tokens += piece
            grammar = grammar.copy()
    fresh = grammar_of(params, structure)
    assert fresh.accept(tokens)
    masks = allowed(grammar), allowed(fresh)
    assert masks[0] == masks[1]
    for token in {*marks, *encode("x"), NUM_TOKENS - 1}:
        assert accepts(grammar, token) == (token in masks[0])


@pytest.mark.parametrize("end", [TEXT, TOKEN])
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_what_it_lets_a_model_write(end, is_open, seed):
    """A model that writes at random, now and then the end, and otherwise what is allowed."""
    rng = random.Random(seed)
    grammar, tokens = grammar_of(reasoning(end, is_open=is_open, budget=9)), []
    if not is_open and seed:
        tokens += encode("<think>")
        assert grammar.accept(tokens)
    plan = encode(f"a b {TEXT[:4]} {end}") if seed == 3 else []
    while True:
        found = sorted(allowed(grammar) & set(range(NUM_TOKENS)))
        token = plan.pop(0) if plan and plan[0] in found else rng.choice(found)
        assert grammar.accept([token])
        if token in EOS:
            break
        tokens.append(token)
    text = TOKENIZER.decode(tokens, skip_special_tokens=False)
    before, mark, after = text.partition(end)
    if not mark:
        before, after = "", text
        assert not is_open
    assert before.startswith("<think>" if mark and not is_open else "")
    assert json.loads(after) in ({"a": 1}, {"a": 22})


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("structure", [SCHEMA, None])
def test_a_budget_forces_the_end(budget, structure):
    params = reasoning(budget=budget)
    grammar = grammar_of(params, structure)
    for _ in range(budget):
        assert len(allowed(grammar)) > 1000
        assert grammar.accept(encode("x"))
    for token in params.closing_token_ids:
        assert allowed(grammar) == {token}
        assert not accepts(grammar, EOS[0])
        assert grammar.accept([token])
    assert (allowed(grammar) == ALL) == (structure is None)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("end", [TEXT, TOKEN])
@pytest.mark.parametrize("budget", [None, 30])
@pytest.mark.parametrize("structure", [SCHEMA, None])
def test_what_leads_from_a_reasoning_to_the_rest(structure, budget, end, is_open):
    bridge = tuple(encode("<|start|>then: "))
    params = reasoning(end, is_open=is_open, budget=budget, bridge_token_ids=bridge)
    grammar = grammar_of(params, structure)
    for token in () if is_open else params.start_token_ids:  # it cannot be left out
        assert allowed(grammar) == {token}
        assert grammar.accept([token])
    assert grammar.accept(encode("Hm."))
    assert not allowed(grammar) & set(EOS)
    assert grammar.accept(encode(end))
    for token in bridge:
        assert allowed(grammar) == {token}
        assert not accepts(grammar, EOS[0])
        assert grammar.accept([token])
    if structure is None:
        assert allowed(grammar) == ALL
    else:
        assert not accepts(grammar, encode("x")[0])
        assert grammar.accept([*encode('{"a": 22}'), EOS[0]])


def test_a_reasoning_may_end_before_its_budget():
    grammar = grammar_of(reasoning(budget=20), None)
    assert grammar.accept([*encode("Hm.</think>"), *encode("x" * 60)])
    assert allowed(grammar) == ALL


@pytest.mark.parametrize("text", ["Hello", " <thin", "\n\nyes<think>"])
def test_an_output_without_a_reasoning_is_free(text):
    grammar = grammar_of(reasoning(is_open=False, budget=0), None)
    assert grammar.accept(encode(text + "!"))
    assert allowed(grammar) == ALL


def test_white_space_before_a_reasoning():
    grammar = grammar_of(reasoning(is_open=False, budget=0), None)
    assert grammar.accept(encode("\n <think>"))
    assert len(allowed(grammar)) == 1


def test_no_token_has_more_than_the_end():
    """Of which the structure would not know: `>` is allowed behind `</think`, and `>"` is not."""
    grammar = grammar_of(reasoning("</x", closing_token_ids=()))
    end = ReasoningEnd(reasoning("</x"), BACKEND.spelling)
    texts = [BACKEND.spelling.text(token) for token in range(NUM_TOKENS)]
    for before in ("", "a <", "a </", "<</"):
        state = grammar.copy()
        assert state.accept(encode(before))
        matched = max(n for n in range(3) if before.encode().endswith(b"</x"[:n]))
        overlong = {
            token for token, text in enumerate(texts)
            if b"</x" in (found := b"</x"[:matched] + text) and found.index(b"</x") + 3 < len(found)
        }  # fmt: skip
        assert set(end.overlong_tokens(matched)) == overlong
        assert allowed(state) == ALL - overlong - set(EOS)


def test_ids_beyond_the_tokenizer_are_no_text():
    grammar = grammar_of(reasoning(), None)
    assert grammar.accept([VOCAB - 1, *encode("</think>")])
    assert allowed(grammar) == ALL


@pytest.mark.parametrize("fields", [{"end": ""}, {"budget": -1}, {"budget": 1, "closing_token_ids": ()}])
def test_unusable_reasoning(fields):
    with pytest.raises(InvalidRequestError, match="reasoning"):
        reasoning(**fields)


def test_a_reasoning_alone_is_a_specification():
    params = StructuredOutputsParams(reasoning=reasoning(budget=3))
    assert params.structure is None
    SamplingParams(structured_outputs=params, min_tokens=3, ignore_eos=True)
    both = StructuredOutputsParams(reasoning=reasoning(), json=SCHEMA)
    assert both.structure == StructuredOutputsParams(json=SCHEMA)
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(structured_outputs=both, min_tokens=3)
    assert np.isfinite(grammar_of(reasoning()).num_bytes)
