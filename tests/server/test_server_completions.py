"""/v1/completions through the real openai client, in process."""

import asyncio
import itertools
from collections import Counter

import pytest
from fake_llm import BOS, REPLY

from quire.server.openai import call as completions_call
from quire.server.openai import completions


async def create(client, **fields):
    return await client.completions.create(**{"model": "fake", "prompt": "Hi", **fields})


async def test_plain_answer_has_openai_shape(client):
    answer = await create(client, max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "fake"
    assert answer.system_fingerprint.startswith("fp_")
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (
        0,
        REPLY[:5],
        "length",
        None,
    )
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_defaults_are_openais(client, llm):
    await create(client)
    params = llm.seen[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.n) == (16, 1.0, 1.0, 1)


async def test_every_sampling_field_reaches_the_engine(client, llm):
    sampling = {
        "temperature": 0, "top_p": 0.5, "seed": 7, "presence_penalty": 1.5, "frequency_penalty": -1, "n": 2,
        "max_tokens": 9, "stop": ["q"], "logit_bias": {"5": -3}, "logprobs": 2,
    }  # fmt: skip
    extensions = {
        "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9],
        "ignore_eos": True, "bad_words": ["no"], "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }  # fmt: skip
    options = {
        "priority": 3, "cache_salt": "salt", "timeout": 9.5, "queue_timeout": 2.5, "pin_prefix": 60.0,
        "kv_transfer_params": {"do_remote_prefill": True, "remote_port": 7000, "remote_host": "h"},
    }  # fmt: skip
    await create(client, **sampling, user="someone", extra_body={**extensions, **options})
    [seen] = llm.seen
    for name, value in {**sampling, **extensions}.items():
        if name == "logit_bias":
            assert seen.params.logit_bias == {5: -3}
        else:
            expected = tuple(value) if isinstance(value, list) else value
            assert getattr(seen.params, name) == expected, name
    assert seen.options == {**options, "tenant": "someone", "shorten_output": True}


async def test_null_means_left_out(http, llm):
    body = {"model": "fake", "prompt": "Hi", "temperature": None, "stop": None, "n": None, "suffix": None}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert llm.seen[0].params.temperature == 1.0


async def test_several_prompts_and_n_are_numbered_in_order(client):
    answer = await create(client, prompt=["a", "bc"], n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [REPLY[:4], REPLY[1:5]] * 2
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([72, 105], [[72, 105]]), ([[72], [105]], [[72], [105]]), (["H", "i"], ["H", "i"])],
)
async def test_prompt_forms(client, llm, prompt, expected):
    await create(client, prompt=prompt)
    assert sorted(map(str, (seen.prompt for seen in llm.seen))) == sorted(map(str, expected))


async def test_stop_strings(client):
    answer = await create(client, stop="quick", max_tokens=40)
    assert answer.choices[0].text == "the "
    assert answer.choices[0].finish_reason == "stop"


async def test_same_seed_same_text(client):
    first, second, other = [(await create(client, seed=seed)).choices[0].text for seed in (5, 5, 6)]
    assert first == second != other


async def streamed(client, **fields):
    return [chunk async for chunk in await create(client, stream=True, **fields)]


async def test_stream_adds_up_to_the_plain_answer(client):
    chunks = await streamed(client, max_tokens=9)
    assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY[:9]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 3
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_stream_of_several_prompts_and_n(client):
    chunks = await streamed(client, prompt=["a", "b"], n=2, max_tokens=6)
    texts = dict.fromkeys(range(4), "")
    ends = []
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends.append(choice.index)
    assert texts == {0: REPLY[:6], 1: REPLY[1:7], 2: REPLY[:6], 3: REPLY[1:7]}
    assert sorted(ends) == [0, 1, 2, 3]


async def test_stream_usage_comes_last_and_only_there(client):
    chunks = await streamed(client, max_tokens=4, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_stream_ends_with_done_and_has_usage_null_in_the_middle(http):
    body = {"model": "fake", "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    response = await http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert '"usage":null' in events[0]


async def test_a_text_about_numbers_that_are_no_json(client, llm):
    await create(client, prompt="NaN, Infinity")
    assert llm.seen[0].prompt == "NaN, Infinity"


async def test_logprobs(client):
    answer = await create(client, max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["t", "h", "e"]
    assert logprobs.token_logprobs == [-0.25] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[0] == {"t": -0.25, "u": -1.0}


async def test_streamed_logprobs_add_up(client):
    plain = (await create(client, max_tokens=7, logprobs=1, echo=True)).choices[0].logprobs
    chunks = await streamed(client, max_tokens=7, logprobs=1, echo=True)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert list(itertools.chain(*(getattr(part, name) for part in parts))) == getattr(plain, name)


async def test_echo_puts_the_prompt_first(client):
    answer = await create(client, echo=True, max_tokens=3, logprobs=1)
    assert answer.choices[0].text == "Hithe"
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["<bos>", "H", "i", "t", "h", "e"]
    assert logprobs.token_logprobs == [None, -0.25, -0.25, -0.25, -0.25, -0.25]
    assert logprobs.top_logprobs[0] is None
    assert logprobs.text_offset == [0, 0, 1, 2, 3, 4]


async def test_echo_of_token_ids(client):
    answer = await create(client, prompt=[BOS, 72, 105], echo=True, max_tokens=1)
    assert answer.choices[0].text == "Hit"


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_scoring(client, llm, stream):
    fields = {"echo": True, "max_tokens": 0, "logprobs": 0, "n": 2}
    if stream:
        choices = [choice for chunk in await streamed(client, **fields) for choice in chunk.choices]
        texts = {index: "".join(c.text for c in choices if c.index == index) for index in (0, 1)}
        assert texts == {0: "Hi", 1: "Hi"}
        assert [c.finish_reason for c in choices].count("length") == 2
        return
    answer = await create(client, **fields)
    assert [choice.text for choice in answer.choices] == ["Hi", "Hi"]
    assert answer.choices[0].logprobs.tokens == ["<bos>", "H", "i"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    assert llm.seen[0].params.max_tokens == 1


@pytest.mark.parametrize("create_answer", ["completions", "chat"])
async def test_answers_say_where_a_connector_keeps_the_kv(client, llm, create_answer):
    async def answer(**fields):
        if create_answer == "chat":
            message = {"role": "user", "content": "Hi"}
            return await client.chat.completions.create(model="fake", messages=[message], **fields)
        return await create(client, **fields)

    assert "kv_transfer_params" not in (await answer()).model_dump()
    llm.kv_transfer_params = {"remote_port": 7000, "blocks": [3, 1]}
    assert (await answer(max_tokens=4)).kv_transfer_params == {"remote_port": 7000, "blocks": [3, 1]}
    chunks = [
        chunk
        async for chunk in await answer(
            max_tokens=4, n=2, stream=True, stream_options={"include_usage": True}
        )
    ]
    told = [chunk for chunk in chunks if hasattr(chunk, "kv_transfer_params")]
    assert [chunk.kv_transfer_params for chunk in told] == [llm.kv_transfer_params]
    assert told == [[chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason][-1]]


@pytest.mark.parametrize("stream", [False, True])
async def test_of_several_prompts_no_kv_transfer_params_are_returned(http, llm, stream):
    llm.kv_transfer_params = {"remote_port": 7000}
    response = await http.post(
        "/v1/completions", json={"model": "fake", "prompt": ["a", "b"], "stream": stream}
    )
    assert response.status_code == 200
    assert "kv_transfer_params" not in response.text


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 1), (10**9, 12)])
async def test_the_choices_of_an_answer_are_made_in_turns_of_the_event_loop(
    http, monkeypatch, num_tokens, most
):
    turn, made, make = 0, Counter(), completions.CompletionChoice

    async def count_turns():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def choice(**fields):
        made[turn] += 1
        return make(**fields)

    monkeypatch.setattr(completions, "CompletionChoice", choice)
    monkeypatch.setattr(completions_call, "TOKENS_PER_TURN", num_tokens)
    counting = asyncio.create_task(count_turns())
    body = {"model": "fake", "prompt": ["a", "b", "c"], "n": 4, "logprobs": 2}
    response = await http.post("/v1/completions", json=body)
    counting.cancel()
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(12))
    assert max(made.values()) == most
