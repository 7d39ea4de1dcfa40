"""Grammars by llguidance, against Python's `re`, `json` and a plain search through the vocabulary."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

import quire
from quire.errors import InvalidRequestError
from quire.grammar.llguidance_backend import LLGuidanceBackend
from quire.grammar.manager import GrammarManager
from quire.models.checkpoints.tokenizers.reading import read_tokenizer
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.structured_outputs import MAX_GRAMMAR_BYTES, StructuredOutputsParams
from subprocesses import python_output
from tokenizers_for_tests import byte_level, sentencepiece

MINI = Path(quire.__file__).parent / "mini"
TOKENIZER = read_tokenizer(MINI)
NUM_TOKENS = TOKENIZER.vocab_size
VOCAB = NUM_TOKENS + 70  # the logits are wider than the tokenizer
EOS = TOKENIZER.eos_token_ids
BACKEND = LLGuidanceBackend((MINI / "tokenizer.json").read_text, VOCAB, lambda: EOS)
FEW = settings(max_examples=25)


def token_bytes() -> list[bytes | None]:
    """The bytes of every token, None for special ones and for marks, which are no part of a text.

    GPT-2's table shows each byte as a printable one.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    pieces = [TOKENIZER.backend.id_to_token(token) for token in range(NUM_TOKENS)]
    added = TOKENIZER.backend.get_added_tokens_decoder()
    return [
        None if token in added else bytes(table[char] for char in piece) for token, piece in enumerate(pieces)
    ]


TOKEN_BYTES = token_bytes()


def compiled(**fields):
    return BACKEND.compile(StructuredOutputsParams(**fields))


def allowed(grammar, vocab_size=VOCAB) -> set[int]:
    row = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    grammar.fill_bitmask(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def walk(grammar, rng: random.Random, most: int = 300) -> str:
    """Take random allowed tokens to the end, which becomes the likelier the longer it takes."""
    tokens: list[int] = []
    while len(tokens) < most:
        choices = allowed(grammar)
        if choices & set(EOS) and (choices <= set(EOS) or rng.random() < 0.3):
            assert grammar.accept([rng.choice(EOS)])
            return TOKENIZER.decode(tokens)
        token = rng.choice(sorted(choices - set(EOS)))
        assert grammar.accept([token])
        tokens.append(token)
    raise AssertionError(f"no end after {TOKENIZER.decode(tokens)!r}")


def assert_accepts_whole(grammar, text: str) -> None:
    """Every token of `text` is allowed in turn, and then the end."""
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        assert token in allowed(grammar), text
        assert grammar.accept([token])
    assert set(EOS) <= allowed(grammar), text


letters = st.sampled_from(["a", "b", "é", "the", "0", " ", "漢", "[a-c]", "[^x]", "[0-9]", r"\.", "/", '"'])
regexes = st.recursive(
    letters,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "{0,3}", "{2}", "{1,2}"])).map(lambda p: f"({p[0]}){p[1]}"),
    ),
    max_leaves=6,
)


@FEW
@given(regexes, st.randoms(use_true_random=False))
def test_what_a_regex_lets_through_matches_it(pattern, rng):
    assert re.fullmatch(pattern, walk(compiled(regex=pattern), rng))


