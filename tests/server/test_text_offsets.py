"""Where the tokens of an answer begin in its text, also those that are parts of characters."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.front.text.detokenizer import DecoderFactory
from quire.models.text.tokenizer import Tokenizer
from quire.request_output import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from quire.server.calls.logprobs import CompletionLogprobsWriter, joined
from tokenizers_for_tests import ADDED, CORPUS, KINDS, byte_level, of_kind, sentencepiece

PIECES = [*(token.content for token in ADDED), *CORPUS[0].split(" "), "  ", "é", "e\u0301", "É", "漢", "🙂"]
TEXT = "the 漢字 the é! STOP 漢"


def logprobs_of(tokenizer: Tokenizer, token_id: int) -> TokenLogprobs:
    return {token_id: Logprob(-1.0, 1, tokenizer.token_text(token_id))}


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("kind", ["byte level", "llama", "gemma", "metaspace"])
async def test_offsets_are_where_the_tokens_begin_in_the_text(kind, start):
    tokenizer = byte_level() if kind == "byte level" else sentencepiece(kind)
    prompt = tokenizer.encode(TEXT, add_special_tokens=False)
    prompt_text = tokenizer.decode(prompt, skip_special_tokens=False)
    ids = tokenizer.encode(f"{TEXT}s", add_special_tokens=False)
    text = tokenizer.decode(prompt + ids, skip_special_tokens=False)
    completion = CompletionOutput(0, "", ids, [logprobs_of(tokenizer, one) for one in ids])
    of_prompt = [None, *(logprobs_of(tokenizer, one) for one in prompt[1:])]
    output = RequestOutput("r", prompt_text, prompt, [completion], of_prompt)
    writer = CompletionLogprobsWriter(
        tokenizer, DecoderFactory(tokenizer), 0, prompt_token_ids=prompt, skip_special_tokens=True
    )
    so_far = CompletionOutput(0, "", ids[:start], completion.logprobs[:start])
    parts = [
        await writer.prompt(output, prompt_text),
        await writer.output(so_far, 0),
        await writer.output(completion, start),
    ]
    written = joined(parts)
    assert written.text_offset == [
        # A character that is not complete begins where the first of its tokens does.
        len(tokenizer.decode((prompt + ids)[:count], skip_special_tokens=False).rstrip("\ufffd"))
        for count in range(len(prompt + ids))
    ]
    for token, offset in zip(written.tokens[1:], written.text_offset[1:], strict=True):
        assert token.startswith("bytes:") or text.startswith(token, offset)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(KINDS)), st.lists(st.sampled_from([*PIECES, " "]), max_size=8).map("".join))
@example("word pieces", " ")  # a text without tokens
@example("word pieces", "now\u00e9say")  # accents are left out of tokens
def test_tokens_of_an_echoed_prompt_begin_where_their_texts_do(kind, text):
    tokenizer = of_kind(kind)
    token_ids = tokenizer.encode(text)
    starts = tokenizer.token_starts(text, [1, *token_ids, 2])
    assert starts[0] == 0
    assert starts[-1] == len(text)
    assert starts == sorted(starts)
    for start, token_id in zip(starts[1:-1], token_ids, strict=True):
        token = tokenizer.token_bytes.of(token_id)
        if not _is_part(token) and token.strip() != b"<unk>":
            shown = _folded(token.decode())
            assert _folded(text[start:]).startswith((shown, shown.lstrip())), (text, start, token)


def test_a_text_of_the_token_that_models_put_before_it_begins_behind_that_one():
    tokenizer = byte_level()
    [token_id] = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.token_starts("a", [token_id, token_id, 2]) == [0, 0, 1]


def _is_part(token: bytes) -> bool:
    return "\ufffd" in token.decode(errors="replace")


def _folded(text: str) -> str:
    """Without what the tokenizers' normalizers change."""
    decomposed = unicodedata.normalize("NFKD", text.replace("▁", " ").lower())
    return "".join(character for character in decomposed if not unicodedata.combining(character))


def test_other_tokens_than_a_texts_have_no_places_in_it():
    tokenizer = byte_level()
    assert tokenizer.token_starts("ab", tokenizer.encode("ba")) is None
    assert tokenizer.token_starts("ab", tokenizer.encode("a")) is None


async def test_a_token_behind_faulty_bytes_begins_where_its_text_does():
    tokenizer = byte_level()
    [part, _] = tokenizer.encode("é", add_special_tokens=False)
    ids = [part, part, *tokenizer.encode("hello", add_special_tokens=False)]
    completion = CompletionOutput(0, "", ids, [logprobs_of(tokenizer, one) for one in ids])
    writer = CompletionLogprobsWriter(
        tokenizer, DecoderFactory(tokenizer), 0, prompt_token_ids=[], skip_special_tokens=True
    )
    written = await writer.output(completion, 0)
    text = tokenizer.decode(ids)
    assert text.startswith("\ufffd\ufffdh")
    for token, offset in zip(written.tokens, written.text_offset, strict=True):
        assert token.startswith("bytes:") or text.startswith(token, offset)
