"""What is refused at the door, with what words, and how open parameters are resolved."""

from __future__ import annotations

import math
import time

import pytest

from quire.engine.messages import EngineInfo
from quire.errors import ContextLengthError, InvalidRequestError
from quire.front.text.input_processor import InputProcessor, derived_seed
from quire.sampling_params import SamplingParams
from tokenizers_for_tests import byte_level

TOKENIZER = byte_level(eos_token_ids=(1,))
INFO = EngineInfo(
    model="test",
    max_model_len=20,
    vocab_size=300,
    num_blocks=10,
    block_size=16,
    kv_cache_bytes=0,
    dtype="float32",
    load_seconds=0.0,
)


@pytest.fixture
def inputs() -> InputProcessor:
    return InputProcessor(TOKENIZER, INFO)


def test_resolves_what_is_open(inputs):
    request = inputs.process("abc", SamplingParams()).core_request
    assert request.prompt_token_ids == TOKENIZER.encode("abc")
    assert request.sampling_params.max_tokens == 17
    assert 0 <= request.sampling_params.seed < 2**63
    assert (
        request.sampling_params.seed
        != inputs.process("abc", SamplingParams()).core_request.sampling_params.seed
    )
    assert request.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("prompt", "params", "field", "words"),
    [
        ("", {}, "prompt", "empty"),
        ([], {}, "prompt", "empty"),
        ([5] * 20, {}, "prompt", "20 tokens.*limit is 19.*max_model_len is 20"),
        ([300], {}, "prompt", "300.*0 to 299"),
        ([-1], {}, "prompt", "-1"),
        ([1.5], {}, "prompt", "list"),
        (None, {}, "prompt", "NoneType"),
        ("a\ud800", {}, "prompt", "D800"),
        ([5] * 10, {"max_tokens": 11}, "max_tokens", "10 tokens.*11.*21.*max_model_len 20.*max_tokens 10"),
        ([5] * 10, {"min_tokens": 11}, "min_tokens", "11.*10"),
        ("a", {"stop_token_ids": (300,)}, "stop_token_ids", "300"),
        ("a", {"logit_bias": {400: 1.0}}, "logit_bias", "400"),
        ("a", {"bad_words_token_ids": ((7, 999),)}, "bad_words_token_ids", "999"),
        ("a", {"stop": ("\udc00",)}, "stop", "DC00"),
        ("a", {"bad_words": ("a", "b\udc00")}, "bad_words", "bad_words holds .*DC00.* position 1"),
        ("a", {"max_tokens": 2.5}, "max_tokens", "2.5.*whole number"),
        ("a", {"logit_bias": {"7": 1.0}}, "logit_bias", "token ids to numbers"),
    ],
)
def test_refuses(inputs, prompt, params, field, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        inputs.process(prompt, SamplingParams(**params))
    assert caught.value.param == field


@pytest.mark.parametrize(("asked", "given"), [(11, 10), (10, 10), (9, 9), (None, 10)])
def test_an_output_may_be_shortened_to_what_fits(inputs, asked, given):
    processed = inputs.process([5] * 10, SamplingParams(max_tokens=asked), shorten_output=True)
    assert processed.params.max_tokens == given


def test_a_prompt_that_does_not_fit_is_refused_even_if_the_output_may_be_shortened(inputs):
    with pytest.raises(ContextLengthError):
        inputs.process([5] * 20, SamplingParams(max_tokens=1), shorten_output=True)


@pytest.mark.parametrize(
    "options",
    [
        {"request_id": ""},
        {"request_id": 7},
        {"cache_salt": "\ud900"},
        {"priority": 2**40},
        {"priority": "high"},
    ],
)
def test_refuses_options(inputs, options):
    with pytest.raises(InvalidRequestError) as caught:
        inputs.process("a", SamplingParams(), **options)
    assert caught.value.param == next(iter(options))


def test_refuses_what_is_not_sampling_params(inputs):
    with pytest.raises(InvalidRequestError, match="dict"):
        inputs.process("a", {"max_tokens": 3})


def test_bad_words_are_banned_with_and_without_a_space_before(inputs):
    params = SamplingParams(bad_words=("the",), bad_words_token_ids=((7, 8),))
    sequences = inputs.process("a", params).core_request.sampling_params.bad_words_token_ids
    expected = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("the", " the")]
    assert sequences == ((7, 8), *(tuple(ids) for ids in expected))


