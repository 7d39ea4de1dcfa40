"""/v1/chat/completions through the real openai client, in process."""

import pytest
from fake_llm import MAX_MODEL_LEN, REPLY

USER = {"role": "user", "content": "Hi"}


async def create(client, **fields):
    return await client.chat.completions.create(**{"model": "fake", "messages": [USER], **fields})


async def test_plain_answer_has_openai_shape(client, llm):
    answer = await create(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", REPLY, None)
    assert answer.usage.completion_tokens == len(REPLY)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert llm.seen[0].params.max_tokens is None  # as many as fit
    assert len(REPLY) < MAX_MODEL_LEN


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_max_tokens(client, name):
    answer = await create(client, **{name: 3})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (REPLY[:3], "length")


async def test_text_parts_are_joined(client, llm):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a block?"}]
    await create(client, messages=[{"role": "user", "content": parts}])
    assert llm.seen[0].prompt == "What is \na block?"


async def test_an_answer_can_be_sent_back_as_history(client):
    answer = await create(client)
    history = [USER, answer.choices[0].message.model_dump(), USER]
    assert (await create(client, messages=history)).choices[0].message.content == REPLY


async def test_meaningless_openai_fields_are_accepted_with_their_only_value(client):
    answer = await create(
        client,
        store=False,
        service_tier="auto",
        response_format={"type": "text"},
        user="me",
        tool_choice="none",
        modalities=["text"],
    )
    assert answer.choices[0].message.content == REPLY


async def streamed(client, **fields):
    return [chunk async for chunk in await create(client, stream=True, **fields)]


async def test_stream(client):
    chunks = await streamed(client, stream_options={"include_usage": True})
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == REPLY
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    assert all(chunk.choices[0].finish_reason is None for chunk in (first, *middle))
    assert last.choices[0].delta.model_dump(exclude_none=True) == {}
    assert last.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(REPLY)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.id for chunk in chunks} == {first.id}


async def test_stream_with_n_carries_the_index(client):
    texts = {0: "", 1: "", 2: ""}
    for chunk in await streamed(client, n=3, max_tokens=8):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == {index: REPLY[index : index + 8] for index in range(3)}


async def test_logprobs(client):
    answer = await create(client, logprobs=True, top_logprobs=3, max_tokens=2)
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("t", -0.25, [116])
    assert [top.token for top in first.top_logprobs] == ["t", "u", "v"]
    assert second.token == "h"


async def test_logprobs_without_top(client):
    answer = await create(client, logprobs=True, max_tokens=2)
    assert answer.choices[0].logprobs.content[0].top_logprobs == []


async def test_streamed_logprobs_add_up(client):
    plain = await create(client, logprobs=True, top_logprobs=1, n=2)
    content = {0: [], 1: []}
    for chunk in await streamed(client, logprobs=True, top_logprobs=1, n=2):
        for choice in chunk.choices:
            if choice.logprobs:
                content[choice.index] += choice.logprobs.content
    assert content == {choice.index: choice.logprobs.content for choice in plain.choices}