@FEW
@given(regexes.flatmap(lambda p: st.tuples(st.just(p), st.from_regex(re.compile(p), fullmatch=True))))
def test_every_match_of_a_regex_gets_through_and_may_end_exactly_at_a_match(case):
    pattern, text = case
    grammar = compiled(regex=pattern)
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    for count in range(len(tokens) + 1):
        so_far = b"".join(TOKEN_BYTES[token] for token in tokens[:count])
        is_match = _is_text(so_far) and re.fullmatch(pattern, so_far.decode()) is not None
        assert (allowed(grammar) & set(EOS)) == (set(EOS) if is_match else set())
        if count < len(tokens):
            assert tokens[count] in allowed(grammar)
            assert grammar.accept([tokens[count]])


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@FEW
@given(st.lists(st.text(max_size=6), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_choices_allow_exactly_the_tokens_that_a_search_finds(choices, rng):
    grammar = compiled(choice=choices)
    spelled = [choice.encode() for choice in choices]
    done = b""
    while True:
        going_on = {
            token
            for token, piece in enumerate(TOKEN_BYTES)
            if piece and any(choice.startswith(done + piece) for choice in spelled)
        }
        found = allowed(grammar)
        assert found & set(EOS) == (set(EOS) if done in spelled else set())
        is_forced = done not in spelled and len({TOKEN_BYTES[token][0] for token in going_on}) == 1
        if is_forced:  # of a text that is certain, only the tokenizer's own spelling is allowed
            assert found
            assert found <= going_on
        else:
            assert found - set(EOS) == going_on
        if not going_on:
            break
        token = rng.choice(sorted(found - set(EOS)))
        assert grammar.accept([token])
        done += TOKEN_BYTES[token]
    assert done in spelled


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y", None, 7]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PEOPLE = st.fixed_dictionaries(
    {"name": st.from_regex(re.compile("[A-Z][a-z]{1,5}"), fullmatch=True), "age": st.integers(0, 150)},
    optional={"tags": st.lists(st.sampled_from(["x", "y", None, 7]), max_size=3), "ok": st.booleans()},
)


def is_person(value) -> bool:
    return (
        {"name", "age"} <= set(value) <= set(SCHEMA["properties"])
        and re.fullmatch("[A-Z][a-z]{1,5}", value["name"]) is not None
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value.get("tags", [])) <= 3
        and all(tag in ("x", "y", None, 7) for tag in value.get("tags", []))
        and type(value.get("ok", True)) is bool
    )


@FEW
@given(st.randoms(use_true_random=False))
def test_what_a_schema_lets_through_is_valid_against_it(rng):
    text = walk(compiled(json=SCHEMA), rng)
    assert is_person(json.loads(text))
    assert "\n" not in text, "spaces are as json.dumps sets them: no model can go on with them for ever"


@FEW
@given(PEOPLE)
def test_every_valid_document_gets_through(person):
    in_order = {name: person[name] for name in SCHEMA["properties"] if name in person}
    assert_accepts_whole(compiled(json=json.dumps(SCHEMA)), json.dumps(in_order))


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]+/',
        'root ::= "(" root ")" | number\nnumber ::= [0-9]+  # one or more',
    ],
    ids=["lark", "gbnf"],
)
def test_grammars_in_both_notations(grammar):
    assert_accepts_whole(compiled(grammar=grammar), "((42))")
    assert re.fullmatch(r"\(*[0-9]+\)*", walk(compiled(grammar=grammar), random.Random(1)))


@FEW
@given(regexes, st.randoms(use_true_random=False))
def test_rolling_back_returns_to_every_earlier_place(pattern, rng):
    grammar = compiled(regex=pattern)
    places, tokens = [allowed(grammar)], []
    for _ in range(12):
        tokens.append(rng.choice(sorted(places[-1])))
        assert grammar.accept(tokens[-1:])
        places.append(allowed(grammar))
    back = rng.randrange(13)
    grammar.rollback(back)
    assert allowed(grammar) == places[12 - back]
    assert grammar.accept(tokens[12 - back :])
    assert allowed(grammar) == places[12]
    for count in range(12, 0, -1):
        grammar.rollback(1)
        assert allowed(grammar) == places[count - 1]


@FEW
@given(regexes, st.lists(st.integers(0, NUM_TOKENS - 1), max_size=3), st.randoms(use_true_random=False))
def test_valid_tokens_are_the_longest_prefix_that_can_be_accepted(pattern, noise, rng):
    grammar = compiled(regex=pattern)
    guide, tokens = grammar.copy(), []
    for _ in range(rng.randrange(5)):
        tokens.append(rng.choice(sorted(allowed(guide))))
        guide.accept(tokens[-1:])
    tokens += noise
    count = 0
    step_by_step = grammar.copy()
    while count < len(tokens) and step_by_step.accept([tokens[count]]):
        count += 1
    before = allowed(grammar)
    assert grammar.num_valid(tokens) == count
    assert grammar.accept(tokens) == (count == len(tokens))
    if count < len(tokens):
        assert allowed(grammar) == before


@pytest.mark.parametrize("token", [NUM_TOKENS, VOCAB - 1])
def test_a_draft_beyond_the_tokenizer_is_not_allowed_and_leaves_the_grammar_as_it_was(token):
    grammar = compiled(choice=["a"])
    assert grammar.num_valid([token]) == 0
    assert not grammar.accept([token])
    assert_accepts_whole(grammar, "a")


