"""The part of a prompt that is kept, against the tokens of the whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from test_input_processor import INFO, TOKENIZER
from tokenizers import processors

import quire
from quire.errors import ContextLengthError, InvalidRequestError
from quire.front.text.input_processor import InputProcessor
from quire.models.checkpoints.tokenizers.reading import read_tokenizer
from quire.models.text.tokenizer import Tokenizer
from quire.sampling_params import SamplingParams
from tokenizers_for_tests import byte_level

MINI = read_tokenizer(Path(quire.__file__).parent / "mini")
INFO_OF_MINI = msgspec.structs.replace(INFO, max_model_len=4_096, vocab_size=1_536)
PARAMS = SamplingParams()
WORDS = "The quick brown fox, number 123, doesn't jump over 4567 lazy dogs.\n\n    Why? "


@pytest.fixture
def inputs():
    return InputProcessor(TOKENIZER, INFO)


def kept(inputs, prompt, num_tokens, side="left", params=PARAMS, **options):
    processed = inputs.process(
        prompt, params, truncate_prompt_tokens=num_tokens, truncation_side=side, **options
    )
    return processed.core_request.prompt_token_ids


@pytest.mark.parametrize("num_tokens", [1, 5, 19])
def test_the_last_or_the_first_tokens_of_a_text(inputs, num_tokens):
    text = "abcdefghijklmnopqrstuvwxyz" * 3
    whole = TOKENIZER.encode(text)
    assert kept(inputs, text, num_tokens) == whole[-num_tokens:]
    assert kept(inputs, text, num_tokens, "right") == whole[:num_tokens]
    assert kept(inputs, whole, num_tokens) == whole[-num_tokens:]
    assert kept(inputs, whole, num_tokens, "right") == whole[:num_tokens]
    processed = inputs.process(text, PARAMS, truncate_prompt_tokens=num_tokens)
    assert processed.prompt == text[-num_tokens:]


def test_a_prompt_that_is_short_enough_stays_as_it_is(inputs):
    processed = inputs.process("hello", PARAMS, truncate_prompt_tokens=7)
    assert processed.core_request.prompt_token_ids == TOKENIZER.encode("hello")
    assert processed.prompt == "hello"


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 19), (5, 15), (19, 1), (20, 19), (9_999, 19)])
def test_as_many_as_fit_beside_the_output(inputs, max_tokens, expected):
    params = SamplingParams(max_tokens=max_tokens)
    text = "x" * 100
    assert len(kept(inputs, text, -1, params=params, shorten_output=True)) == expected
    assert len(kept(inputs, [5] * 100, -1, params=params, shorten_output=True)) == expected


@pytest.mark.parametrize("num_tokens", [0, -2, 20, 10**30, True, 2.0])
def test_numbers_that_cannot_be(inputs, num_tokens):
    with pytest.raises(InvalidRequestError, match="from 1 to 19") as caught:
        kept(inputs, "abc", num_tokens)
    assert caught.value.param == "truncate_prompt_tokens"


def test_a_side_that_is_none(inputs):
    with pytest.raises(InvalidRequestError, match="left or right"):
        kept(inputs, "abc", 5, "middle")


@pytest.mark.parametrize("prompt", ["", []])
def test_nothing_of_nothing_is_kept(inputs, prompt):
    with pytest.raises(InvalidRequestError, match="empty"):
        kept(inputs, prompt, 5)


def test_tokens_that_are_added_around_a_text_stay():
    tokenizer = byte_level()
    backend = tokenizer.backend
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    inputs = InputProcessor(tokenizer, INFO)
    a_to_z = tokenizer.encode("abcdefgh", add_special_tokens=False)
    processed = inputs.process("abcdefgh", PARAMS, truncate_prompt_tokens=5)
    assert processed.core_request.prompt_token_ids == [0, *a_to_z[-3:], 1]
    assert processed.prompt == "fgh"
    assert kept(inputs, "abcdefgh", 5, "right") == [0, *a_to_z[:3], 1]
    assert kept(inputs, "abcdefgh", 5, add_special_tokens=False) == a_to_z[-5:]
    assert kept(inputs, "abcdefgh", 2) == [a_to_z[-1], 1]  # there is no room for text


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("num_tokens", [1, 100, 1_000])
def test_a_text_far_too_long_is_cut_before_it_is_tokenized(monkeypatch, num_tokens):
    text = WORDS * 20_000  # 1.5 million characters
    whole = MINI.encode(text, add_special_tokens=False)
    tokenized = []
    tokenize = Tokenizer.tokenize
    monkeypatch.setattr(
        Tokenizer,
        "tokenize",
        lambda self, text, **options: (tokenized.append(len(text)), tokenize(self, text, **options))[1],
    )
    inputs = InputProcessor(MINI, INFO_OF_MINI)
    assert kept(inputs, text, num_tokens) == whole[-num_tokens:]
    assert kept(inputs, text, num_tokens, "right") == whole[:num_tokens]
    assert max(tokenized) <= 2 * 65_536


def test_a_conversation():
    inputs = InputProcessor(MINI, INFO_OF_MINI)
    messages = [{"role": "user", "content": WORDS * 50}]
    whole = inputs.process_chat(messages, PARAMS).core_request.prompt_token_ids
    cut = inputs.process_chat(messages, PARAMS, truncate_prompt_tokens=30)
    assert cut.core_request.prompt_token_ids == whole[-30:]
    assert MINI.encode(cut.prompt, add_special_tokens=False) == whole[-30:]
    far_too_long = [{"role": "user", "content": WORDS * 20_000}]
    with pytest.raises(ContextLengthError):
        inputs.process_chat(far_too_long, PARAMS)
    cut = inputs.process_chat(far_too_long, PARAMS, truncate_prompt_tokens=-1)
    assert len(cut.core_request.prompt_token_ids) == 4_095
