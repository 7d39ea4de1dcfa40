"""The scheduler's features over HTTP: the real engine on the built-in model behind the real application."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time

import httpx
import openai
import pytest
from live_server import served
from prometheus_client.parser import text_string_to_metric_families

import preloaded
from quire import LLM, AsyncLLM, EngineConfig, SamplingParams, SchedulerConfig
from quire.config import ServerConfig, SpeculationConfig
from quire.server.app import create_app

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "Who is it?"}
PROMPT = "copy: b c d b c d b c d b c d b c d"


def started(config: EngineConfig):
    """Yield an engine that any event loop may use, one after the other."""
    with preloaded.engines():
        llm = AsyncLLM(config)
    asyncio.run(llm.wait_until_ready())
    yield llm
    asyncio.run(llm.shutdown())


@pytest.fixture(scope="module")
def engine():
    scheduler = SchedulerConfig(num_kv_blocks=256, policy="fair")
    speculation = SpeculationConfig(speculative_method="ngram")
    yield from started(EngineConfig(num_threads=1, scheduler=scheduler, speculation=speculation))


@pytest.fixture(scope="module")
def engine_of_one(slow_steps_file):
    """Runs one sequence at a time, a token per second on its clock."""
    scheduler = SchedulerConfig(num_kv_blocks=256, max_num_seqs=1)
    scheduler_cls = "engine_schedulers.SlowSecondPerStep"
    yield from started(EngineConfig(num_threads=1, scheduler=scheduler, scheduler_cls=scheduler_cls))


def client_of(llm: AsyncLLM, **config) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(llm, ServerConfig(**config)))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)


@pytest.fixture
async def http(engine):
    async with client_of(engine) as client:
        yield client


@pytest.fixture
async def http_of_one(engine_of_one):
    async with client_of(engine_of_one) as client:
        yield client


@pytest.fixture
def client(http):
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


async def complete(http, **fields) -> httpx.Response:
    body = {"model": "mini", "prompt": PROMPT, "temperature": 0, **fields}
    headers = {"X-Request-Id": fields.pop("request_id")} if "request_id" in fields else {}
    body.pop("request_id", None)
    return await http.post("/v1/completions", json=body, headers=headers)


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


async def metrics(http) -> dict[tuple[str, ...], float]:
    response = await http.get("/metrics")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


# -- structured output -------------------------------------------------------------------------------------


async def test_an_answer_in_the_form_of_a_schema(client):
    answer = await client.chat.completions.create(
        model="mini",
        messages=[USER],
        max_tokens=200,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    )
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "old"}
    assert len(person["name"]) <= 8
    assert type(person["old"]) is bool


async def test_regular_expressions_and_choices(http):
    regex, choice = await asyncio.gather(
        complete(
            http, structured_outputs={"regex": "[0-9]{3}-[a-f]{1,5}!"}, temperature=1, seed=2, max_tokens=64
        ),
        complete(http, structured_outputs={"choice": ["red", "green"]}, n=3, temperature=1, seed=2),
    )
    assert re.fullmatch("[0-9]{3}-[a-f]{1,5}!", texts(regex)[0])
    assert set(texts(choice)) <= {"red", "green"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_grammar_is_the_clients_fault_and_nobody_elses(http, stream):
    bad, good = await asyncio.gather(
        complete(http, structured_outputs={"regex": "("}, n=2, temperature=1, stream=stream),
        complete(http, max_tokens=8),
    )
    assert bad.status_code == 400, bad.text
    assert bad.json()["error"]["param"] == "structured_outputs"
    assert bad.json()["error"]["type"] == "invalid_request_error"
    assert texts(good) == texts(await complete(http, max_tokens=8))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_outgrows_its_limits_is_the_clients_fault(http, stream):
    properties = {f"p{number}": {"type": "string"} for number in range(600)}  # of which any may be left out
    schema = {"type": "object", "properties": properties}
    response = await complete(http, structured_outputs={"json": schema}, stream=stream)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
    assert "make it smaller" in error["message"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("structured_outputs", {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [500]}),
        ("structured_outputs", {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["yes"]}),
        ("allowed_token_ids", {"allowed_token_ids": [50], "bad_words": ["N"]}),
    ],
)
async def test_constraints_that_leave_no_token_are_the_clients_fault(http, param, fields):
    whole = await complete(http, **fields)
    assert whole.status_code == 400, whole.text
    streamed = await complete(http, stream=True, **fields)  # it may have begun
    last = streamed.text.removesuffix("\n\n").rpartition("data: ")[-1]
    for answer in (whole.text, last):
        error = json.loads(answer)["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert "leave no token to choose" in error["message"]


async def test_a_bad_schema_is_named_as_the_client_named_it(http):
    schema = {"name": "odd", "schema": {"type": "nothing"}}
    response_format = {"type": "json_schema", "json_schema": schema}
    body = {"model": "mini", "messages": [USER], "response_format": response_format}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "response_format"


async def test_an_error_on_the_way_names_the_clients_field_too(http):
    schema = {"name": "word", "schema": {"enum": ["yes"]}}
    response_format = {"type": "json_schema", "json_schema": schema}
    body = {"model": "mini", "messages": [USER], "response_format": response_format, "bad_words": ["es"]}
    for stream in (False, True):
        answer = await http.post("/v1/chat/completions", json={**body, "stream": stream})
        last = answer.text.removesuffix("\n\n").rpartition("data: ")[-1]
        error = json.loads(last)["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
        assert error["message"].startswith("response_format: ")


# -- several sequences of one prompt -----------------------------------------------------------------------


async def test_many_completions_beams_and_options_equal_the_same_offline(http):
    common = {"max_tokens": 12}
    sampled = {"seed": 5, "temperature": 0.9, **common}
    several, best, beams, options = await asyncio.gather(
        complete(http, n=4, **sampled),
        complete(http, n=2, best_of=5, **sampled),
        complete(http, n=2, use_beam_search=True, beam_width=3, length_penalty=0.5, **common),
        complete(http, user="somebody", pin_prefix=60, timeout=600, queue_timeout=600, **common),
    )
    params = [
        SamplingParams(n=4, **sampled),
        SamplingParams(n=2, best_of=5, **sampled),
        SamplingParams(n=2, beam_width=3, length_penalty=0.5, **common),
        SamplingParams(temperature=0.0, **common),
    ]
    with LLM("mini", num_threads=1, num_kv_blocks=256) as offline:
        expected = offline.generate([PROMPT] * 4, params)
    for response, output in zip((several, best, beams, options), expected, strict=True):
        assert texts(response) == [one.text for one in output.outputs]
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == len(output.prompt_token_ids)
        assert usage["completion_tokens"] == sum(len(one.token_ids) for one in output.outputs)
    values = await metrics(http)
    assert values["quire_kv_blocks_leased",] == len(expected[0].prompt_token_ids) // 16, "pinned"
    # Whether drafts pay, and so are made, is measured in time.
    assert values["quire_draft_tokens_total",] >= values["quire_accepted_draft_tokens_total",]
    assert values["quire_requests_awaiting",] == 0


# -- time limits -------------------------------------------------------------------------------------------


async def test_time_that_is_up_before_the_first_token(http_of_one):
    for fields in ({"timeout": 0.5}, {"queue_timeout": 0.5}, {"timeout": 0.5, "stream": True, "n": 2}):
        response = await complete(http_of_one, **{"temperature": 1, **fields})
        assert response.status_code == 504, response.text
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("timeout", "timeout_error")
        assert "timeout" in error["message"]
    values = await metrics(http_of_one)
    assert values["quire_timeouts_total",] == values["quire_requests_finished_total", "timeout"] == 4
    assert values["quire_requests_finished_total", "error"] == 0


async def test_time_that_is_up_in_the_middle(http_of_one):
    limit = {"timeout": 6, "max_tokens": 40, "ignore_eos": True}
    plain = await complete(http_of_one, **limit)
    assert (plain.status_code, plain.json()["error"]["code"]) == (504, "timeout")
    streamed = await complete(http_of_one, stream=True, **limit)
    assert streamed.status_code == 200
    *pieces, last = [event.removeprefix("data: ") for event in streamed.text.split("\n\n") if event]
    assert json.loads(last)["error"]["code"] == "timeout"
    text = "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces)
    (whole,) = texts(await complete(http_of_one, max_tokens=40, ignore_eos=True))
    assert text
    assert whole.startswith(text)


# -- what requests wait for --------------------------------------------------------------------------------


async def test_requests_are_explained_while_they_are_served(engine_of_one, slow_steps):
    async with client_of(engine_of_one, api_key="key") as stranger:
        assert (await stranger.get("/v1/requests")).status_code == 401
        assert (await stranger.get("/v1/requests/cmpl-first")).status_code == 401
    slow_steps.touch()
    async with client_of(engine_of_one) as http:
        runs = asyncio.create_task(complete(http, request_id="a/b", max_tokens=2000, ignore_eos=True))
        await until(http, lambda listed: listed == {"cmpl-a/b": ["running"]})
        waits = asyncio.create_task(complete(http, request_id="c", n=2, prompt=["one", "two"], temperature=1))
        # of a call, 2 * max_num_seqs sequences are in the engine at once
        await until(http, lambda listed: listed.get("cmpl-c") == ["waiting"] * 2)
        state = (await http.get("/v1/requests/cmpl-a/b")).json()
        assert state == {"id": "cmpl-a/b", "object": "request", "state": state["state"]}
        assert state["state"][0].startswith("running: ")
        state = (await http.get("/v1/requests/cmpl-c")).json()
        assert "needs 1 of 1 slots (max_num_seqs), 0 free" in state["state"][0]
        for unknown in ("cmpl-a", "cmpl-a/b/0", "cmpl-c/0", "chatcmpl-c"):
            missing = await http.get(f"/v1/requests/{unknown}")
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "request_not_found"
        for task in (runs, waits):
            task.cancel()
        await asyncio.gather(runs, waits, return_exceptions=True)
        assert (await http.get("/v1/requests")).json() == {"object": "list", "data": [], "has_more": False}


async def until(http, holds) -> None:
    """Look until `holds` is true of the first words of what is listed."""
    async with asyncio.timeout(60):
        while True:
            listed = (await http.get("/v1/requests")).json()["data"]
            if holds({one["id"]: [re.split(r"\W", text)[0] for text in one["state"]] for one in listed}):
                return


async def test_tokens_are_those_of_the_engine(http, engine):
    text = "What is 2+2? " + "A long story. " * 200  # tokenized in a thread
    answer = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    backend = engine.tokenizer.backend
    encoding = backend.encode(text)
    assert answer["tokens"] == encoding.ids
    assert answer["token_strs"] == encoding.tokens
    decoded = await http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert decoded.json()["prompt"] == backend.decode(encoding.ids, skip_special_tokens=False)
    body = {"messages": [USER], "model": engine.info.model}
    counted = (await http.post("/tokenize", json=body)).json()["count"]
    usage = (await http.post("/v1/chat/completions", json={**body, "max_tokens": 1})).json()["usage"]
    assert counted == usage["prompt_tokens"]
    assert (await http.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
    too_many = await http.post("/tokenize", json={"prompt": "Hi " * engine.info.max_model_len})
    assert too_many.json()["error"]["code"] == "context_length_exceeded"
    unknown = await http.post("/detokenize", json={"tokens": [engine.info.vocab_size]})
    assert unknown.json()["error"]["param"] == "tokens"


async def test_an_answer_continues_the_last_message(http, engine):
    name = engine.info.model
    conversation = {"model": name, "messages": [USER, {"role": "assistant", "content": "I am"}]}
    continued = {**conversation, "continue_final_message": True}
    tokens = (await http.post("/tokenize", json=continued)).json()["tokens"]
    assert engine.tokenizer.decode(tokens, skip_special_tokens=False).endswith("I am")
    limits = {"max_tokens": 8, "temperature": 0}
    expected = (await http.post("/v1/completions", json={"model": name, "prompt": tokens, **limits})).json()[
        "choices"
    ][0]["text"]
    answer = (await http.post("/v1/chat/completions", json={**continued, **limits})).json()
    assert answer["choices"][0]["message"]["content"] == expected
    prefilled = (await http.post("/v1/messages", json={**conversation, **limits})).json()
    assert prefilled["content"][0]["text"] == expected
    both = await http.post("/v1/chat/completions", json={**continued, "add_generation_prompt": True})
    assert both.json()["error"]["param"] == "continue_final_message"
    bare = await http.post("/tokenize", json={**conversation, "add_generation_prompt": False})
    whole = await http.post("/tokenize", json=conversation)
    assert whole.json()["tokens"][: bare.json()["count"]] == bare.json()["tokens"]
    assert whole.json()["count"] > bare.json()["count"]


async def test_prompt_logprobs_are_those_of_an_echo(http, engine):
    body = {"model": engine.info.model, "prompt": PROMPT, "max_tokens": 2, "return_token_ids": True}
    fields = {"logprobs": 1, "prompt_logprobs": 3, "echo": True, "temperature": 0}
    [choice] = (await http.post("/v1/completions", json={**body, **fields})).json()["choices"]
    prompt = choice["prompt_token_ids"]
    assert prompt == engine.tokenizer.encode(PROMPT)
    pairs = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
    own = [one[str(token)]["logprob"] for token, one in pairs]
    assert own == choice["logprobs"]["token_logprobs"][1 : len(prompt)]
    assert all(len(one) >= 3 for one in choice["prompt_logprobs"][1:])
    text = engine.tokenizer.decode(choice["token_ids"])
    assert choice["text"].endswith(text)


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 3, "n": 2, "temperature": 1, "seed": 3}, {"max_tokens": 0}]
)
async def test_a_streamed_echo_of_a_prompt_of_several_chunks(http, fields):
    # Longer than what a step computes.
    scored = {"prompt": "copy: " + "the cat " * 400, "echo": True, "logprobs": 1, **fields}
    whole = await complete(http, **scored)
    streamed = await complete(http, stream=True, **scored)
    assert streamed.status_code == 200, streamed.text
    events = [event.removeprefix("data: ") for event in streamed.text.split("\n\n") if event]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    for one in whole.json()["choices"]:
        parts = [choice for choice in choices if choice["index"] == one["index"]]
        assert "".join(part["text"] for part in parts) == one["text"]
        for name, entries in one["logprobs"].items():
            streamed_entries = [part["logprobs"][name] for part in parts if part.get("logprobs")]
            assert list(itertools.chain(*streamed_entries)) == entries


async def test_an_output_of_allowed_tokens_only(http, engine):
    allowed = engine.tokenizer.encode("b c d", add_special_tokens=False)
    body = {"model": engine.info.model, "prompt": PROMPT, "max_tokens": 12, "return_token_ids": True}
    answer = await http.post("/v1/completions", json={**body, "allowed_token_ids": allowed})
    found = answer.json()["choices"][0]["token_ids"]
    assert len(found) == 12
    assert set(found) <= set(allowed)
    few = {"allowed_token_ids": allowed[:1], "min_tokens": 2}
    ending = {**few, "stop_token_ids": allowed[:1]}
    refused = await http.post("/v1/completions", json={**body, **ending})
    assert refused.status_code >= 400
    assert "allowed_token_ids" in refused.json()["error"]["message"]
    unknown = await http.post("/v1/completions", json={**body, "allowed_token_ids": [10**9]})
    assert unknown.json()["error"]["param"] == "allowed_token_ids"


async def test_a_priority_without_priorities_is_ignored_visibly(http, engine):
    body = {"model": engine.info.model, "prompt": PROMPT, "max_tokens": 1, "priority": 1}
    response = await http.post("/v1/completions", json=body)
    assert (response.status_code, response.headers["x-ignored-parameters"]) == (200, "priority")


@pytest.fixture
async def http_over_tcp(engine):
    """Answers come as they are generated, which they do not without a connection."""
    with served(create_app(engine, ServerConfig())) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield client


async def test_times_and_tokens_are_those_that_a_client_measures(http_over_tcp):
    http = http_over_tcp
    windows: list[tuple[float, float]] = []
    num_tokens = 0

    async def timed(number: int) -> None:
        nonlocal num_tokens
        started_at, first = time.perf_counter(), None
        body = {"model": "mini", "prompt": f"{PROMPT} {number}", "max_tokens": 4 + number, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    new = sum(len(one.get("token_ids", ())) for one in json.loads(line[6:])["choices"])
                    first = first or (time.perf_counter() if new else None)
                    num_tokens += new
        windows.append((first - started_at, time.perf_counter() - started_at))

    await asyncio.gather(*map(timed, range(6)))
    found = await metrics(http)

    def total(name: str) -> float:
        return found[f"quire_{name}_sum",]

    assert num_tokens == sum(range(4, 10))
    assert found["quire_generation_tokens_total",] == total("request_generation_tokens") == num_tokens
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time", "request_duration"):
        assert found[f"quire_{name}_seconds_count",] == 6
    first = total("time_to_first_token_seconds")
    assert total("queue_time_seconds") + total("prefill_time_seconds") == pytest.approx(first)
    assert total("queue_time_seconds") > 0
    decode = total("decode_time_seconds")
    assert total("inference_time_seconds") == pytest.approx(total("prefill_time_seconds") + decode)
    assert total("inter_token_latency_seconds") == pytest.approx(decode)
    assert first <= sum(until_first for until_first, _ in windows)
    assert first + decode <= total("request_duration_seconds") + 1e-6
    assert total("request_duration_seconds") <= sum(until_last for _, until_last in windows)


async def test_a_prompt_is_cut_and_echoed_as_it_was_cut(http):
    whole = (await complete(http, max_tokens=1, return_token_ids=True)).json()["choices"][0]
    fields = {"truncate_prompt_tokens": 3, "echo": True, "logprobs": 0, "return_token_ids": True}
    answer = (await complete(http, max_tokens=2, **fields)).json()
    [choice] = answer["choices"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert choice["prompt_token_ids"] == whole["prompt_token_ids"][-3:]
    written = "".join(choice["logprobs"]["tokens"])
    assert written == choice["text"]
    assert PROMPT.endswith("".join(choice["logprobs"]["tokens"][:3]))
    long = await complete(http, prompt="word " * 60_000, max_tokens=5, truncate_prompt_tokens=-1)
    assert long.json()["usage"]["prompt_tokens"] == 4096 - 5
    refused = await complete(http, max_tokens=1, truncate_prompt_tokens=4096)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