def test_a_finished_grammar_allows_only_the_end():
    grammar = compiled(choice=["a"])
    [token] = TOKENIZER.encode("a", add_special_tokens=False)
    assert not grammar.accept([EOS[0]])
    assert grammar.accept([token])
    assert allowed(grammar) == set(EOS)
    assert not grammar.accept([token])
    assert grammar.accept([*EOS, *EOS])
    assert allowed(grammar) == set(EOS)
    grammar.rollback(2 * len(EOS) + 1)
    assert allowed(grammar) >= {token}


def test_a_token_that_ends_the_output_is_no_part_of_it():
    end = TOKENIZER.token_text(EOS[0])
    with pytest.raises(InvalidRequestError, match="allows only a token that ends the output"):
        compiled(grammar=f"start: {end}")
    assert walk(compiled(choice=[end]), random.Random(1)) == end, "spelled with other tokens"
    grammar = compiled(grammar=f'start: "a" {end} | "ab"')
    a, b = (TOKENIZER.encode(text, add_special_tokens=False) for text in "ab")
    assert grammar.accept(a)
    assert allowed(grammar) == set(b)
    assert not grammar.accept([EOS[0]])


def test_after_an_early_end_nothing_else_comes():
    grammar = compiled(regex="a*")
    assert len(allowed(grammar)) > len(EOS)
    assert grammar.accept([EOS[0]])
    assert allowed(grammar) == set(EOS)
    other = grammar.copy()
    assert not other.accept(TOKENIZER.encode("a", add_special_tokens=False))
    other.rollback(1)
    assert len(allowed(other)) > len(EOS)
    assert allowed(grammar) == set(EOS)


@pytest.mark.parametrize("vocab_size", [NUM_TOKENS - 40, NUM_TOKENS, NUM_TOKENS + 1, VOCAB])
def test_ids_that_are_no_text_are_never_allowed(vocab_size):
    backend = LLGuidanceBackend((MINI / "tokenizer.json").read_text, vocab_size, lambda: EOS)
    grammar = backend.compile(StructuredOutputsParams(regex="(?s:.*)"))
    found = allowed(grammar, vocab_size)
    assert found & TOKENIZER.special_token_ids == set(EOS)
    plain = {token for token, piece in enumerate(TOKEN_BYTES) if piece and _is_text(piece)}
    assert {token for token in plain if token < vocab_size} <= found
    assert all(token < -(-min(vocab_size, NUM_TOKENS) // 32) * 32 for token in found)
    if vocab_size >= NUM_TOKENS:
        assert max(found) < NUM_TOKENS


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regex": "(a"}, ["regex", "unclosed group"]),
        ({"regex": "(?=a)b"}, ["regex", "look-around"]),
        ({"json": {"type": "colour"}}, ["json", "colour"]),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, ["json", "minimum"]),
        ({"json": {"$ref": "#/nowhere"}}, ["json", "/nowhere"]),
        ({"json": {"not": {"type": "string"}}}, ["json", "not"]),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, ["json", "oneOf", "use anyOf"]),
        ({"json": {"type": "array", "uniqueItems": True}}, ["json", "uniqueItems"]),
        ({"json": {"type": "string", "contentEncoding": "base64"}}, ["json", "contentEncoding"]),
        ({"grammar": "start: nothing"}, ["read as Lark", "GBNF (root ::= ...) is understood", "nothing"]),
        ({"grammar": "rule = 'a'"}, ["read as Lark (start: ...)"]),
        ({"grammar": 'rule ::= "a"'}, ["read as GBNF", "Lark (start: ...) is understood", "'root'"]),
        ({"grammar": "root ::= " + "(" * 8000}, ["read as GBNF"]),
        ({"grammar": ""}, ["read as Lark"]),
        ({"regex": "a?" * 1000 + "a" * 1000}, []),  # too costly, or not: either way it ends
    ],
)
def test_a_bad_specification_is_an_error_that_says_what_is_wrong(fields, words):
    spec = StructuredOutputsParams(**fields)
    try:
        BACKEND.compile(spec)
    except InvalidRequestError as error:
        assert error.param == "structured_outputs"
        assert all(word in str(error) for word in words), str(error)
        assert "followed" not in str(error), "it is refused before it is followed"
    else:
        assert not words


def test_a_grammar_that_outgrows_its_limits_on_the_way_fails_alone():
    grammar = compiled(regex="((((a{1,50}){1,50}){1,50}){1,50}){1,50}")
    [token] = TOKENIZER.encode("a", add_special_tokens=False)

    def go_on() -> None:
        for _ in range(100):
            assert grammar.accept([token])
            allowed(grammar)

    with pytest.raises(InvalidRequestError, match="too many"):
        go_on()


