"""/api through the real ollama client, with answers that the test writes."""

import importlib
import json

import httpx
import pytest
from scripted_llm import CALLS, ScriptedLLM

from quire.config import ServerConfig
from quire.dialogue.messages import template_messages
from quire.request_output import RequestOutput
from quire.server.app import create_app
from quire.server.ollama.call import Durations
from quire.server.ollama.messages import OllamaMessage, openai_messages

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA},
}
PING = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def ollama():
    return importlib.import_module("ollama")


@pytest.fixture
def llm():
    return ScriptedLLM()


@pytest.fixture
async def client(app, ollama):
    client = ollama.AsyncClient(host="http://localhost", transport=httpx.ASGITransport(app=app))
    yield client
    await client.close()


async def chat(client, **fields):
    return await client.chat(**{"model": "fake", "messages": [USER], **fields})


def lines_of(answer):
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_plain_answer(client, llm):
    llm.reply = "It is warm."
    answer = await chat(client, options={"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1})
    assert (answer.message.role, answer.message.content) == ("assistant", "It is warm.")
    assert answer.message.tool_calls is answer.message.thinking is None
    assert (answer.model, answer.done, answer.done_reason) == ("fake", True, "stop")
    assert (answer.prompt_eval_count, answer.eval_count) == (3, len(llm.reply))
    durations = [answer[name] for name in DURATIONS]
    assert all(isinstance(one, int) and one >= 0 for one in durations)
    params = llm.seen[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.9, 0.1)
    assert params.max_tokens is None


async def test_a_stream_ends_with_what_is_counted(client, llm):
    llm.reply = "It is warm."
    parts = [part async for part in await chat(client, stream=True)]
    assert "".join(part.message.content for part in parts) == llm.reply
    assert len(parts) > 3
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(part.eval_count is None and part.created_at for part in parts[:-1])
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", len(llm.reply))
    assert parts[-1].message.content == ""


async def test_streams_are_the_default_and_any_content_type_will_do(http, llm):
    llm.reply = "It is warm."
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl sends it
    body = json.dumps({"model": "fake", "messages": [USER]})
    lines = lines_of(await http.post("/api/chat", content=body, headers=form))
    assert "".join(line["message"]["content"] for line in lines) == llm.reply
    lines = lines_of(await http.post("/api/generate", json={"model": "fake", "prompt": "Hi", "stream": None}))
    assert "".join(line["response"] for line in lines) == llm.reply
    assert all("message" not in line and "thinking" not in line for line in lines)
    page = {**form, "Origin": "http://elsewhere.example"}
    assert (await http.post("/api/chat", content=body, headers=page)).status_code == 403


async def test_options_and_what_of_them_has_no_effect(http, llm):
    options = {
        "num_predict": 5, "seed": 7, "stop": ["END"], "repeat_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "num_ctx": 4096, "mirostat": 1, "num_gpu": 0,
    }  # fmt: skip
    body = {"model": "fake", "messages": [USER], "options": options, "keep_alive": 0, "surprise": 1}
    answer = await http.post("/api/chat", json=body)
    assert lines_of(answer)[-1]["done_reason"] == "length"
    params = llm.seen[0].params
    assert (params.max_tokens, params.seed, params.stop) == (5, 7, ("END",))
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    assert penalties == (1.1, 0.5, 0.25)
    ignored = answer.headers["X-Ignored-Parameters"].split(", ")
    assert set(ignored) == {
        "surprise", "keep_alive", "options.num_ctx", "options.mirostat", "options.num_gpu",
    }  # fmt: skip


async def test_values_that_ask_for_nothing(client, llm):
    options = {"num_predict": -1, "seed": -1, "top_k": -1, "top_p": 0.0, "stop": [""]}
    await chat(client, options=options, format="", think=False, tools=[])
    params = llm.seen[0].params
    assert (params.max_tokens, params.seed, params.top_k, params.stop) == (None, None, 0, ())
    assert params.is_greedy
    assert params.structured_outputs is None


async def test_text_and_two_calls(client, llm):
    answer = await chat(client, tools=[WEATHER, PING])
    assert answer.message.content == "Well."
    first, second = (call.function for call in answer.message.tool_calls)
    assert (first.name, first.arguments) == ("get_weather", {"city": '}"é'})
    assert (second.name, second.arguments) == ("ping", {})
    messages, tools, _ = llm.conversation
    assert messages == [USER]
    assert tools[0] == WEATHER


async def test_the_clients_own_description_of_a_function(client, llm):
    def ping(host: str, times: int = 1) -> str:
        """Ask a host whether it is there.

        Args:
            host: its name.
            times: how often.
        """

    await chat(client, tools=[ping])
    [tool] = llm.conversation[1]
    assert tool["function"]["name"] == "ping"
    assert set(tool["function"]["parameters"]["properties"]) == {"host", "times"}


@pytest.mark.parametrize("limit", range(1, len(CALLS) + 1, 6))
async def test_a_stream_says_what_the_whole_answer_says(client, limit):
    fields = {"tools": [WEATHER, PING], "options": {"num_predict": limit}}
    whole = await chat(client, **fields)
    parts = [part async for part in await chat(client, stream=True, **fields)]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert calls == list(whole.message.tool_calls or ())
    assert (parts[-1].done_reason, parts[-1].eval_count) == (whole.done_reason, limit)
    assert len(calls) <= CALLS[:limit].count("}}")  # one that was cut off is left out


@pytest.mark.parametrize(
    "arguments", ['{"n": 123456789012345678901234567890}', '{"n": "\\ud800"}', '{"n":\n [1]}']
)
async def test_arguments_that_json_allows(http, llm, arguments):
    llm.reply = f'<tool_call>\n{{"name": "ping", "arguments": {arguments}}}\n</tool_call>'
    body = {"model": "fake", "messages": [USER], "tools": [PING]}
    for stream in (True, False):
        answer = await http.post("/api/chat", json={**body, "stream": stream})
        lines = [json.loads(line) for line in answer.text.splitlines()]
        [call] = [call for line in lines for call in line["message"].get("tool_calls", ())]
        assert call["function"] == {"index": 0, "name": "ping", "arguments": json.loads(arguments)}


async def test_a_second_turn_with_what_the_client_got(client, llm):
    answer = await chat(client, tools=[WEATHER, PING])
    results = [
        {"role": "tool", "tool_name": "ping", "content": "Here."},
        {"role": "tool", "tool_name": "get_weather", "content": "Warm."},
    ]
    await chat(client, messages=[USER, answer.message, *results], tools=[WEATHER, PING])
    _, said, ping, weather = llm.conversation[0]
    assert said["content"] == "Well."
    ids = [call["id"] for call in said["tool_calls"]]
    assert said["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": '}"é'}}
    assert ping == {"role": "tool", "tool_call_id": ids[1], "name": "ping", "content": "Here."}
    assert weather == {"role": "tool", "tool_call_id": ids[0], "name": "get_weather", "content": "Warm."}


def rendered(*messages):
    return template_messages(openai_messages([OllamaMessage(**message) for message in messages]), None)


def test_results_belong_to_calls_by_id_by_name_or_by_order():
    calls = [{"function": {"name": name, "arguments": {}}} for name in "abab"]
    calls[3]["id"] = "mine"
    said = {"role": "assistant", "tool_calls": calls}
    by_id = {"role": "tool", "content": "", "tool_call_id": "mine"}
    by_name = {"role": "tool", "content": "", "name": "b"}
    by_order = {"role": "tool", "content": ""}
    found = rendered(said, by_id, by_name, by_order, by_order, by_order, by_name)[1:]
    assert [(one.get("tool_call_id"), one.get("name")) for one in found] == [
        ("mine", "b"), ("call00002", "b"), ("call00001", "a"), ("call00003", "a"), (None, None), (None, "b"),
    ]  # fmt: skip


async def test_a_reasoning(client, llm):
    llm.tokenizer.chat_template_source += "<think>{% if enable_thinking %}{{ reasoning_effort }}"
    llm.reply = "<think>\nHm.\n</think>\n\nWarm."
    answer = await chat(client)
    assert (answer.message.thinking, answer.message.content) == ("Hm.", "Warm.")
    parts = [part async for part in await chat(client, stream=True, think=True)]
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    assert "".join(part.message.content for part in parts) == "Warm."
    assert llm.seen[-1].options["chat_template_kwargs"] == {"enable_thinking": True}
    answer = await client.generate(model="fake", prompt="Hi", think="low")
    assert (answer.thinking, answer.response) == ("Hm.", "Warm.")
    kwargs = llm.seen[-1].options["chat_template_kwargs"]
    assert kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    answer = await chat(client, think=False)
    assert (answer.message.thinking, answer.message.content) == (None, "Warm.")
    assert llm.seen[-1].options["chat_template_kwargs"] == {"enable_thinking": False}
    await chat(client, messages=[USER, {"role": "assistant", "content": "A", "thinking": "B"}, USER])
    assert llm.conversation[0][1]["reasoning_content"] == "B"


@pytest.mark.parametrize("think", [True, "high"])
async def test_a_model_that_cannot_think(http, strict_http, think):
    body = {"model": "fake", "messages": [USER], "think": think}
    assert (await http.post("/api/chat", json=body)).headers["X-Ignored-Parameters"] == "think"
    assert "think" in (await strict_http.post("/api/chat", json=body)).json()["error"]


async def test_a_form_of_the_answer(client, llm):
    await chat(client, format="json")
    assert json.loads(llm.seen[0].params.structured_outputs.json) == {"type": "object"}
    await client.generate(model="fake", prompt="Hi", format=SCHEMA)
    assert json.loads(llm.seen[1].params.structured_outputs.json) == SCHEMA


async def test_log_probabilities(client, llm):
    llm.reply = "Warm."
    answer = await chat(client, logprobs=True, top_logprobs=2)
    assert [entry.token for entry in answer.logprobs] == list("Warm.")
    assert [len(entry.top_logprobs) for entry in answer.logprobs] == [2] * 5
    assert answer.logprobs[0].logprob == -0.25
    parts = [part async for part in await chat(client, logprobs=True, stream=True)]
    streamed = [entry for part in parts for entry in part.logprobs or ()]
    assert [entry.token for entry in streamed] == list("Warm.")


async def test_a_prompt_with_a_system_message(client, llm):
    llm.reply = "Warm."
    answer = await client.generate(model="fake", prompt="Hi", system="Be brief.")
    assert (answer.response, answer.done_reason) == ("Warm.", "stop")
    assert llm.conversation[0] == [{"role": "system", "content": "Be brief."}, USER]


async def test_a_raw_prompt(client, llm):
    answer = await client.generate(model="fake", prompt="[INST] Hi", raw=True)
    assert answer.response == CALLS
    assert llm.conversation is None
    assert llm.seen[0].prompt == "[INST] Hi"
    llm.tokenizer.chat_template_source = None  # there is no other way
    await client.generate(model="fake", prompt="Once")
    assert (llm.conversation, llm.seen[1].prompt) == (None, "Once")


async def test_a_last_message_of_the_assistants_is_continued(client, llm):
    await chat(client, messages=[USER, {"role": "assistant", "content": "It is"}])
    assert llm.seen[0].options["continue_final_message"] is True
    await chat(client)
    assert "continue_final_message" not in llm.seen[1].options


async def test_nothing_to_answer_is_answered_at_once(client, llm, ollama):
    loaded = await client.generate(model="fake", keep_alive="1h")
    assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")
    assert (await chat(client, messages=[])).done_reason == "load"
    [part] = [part async for part in await client.generate(model="fake", stream=True)]
    assert part.done
    assert llm.seen == []
    with pytest.raises(ollama.ResponseError) as caught:
        await client.generate(model="other")
    assert caught.value.status_code == 404
    llm.dead = "gone"
    with pytest.raises(ollama.ResponseError) as caught:
        await client.generate(model="fake")
    assert caught.value.status_code == 503


@pytest.mark.parametrize("name", ["fake", "fake:latest"])
async def test_names_with_and_without_the_tag_latest(client, name):
    answer = await chat(client, model=name)
    assert answer.model == name
    assert (await client.show(name)).capabilities == ["completion", "tools"]


async def test_the_models_that_are_there(llm, ollama, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "repetition_penalty": 1.1}')
    llm.model_path = tmp_path
    llm.tokenizer.chat_template_source += "<think>"
    names = ("a", "org/b", "c:8b")
    app = create_app(llm, ServerConfig(served_model_name=names))
    async with ollama.AsyncClient(host="http://localhost", transport=httpx.ASGITransport(app=app)) as client:
        listed = (await client.list()).models
        assert [model.model for model in listed] == ["a:latest", "org/b:latest", "c:8b"]
        assert {model.size for model in listed} == {5}
        details = listed[0].details
        assert (details.format, details.family, details.quantization_level) == ("safetensors", "llama", "F32")
        for model in listed:
            assert (await chat(client, model=model.model)).done
        shown = await client.show("c:8b")
        assert shown.modelinfo["llama.context_length"] == llm.info.max_model_len
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.parameters.splitlines() == ["temperature 0.5", "repeat_penalty 1.1"]
        assert shown.template == llm.tokenizer.chat_template_source
        [first, *_] = (await client.ps()).models
        assert (first.context_length, first.size_vram, first.digest) == (256, 0, listed[0].digest)
        assert first.expires_at > listed[0].modified_at
        await llm.sleep("abort")
        assert (await client.ps()).models == []


async def test_what_is_asked_at_the_start(http):
    assert (await http.get("/api/version")).json()["version"].count(".") == 2
    for path in ("/api/version", "/api/tags", "/api/ps"):
        answer = await http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await http.post("/api/show", json={"name": "fake"})).status_code == 200
    assert "name a model" in (await http.post("/api/show", json={})).json()["error"]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("chat", {"messages": [{**USER, "images": ["aGk="]}]}, "text only"),
        ("generate", {"prompt": "Hi", "images": ["aGk="]}, "text only"),
        ("generate", {"prompt": "Hi", "suffix": "there"}, "suffix"),
        ("generate", {"prompt": "Hi", "context": [1, 2]}, "/api/chat"),
        ("generate", {"prompt": "Hi", "template": "{{ .Prompt }}"}, "raw to true"),
        ("generate", {"prompt": "Hi", "system": "Be brief.", "raw": True}, "raw is true"),
        ("chat", {"options": {"temprature": 0}}, "did you mean 'temperature'"),
        ("chat", {"options": {"temperature": -1}}, "options.temperature is -1"),
        ("chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty is 0"),
        ("chat", {"options": {"num_predict": "all"}}, "options.num_predict"),
        ("chat", {"format": "yaml"}, "format is"),
        ("chat", {"format": 3}, "json or a JSON schema"),
        ("chat", {"think": "hard"}, "think is"),
        ("chat", {"think": 3}, "think is 3"),
        ("chat", {"top_logprobs": 3}, "needs logprobs"),
        ("chat", {"tools": [PING, PING]}, "'ping' twice"),
        ("chat", {"mesages": []}, "did you mean 'messages'"),
        ("chat", {"messages": [{**USER, "content": "x" * 300}]}, "max_model_len"),
    ],
)
async def test_refusals(http, path, fields, words):
    answer = await http.post(f"/api/{path}", json={"model": "fake", "messages": [USER]} | fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


async def streamed(client, prompt, parts):
    async for part in await chat(client, messages=[{"role": "user", "content": prompt}], stream=True):
        parts.append(part)


@pytest.mark.parametrize(("prompt", "status"), [("queue", 429), ("crash", 500)])
async def test_errors_have_ollamas_shape(client, ollama, prompt, status):
    with pytest.raises(ollama.ResponseError) as whole:
        await chat(client, messages=[{"role": "user", "content": prompt}])
    with pytest.raises(ollama.ResponseError) as stream:
        await streamed(client, prompt, [])
    assert whole.value.status_code == stream.value.status_code == status
    assert isinstance(whole.value.error, str)
    assert isinstance(stream.value.error, str)


async def test_a_failure_within_a_stream_is_its_last_line(client, ollama):
    parts = []
    with pytest.raises(ollama.ResponseError, match="NaN"):
        await streamed(client, "fail", parts)
    assert parts
    assert not any(part.done for part in parts)


async def test_errors_before_any_endpoint_have_the_shape_of_the_path(llm):
    app = create_app(llm, ServerConfig(api_key="secret"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        body = {"model": "fake", "max_tokens": 9, "messages": [USER]}
        answer = await http.post("/api/chat", json=body)
        assert answer.status_code == 401
        assert isinstance(answer.json()["error"], str)
        assert (await http.post("/v1/messages", json=body)).json()["error"]["type"] == "authentication_error"
        assert (await http.post("/v1/chat/completions", json=body)).json()["error"]["code"]
        key = {"Authorization": "Bearer secret"}
        missing = await http.post("/api/pull", json={}, headers=key)
        assert (missing.status_code, type(missing.json()["error"])) == (404, str)
        wrong = await http.get("/api/chat", headers=key)
        assert (wrong.status_code, type(wrong.json()["error"])) == (405, str)


def test_durations_add_up(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    durations = Durations()
    output = RequestOutput("x", "x", [1], [], first_scheduled_time=100.25)
    durations.observe(output)
    assert durations.fields()["eval_duration"] == 1
    now = 101.0
    output.outputs.append(type("Completion", (), {"token_ids": [1]}))
    durations.observe(output)
    now = 103.0
    durations.observe(output)
    assert durations.fields() == {
        "total_duration": 3_000_000_000,
        "load_duration": 250_000_000,
        "prompt_eval_duration": 750_000_000,
        "eval_duration": 2_000_000_000,
    }