def test_bad_words_are_tokenized_once_for_all_prompts_of_a_call(monkeypatch):
    tokenizer, texts = byte_level(eos_token_ids=(1,)), []
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **options: texts.append(text) or encode(text, **options)
    )
    inputs = InputProcessor(tokenizer, INFO)
    found = [
        inputs.process("a", SamplingParams(bad_words=words)).core_request.sampling_params.bad_words_token_ids
        for words in (("b", "c"), ("b", "c"), ("d",), ("b", "c"))
    ]
    assert sorted(texts) == sorted(["b", " b", "c", " c", "d", " d"])
    assert found[0] == found[1] == found[3] != found[2]


def test_n_sequences_have_ids_and_seeds_of_their_own(inputs):
    one = inputs.process("a", SamplingParams(seed=5)).core_request
    three = inputs.process("a", SamplingParams(seed=5, n=3)).core_request
    assert len({*three.sequence_ids, *one.sequence_ids}) == 4
    seeds = three.seeds
    assert seeds == [derived_seed(5, index) for index in range(3)]
    assert seeds[0] == 5, "the first completion does not depend on n"
    assert len(set(seeds)) == 3


def test_derived_seeds_are_splitmix64():
    """First outputs of the published generator for seed 1234567, less their lowest bit."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [derived_seed(1234567, index) for index in range(1, 5)] == [value >> 1 for value in published]


def test_a_made_up_id_is_not_one_that_a_caller_would_choose(inputs):
    """An id that only counts would collide with the ids of a caller who counts too."""
    other = InputProcessor(TOKENIZER, INFO)
    made_up = {one.process("a", SamplingParams()).request_id for one in (inputs, inputs, other, other)}
    assert len(made_up) == 4


def test_the_same_request_id_never_gives_the_same_sequence_id(inputs):
    ids = {
        inputs.process("a", SamplingParams(), request_id="x").core_request.sequence_ids[0] for _ in range(3)
    }
    assert len(ids) == 3


@pytest.fixture
def refuses_to_tokenize(monkeypatch):
    """Fails the test when anything is tokenized or put into a template."""
    for name in ("tokenize", "tokenize_chat", "render_chat"):
        monkeypatch.setattr(TOKENIZER, name, lambda *args, **kwargs: pytest.fail("too late"))


def test_text_of_too_many_tokens_is_refused_before_it_is_tokenized(inputs, refuses_to_tokenize):
    with pytest.raises(InvalidRequestError, match=r"4000000 characters.* more than 19 tokens.* limit is 19"):
        inputs.process("a" * 4_000_000, SamplingParams())


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": ""}] * 20, "has 20 messages.* 19 tokens .*at most 19 messages"),
        ([{"role": "user", "content": "a" * 10_000}] * 10, "has 100000 characters.* at most 19 tokens"),
    ],
)
def test_conversations_that_cannot_fit_are_refused_before_the_template(
    inputs, refuses_to_tokenize, messages, words
):
    with pytest.raises(InvalidRequestError, match=words):
        inputs.process_chat(messages, SamplingParams())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"messages": "hello"}, "messages must be a list of dictionaries, not str"),
        ({"messages": None}, "messages must be a list of dictionaries, not NoneType"),
        ({"messages": [{"role": "user", "content": "a"}, 5]}, "messages .*; one of them is int"),
        ({"tools": "x"}, "tools must be a list of dictionaries, not str"),
        ({"tools": ["x"]}, "tools .*; one of them is str"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs must be a dictionary, not int"),
    ],
)
def test_what_is_no_conversation_is_refused(inputs, refuses_to_tokenize, given, words):
    arguments = {"messages": [{"role": "user", "content": "a"}], **given}
    with pytest.raises(InvalidRequestError, match=words):
        inputs.process_chat(params=SamplingParams(), **arguments)


@pytest.mark.parametrize("truncated", [None, 3])
def test_whether_special_tokens_are_added_is_true_or_false(inputs, refuses_to_tokenize, truncated):
    with pytest.raises(InvalidRequestError, match="add_special_tokens is 'no'; it must be True or False"):
        inputs.process("a", SamplingParams(), add_special_tokens="no", truncate_prompt_tokens=truncated)


def test_too_many_token_ids_are_refused_before_each_is_looked_at(inputs):
    with pytest.raises(InvalidRequestError, match="has 1000000 tokens"):
        inputs.process([None] * 1_000_000, SamplingParams())


def test_a_request_has_its_time_of_arrival(inputs):
    before = time.monotonic()
    request = inputs.process("a", SamplingParams()).core_request
    assert before <= request.arrival_time <= time.monotonic()
    assert inputs.process("a", SamplingParams(), arrival_time=12).core_request.arrival_time == 12.0
    for wrong in (math.nan, math.inf, "12", True):
        with pytest.raises(InvalidRequestError, match=r"arrival_time is .*time\.monotonic\(\)"):
            inputs.process("a", SamplingParams(), arrival_time=wrong)
