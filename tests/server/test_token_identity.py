"""Every token of an answer has its own bytes, name and figure, also one that is part of a character."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.front.text.detokenizer import DecoderFactory
from quire.models.text.tokenizer import Tokenizer
from quire.request_output import CompletionOutput, Logprob
from quire.server.calls.logprobs import CompletionLogprobsWriter, chat_logprobs, joined
from tokenizers_for_tests import KINDS, byte_level, of_kind

NUM_CANDIDATES = 5


def completion_of(tokenizer: Tokenizer, ids: list[int], others: list[list[int]]) -> CompletionOutput:
    """A completion in which each candidate's figure tells its id and place."""
    positions = []
    for place, (token_id, candidates) in enumerate(zip(ids, others, strict=True)):
        chosen_last = dict.fromkeys([*candidates, token_id])
        positions.append(
            {
                one: Logprob(-one - place / 1000, rank, tokenizer.token_text(one))
                for rank, one in enumerate(chosen_last, 1)
            }
        )
    return CompletionOutput(0, "", ids, positions)


@st.composite
def answers(draw):
    kind = draw(st.sampled_from(list(KINDS)))
    tokenizer = of_kind(kind)
    text = draw(st.sampled_from(["", "é🙂 漢字 naïve", "the tools", "ﬁ a"]))
    tokens = st.integers(0, tokenizer.vocab_size - 1)
    ids = [*tokenizer.encode(text), *draw(st.lists(tokens, max_size=8))]
    others = [draw(st.lists(tokens, max_size=NUM_CANDIDATES - 1, unique=True)) for _ in ids]
    return tokenizer, ids, others


@settings(max_examples=100, deadline=None)
@given(answers(), st.integers(0, 8))
async def test_bytes_of_an_answer_are_its_text_and_no_candidate_has_anothers_figure(answer, split):
    tokenizer, ids, others = answer
    completion = completion_of(tokenizer, ids, others)
    decoders = DecoderFactory(tokenizer)
    prompt = tokenizer.token_bytes.anchor[0]

    in_chat = (await chat_logprobs(tokenizer, completion, 0, NUM_CANDIDATES)).content
    decoder = decoders.make(prompt, skip_special_tokens=False)
    text = "".join(map(decoder.push, ids)) + decoder.flush()
    assert b"".join(bytes(one.bytes) for one in in_chat).decode(errors="replace") == text

    def writer() -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(
            tokenizer, decoders, NUM_CANDIDATES, prompt_token_ids=prompt, skip_special_tokens=False
        )

    whole = await writer().output(completion, 0)
    streaming = writer()
    first = CompletionOutput(0, "", ids[:split], completion.logprobs[:split])
    parts = [await streaming.output(first, 0), await streaming.output(completion, split)]
    assert joined(parts) == whole
    for place, chosen in enumerate(in_chat):
        figures = {one: entry.logprob for one, entry in completion.logprobs[place].items()}
        assert chosen.logprob == whole.token_logprobs[place] == figures[ids[place]]
        assert sorted(one.logprob for one in chosen.top_logprobs) == sorted(figures.values())
        assert sorted(whole.top_logprobs[place].values()) == sorted(figures.values())
        assert whole.top_logprobs[place][whole.tokens[place]] == figures[ids[place]]
        for one in (chosen, *chosen.top_logprobs):
            token = tokenizer.token_bytes.of(round(-one.logprob))
            assert bytes(one.bytes) == token
            name = repr(token)[2:-1] if "\ufffd" in token.decode(errors="replace") else token.decode()
            assert one.token == name


async def test_parts_of_characters_are_named_as_openai_names_them():
    tokenizer = byte_level()
    ids = tokenizer.encode("é🙂", add_special_tokens=False)
    completion = completion_of(tokenizer, ids, [[] for _ in ids])
    writer = CompletionLogprobsWriter(
        tokenizer, DecoderFactory(tokenizer), 1, prompt_token_ids=[], skip_special_tokens=True
    )
    written = await writer.output(completion, 0)
    assert written.tokens == [f"bytes:\\x{byte:02x}" for byte in "é🙂".encode()]
    assert written.text_offset == [0, 0, 1, 1, 1, 1]
    chat = await chat_logprobs(tokenizer, completion, 0, 0)
    assert [one.token for one in chat.content] == [f"\\x{byte:02x}" for byte in "é🙂".encode()]