def test_rules_nested_as_deep_as_fits_do_not_end_the_process():
    lines, depth = ["start: A0"], 0
    while sum(map(len, lines)) + len(lines) < MAX_GRAMMAR_BYTES - 60:
        lines.insert(1, f'A{depth}: ("a" A{depth + 1})*')
        depth += 1
    lines.insert(1, f'A{depth}: "x"')
    spec = StructuredOutputsParams(grammar="\n".join(lines))
    grammars = GrammarManager(BACKEND)
    grammars.start(Request("a", [1], SamplingParams(structured_outputs=spec)))
    while not (ended := grammars.take_compiled()):
        pass
    assert ended == [("a", None)]
    assert grammars.accept("a", TOKENIZER.encode("a", add_special_tokens=False))
    grammars.shutdown()


def test_a_model_without_an_end_or_with_an_unreadable_tokenizer(tmp_path):
    spec = StructuredOutputsParams(regex="a")
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        LLGuidanceBackend((MINI / "tokenizer.json").read_text, VOCAB, lambda: ()).compile(spec)
    with pytest.raises(InvalidRequestError, match="model's tokenizer"):
        LLGuidanceBackend((tmp_path / "tokenizer.json").read_text, VOCAB, lambda: EOS).compile(spec)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match="model's tokenizer"):
        LLGuidanceBackend((tmp_path / "tokenizer.json").read_text, VOCAB, lambda: EOS).compile(spec)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma", "metaspace"])
def test_tokenizers_with_other_decoders(tmp_path, kind):
    tokenizer = byte_level() if kind == "byte-level" else sentencepiece(kind)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    eos = tokenizer.backend.token_to_id("</s>")
    backend = LLGuidanceBackend((tmp_path / "tokenizer.json").read_text, tokenizer.vocab_size, lambda: [eos])
    choices = ["a the b", "STOP", "é漢!", "hello"]
    start = backend.compile(StructuredOutputsParams(choice=choices))
    spelled = set()
    for seed in range(60):
        rng, grammar, tokens = random.Random(seed), start.copy(), []
        while eos not in tokens:
            tokens.append(rng.choice(sorted(allowed(grammar, tokenizer.vocab_size))))
            assert grammar.accept(tokens[-1:])
        spelled.add(tokenizer.decode(tokens))
    assert spelled == set(choices)


@pytest.mark.parametrize("decoder", [decoders.BPEDecoder(suffix="a"), decoders.CTC(pad_token="<s>")])
def test_a_tokenizer_whose_tokens_have_another_text_beside_others_is_refused(decoder):
    tokenizer = byte_level()
    tokenizer.backend.decoder = decoder
    with pytest.raises(InvalidRequestError, match="depends on the tokens around them"):
        LLGuidanceBackend(tokenizer.backend.to_str, 512, lambda: [1]).compile(
            StructuredOutputsParams(regex="a")
        )


def test_llguidance_is_imported_at_the_first_compilation():
    code = f"""
import sys
from pathlib import Path
from quire.grammar.llguidance_backend import LLGuidanceBackend
from quire.structured_outputs import StructuredOutputsParams
backend = LLGuidanceBackend((Path({str(MINI)!r}) / "tokenizer.json").read_text, 1536, lambda: [1])
before = "llguidance" in sys.modules
backend.compile(StructuredOutputsParams(regex="a"))
print(before, "llguidance" in sys.modules, "torch" in sys.modules)
"""
    assert python_output(code) == "False True False\n"


@pytest.mark.parametrize("closes_objects", [True, False])
def test_keys_that_a_schema_does_not_name(closes_objects):
    backend = LLGuidanceBackend(
        (MINI / "tokenizer.json").read_text, VOCAB, lambda: EOS, closes_objects=closes_objects
    )
    named = {"type": "object", "properties": {"a": {"type": "integer", "nullable": True}}, "required": ["a"]}
    grammar = backend.compile(StructuredOutputsParams(json=named))
    invented = TOKENIZER.encode('{"a": null, "b": 1}', add_special_tokens=False)
    assert (grammar.num_valid(invented) == len(invented)) == (not closes_objects)
    assert grammar.accept(TOKENIZER.encode('{"a": null}', add_special_tokens=False))
