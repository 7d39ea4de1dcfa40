"""What bodies say of their prompt besides the messages, as the engine gets it."""

import httpx
import pytest
from scripted_llm import ScriptedLLM, ScriptedTokenizer

from quire.config import ServerConfig
from quire.server.app import create_app
from quire.server.wire.leniency import HEADER

USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "It is"}


class ShowingTokenizer(ScriptedTokenizer):
    chat_template_source = "{{ documents }}<think></think>"


@pytest.fixture
def llm():
    llm = ScriptedLLM()
    llm.reply = " so."
    return llm


async def post(http, path, **fields):
    return await http.post(path, json={"model": "fake", **fields})


async def chat(http, **fields):
    return await post(http, "/v1/chat/completions", messages=[USER, BEGUN], **fields)


async def test_nothing_is_said_by_default(http, llm):
    assert (await chat(http)).status_code == 200
    assert (await post(http, "/v1/completions", prompt="Hi")).status_code == 200
    names = {"add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template_kwargs"}
    assert not any(names & seen.options.keys() for seen in llm.seen)


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "add_special_tokens"])
async def test_options_reach_the_engine(http, llm, name):
    assert (await chat(http, **{name: False})).status_code == 200
    assert llm.seen[0].options[name] is False
    response = await post(http, "/tokenize", messages=[USER], **{name: True})
    assert response.status_code == 200
    assert llm.tokenize_options == {name: True}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_part_of_the_prompt(http, llm, path):
    body = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [USER]}
    answer = await post(http, path, **body, truncate_prompt_tokens=-1, truncation_side="right")
    assert answer.status_code == 200
    options = llm.seen[0].options
    assert (options["truncate_prompt_tokens"], options["truncation_side"]) == (-1, "right")
    answer = await post(http, path, **body, truncation_side="left")
    assert answer.headers[HEADER] == "truncation_side"
    assert not {"truncate_prompt_tokens", "truncation_side"} & llm.seen[1].options.keys()
    for wrong in ({"truncate_prompt_tokens": -2}, {"truncate_prompt_tokens": 3, "truncation_side": "up"}):
        assert (await post(http, path, **body, **wrong)).status_code == 400


async def test_truncation_of_responses_has_no_effect(http):
    answer = await post(http, "/v1/responses", input="Hi", truncation="auto")
    assert answer.headers[HEADER] == "truncation"
    assert HEADER not in (await post(http, "/v1/responses", input="Hi", truncation="disabled")).headers


async def test_special_tokens_of_a_text(http, llm):
    assert (await post(http, "/v1/completions", prompt="Hi", add_special_tokens=False)).status_code == 200
    assert llm.seen[0].options["add_special_tokens"] is False


async def test_documents_are_for_the_template(http, llm):
    documents = [{"title": "A", "text": "B"}]
    ignored = await chat(http, documents=documents)
    assert ignored.headers[HEADER] == "documents"
    llm.tokenizer = ShowingTokenizer()
    shown = await chat(http, documents=documents, chat_template_kwargs={"x": 1})
    assert HEADER not in shown.headers
    assert llm.seen[-1].options["chat_template_kwargs"] == {"documents": documents, "x": 1}


async def test_a_strict_server_refuses_documents_without_effect(strict_http):
    response = await chat(strict_http, documents=[{"text": "B"}])
    assert response.json()["error"]["param"] == "documents"


async def test_a_reasoning_that_is_continued_is_no_content():
    llm = ScriptedLLM()
    llm.tokenizer = ShowingTokenizer()
    llm.reply = "hm</think>Yes."
    transport = httpx.ASGITransport(app=create_app(llm, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        body = {"model": "fake", "messages": [USER, {**BEGUN, "content": "<think>So, "}]}
        answer = await post(http, "/v1/chat/completions", continue_final_message=True, **body)
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")


@pytest.mark.parametrize(
    ("messages", "continues"),
    [
        ([USER], None),
        ([USER, BEGUN], True),
        ([USER, {**BEGUN, "content": [{"type": "text", "text": "It is"}]}], True),
        ([USER, {**BEGUN, "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}], None),
    ],
)
async def test_messages_of_anthropics_continue_the_assistants_text(http, llm, messages, continues):
    response = await post(http, "/v1/messages", max_tokens=9, messages=messages)
    assert response.status_code == 200, response.text
    assert llm.seen[0].options.get("continue_final_message") is continues
    assert response.json()["content"] == [{"type": "text", "text": " so."}]
    await post(http, "/v1/messages/count_tokens", messages=messages)
    assert llm.tokenize_options.get("continue_final_message") is continues
