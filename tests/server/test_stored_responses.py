"""Responses that are stored: later turns, generation in the background, and what becomes of them."""

import asyncio
import itertools
import sqlite3

import httpx
import openai
import pytest
from live_server import served
from scripted_llm import CALLS, ScriptedLLM

from quire.config import ServerConfig
from quire.server.app import create_app
from quire.server.responses import handlers
from quire.server.responses.answers import TextDelta, named_event
from quire.server.storage import background, database
from quire.server.storage import response_store as store
from quire.server.storage.response_store import ResponseStore, StoredResponse

PING = {"type": "function", "name": "ping", "parameters": {"type": "object"}}
MODEL = {"model": "fake"}


@pytest.fixture
def llm():
    return ScriptedLLM()


@pytest.fixture(params=["memory", "file"])
def config(request, tmp_path):
    return {} if request.param == "memory" else {"response_store": str(tmp_path / "responses.sqlite")}


def client_of(llm, **config):
    app = create_app(llm, ServerConfig(**config))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture
async def client(llm, config):
    return client_of(llm, **config)


async def test_a_conversation_goes_on_from_a_response(client, llm):
    first = await client.responses.create(**MODEL, input="Hi", tools=[PING], instructions="Be brief.")
    assert first.store is True
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "Warm."}
    llm.reply = "So it is."
    second = await client.responses.create(**MODEL, input=[result], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = [event async for event in await client.responses.create(
        **MODEL, input="Sure?", previous_response_id=second.id, stream=True
    )][-1].response  # fmt: skip
    messages = llm.conversation[0]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "Hi"), ("assistant", "Well."), ("tool", "Warm."), ("assistant", "So it is."),
        ("user", "Sure?"),
    ]  # fmt: skip
    assert messages[1]["tool_calls"][0]["id"] == first.output[1].call_id
    await client.responses.create(**MODEL, input="Really?", previous_response_id=third.id)
    assert len(llm.conversation[0]) == 7


async def test_a_conversation_goes_on_from_a_call_of_any_name(client, llm):
    llm.reply = '<tool_call>{"name": "no such tool!"}</tool_call>'
    first = await client.responses.create(**MODEL, input="Hi", tools=[PING])
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "There is none."}
    await client.responses.create(**MODEL, input=[result], previous_response_id=first.id)
    assert llm.conversation[0][-1]["name"] == "no such tool!"


async def test_what_is_stored_comes_back(client):
    given = await client.responses.create(**MODEL, input="Hi", tools=[PING], metadata={"a": "b"})
    assert (await client.responses.retrieve(given.id)).to_dict() == given.to_dict()
    items = await client.responses.input_items.list(given.id)
    [item] = items.data
    assert (item.type, item.role, item.content) == ("message", "user", "Hi")
    await client.responses.delete(given.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await call(given.id)
    with pytest.raises(openai.NotFoundError, match=given.id):
        await client.responses.create(**MODEL, input="So?", previous_response_id=given.id)


async def test_input_items_come_in_pages(client):
    texts = [f"{number}" for number in range(5)]
    given = [{"role": "user", "content": text} for text in texts]
    response = await client.responses.create(**MODEL, input=given)
    for order, expected in (("asc", texts), ("desc", texts[::-1])):
        page = await client.responses.input_items.list(response.id, limit=2, order=order)
        assert [item.content for item in page.data] == expected[:2]
        assert [item.content async for item in page] == expected
    with pytest.raises(openai.BadRequestError, match="limit"):
        await client.responses.input_items.list(response.id, limit=0)


async def test_items_that_are_referred_to(client, llm, monkeypatch):
    first = await client.responses.create(**MODEL, input="Hi", tools=[PING])
    said, _, call = first.output
    references = [{"type": "item_reference", "id": item.id} for item in (said, call)]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "pong"}
    await client.responses.create(**MODEL, input=[{"role": "user", "content": "Hi"}, *references, result])
    _, turn, answer = llm.conversation[0]
    assert (turn["content"], len(turn["tool_calls"]), answer["name"]) == ("Well.", 1, "ping")
    monkeypatch.setattr(handlers, "MAX_LOOKUPS", 0)
    with pytest.raises(openai.BadRequestError, match="more than 0 responses"):
        await client.responses.create(**MODEL, input=references)
    monkeypatch.undo()
    with pytest.raises(openai.NotFoundError, match="msg_x"):
        await client.responses.create(**MODEL, input=[{"type": "item_reference", "id": "msg_x"}])


async def test_what_is_not_to_be_stored_is_not(client):
    response = await client.responses.create(**MODEL, input="Hi", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_a_server_that_stores_nothing(llm):
    client = client_of(llm, response_store="off")
    response = await client.responses.create(**MODEL, input="Hi")
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(**MODEL, input="Hi", previous_response_id=response.id)
    with pytest.raises(openai.BadRequestError, match="background response must be stored"):
        await client.responses.create(**MODEL, input="Hi", background=True)


async def ended(client, response_id):
    while (response := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0)
    return response


async def test_a_response_in_the_background(client):
    begun = await client.responses.create(**MODEL, input="Hi", tools=[PING], background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    response = await ended(client, begun.id)
    assert (response.status, response.id) == ("completed", begun.id)
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert (await client.responses.cancel(begun.id)).status == "completed"


async def test_one_that_is_cancelled(client, llm):
    begun = await client.responses.create(**MODEL, input="hold", background=True)
    await llm.held.wait()
    assert (await client.responses.retrieve(begun.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="still being generated"):
        await client.responses.create(**MODEL, input="So?", previous_response_id=begun.id)
    assert (await client.responses.cancel(begun.id)).status == "cancelled"
    assert (await client.responses.retrieve(begun.id)).status == "cancelled"
    assert len(llm.aborted) == 1
    other = await client.responses.create(**MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError, match="not generated in the background"):
        await client.responses.cancel(other.id)


async def test_one_that_is_cancelled_at_once_is_stored_and_its_events_end():
    responses, logs = background.BackgroundResponses(), background.EventLogs()
    log = logs.begin("tenant", "resp_1")
    kept = []

    async def work():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            kept.append("cancelled")
        finally:
            logs.end("tenant", "resp_1")

    responses.start("tenant", "resp_1", work())
    await responses.cancel("tenant", "resp_1")
    assert kept == ["cancelled"]
    async with asyncio.timeout(60):
        assert [event async for event in log.after(-1)] == [b":\n\n"]


async def test_one_that_is_deleted_is_cancelled(client, llm):
    begun = await client.responses.create(**MODEL, input="hold", background=True)
    await llm.held.wait()
    await client.responses.delete(begun.id)
    assert len(llm.aborted) == 1
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(begun.id)


@pytest.mark.parametrize(("text", "code"), [("fail", "generation_failed"), ("queue", "queue_full")])
async def test_one_that_fails_says_why(client, text, code):
    begun = await client.responses.create(**MODEL, input=text, background=True)
    response = await ended(client, begun.id)
    assert (response.status, response.error.code) == ("failed", code)


async def collected(stream):
    return [event async for event in stream]


async def test_a_stream_from_the_background(client, llm):
    whole = await collected(
        await client.responses.create(**MODEL, input="Hi", tools=[PING], background=True, stream=True)
    )
    assert [event.type for event in whole[:3]] == [
        "response.created", "response.queued", "response.in_progress",
    ]  # fmt: skip
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    begun, last = whole[0].response, whole[-1]
    assert (begun.status, begun.background, last.type) == ("queued", True, "response.completed")
    plain = await collected(await client.responses.create(**MODEL, input="Hi", tools=[PING], stream=True))
    assert [event.type for event in whole[3:]] == [event.type for event in plain[2:]]
    assert (await client.responses.retrieve(begun.id)).to_dict() == last.response.to_dict()
    for number in (None, 0, 4, len(whole) - 2, len(whole) - 1, 10**6):
        again = {} if number is None else {"starting_after": number}
        events = await collected(await client.responses.retrieve(begun.id, stream=True, **again))
        expected = whole if number is None else whole[number + 1 :]
        assert [event.to_dict() for event in events] == [event.to_dict() for event in expected]


def test_a_client_that_leaves_its_stream_and_comes_back(llm):
    with served(create_app(llm, ServerConfig())) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with client.responses.create(**MODEL, input="hold", background=True, stream=True) as stream:
            response_id = next(iter(stream)).response.id
        assert llm.held_seen.wait(60)
        assert client.responses.retrieve(response_id).status == "in_progress"
        reader = iter(client.responses.retrieve(response_id, stream=True, starting_after=0))
        events = [next(reader)]
        assert client.responses.cancel(response_id).status == "cancelled"
        events += reader
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    assert events[-1].type == "response.output_text.delta"


@pytest.mark.parametrize(("text", "code"), [("fail", "generation_failed"), ("queue", "queue_full")])
async def test_a_stream_from_the_background_that_fails(client, text, code):
    stream = await client.responses.create(**MODEL, input=text, background=True, stream=True)
    *_, error, last = await collected(stream)
    assert (error.type, error.code) == ("error", code)
    assert (last.type, last.response.error.code) == ("response.failed", code)
    stored = await client.responses.retrieve(last.response.id)
    assert (stored.status, stored.error.code) == ("failed", code)


async def test_events_that_are_not_kept(client, llm, monkeypatch):
    plain = await client.responses.create(**MODEL, input="Hi", background=True)
    await ended(client, plain.id)
    with pytest.raises(openai.ConflictError, match="without stream"):
        await client.responses.retrieve(plain.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        await client.responses.retrieve(plain.id, stream=True, starting_after=-1)
    streams = {"background": True, "stream": True}
    ids = []
    for _ in range(2):
        events = await collected(await client.responses.create(**MODEL, input="Hi", **streams))
        ids.append(events[0].response.id)
    size = sum(len(event.to_json(indent=None)) for event in events)
    monkeypatch.setattr(background, "MAX_BYTES", size)
    await collected(await client.responses.create(**MODEL, input="Hi", store=True, **streams))
    for response_id in ids:
        with pytest.raises(openai.ConflictError):
            await client.responses.retrieve(response_id, stream=True)
    await client.responses.delete(ids[0])
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(ids[0], stream=True)


async def test_a_reader_that_is_too_slow_is_told_so(monkeypatch):
    logs = background.EventLogs()
    log = logs.begin("", "resp_1")
    stored_answer = {"output_index": 0, "item_id": "msg_1", "delta": "x" * 100, "logprobs": []}

    def more(first, last):
        deltas = [TextDelta(sequence_number=one, **stored_answer) for one in range(first, last)]
        logs.append(log, map(named_event, deltas))

    more(0, 4)
    reader = log.after(-1)
    assert b'"sequence_number":0' in await anext(reader)
    monkeypatch.setattr(background, "MAX_BYTES", 2 * log.num_bytes // 4)
    more(4, 6)
    assert not log.has_after(2)
    assert log.has_after(3)
    with pytest.raises(store.ApiError, match="without stream"):
        await anext(reader)
    logs.end("", "resp_1")
    assert len(await collected(log.after(3))) == 2
    logs.remove("", "resp_1")
    assert logs.get("", "resp_1") is None


async def test_too_many_in_the_background(client, llm, monkeypatch):
    monkeypatch.setattr(background, "MAX_RUNNING", 1)
    begun = await client.responses.create(**MODEL, input="hold", background=True)
    with pytest.raises(openai.RateLimitError, match="limit"):
        await client.responses.create(**MODEL, input="Hi", background=True)
    await client.responses.cancel(begun.id)
    await client.responses.create(**MODEL, input="Hi", background=True)


async def test_a_file_survives_the_server(llm, tmp_path):
    config = {"response_store": str(tmp_path / "responses.sqlite")}
    first_server = client_of(llm, **config)
    response = await first_server.responses.create(**MODEL, input="Hi")
    begun = await first_server.responses.create(**MODEL, input="hold", background=True)
    await llm.held.wait()
    assert (tmp_path / "responses.sqlite").stat().st_mode & 0o077 == 0
    second = client_of(llm, **config)
    assert (await second.responses.retrieve(response.id)).output_text == CALLS
    lost = await second.responses.retrieve(begun.id)
    assert (lost.status, lost.error.message) == ("failed", "the server has ended while generating it")
    await second.responses.create(**MODEL, input="So?", previous_response_id=response.id)
    assert len(llm.conversation[0]) == 3
    await first_server.responses.cancel(begun.id)


async def test_an_answer_is_not_lost_with_the_store(llm, tmp_path, monkeypatch):
    client = client_of(llm, response_store=str(tmp_path / "missing" / "responses.sqlite"))
    response = await client.responses.create(**MODEL, input="Hi")
    assert (response.status, response.store, response.output_text) == ("completed", False, CALLS)
    with pytest.raises(openai.InternalServerError, match="No such file") as caught:
        await client.responses.create(**MODEL, input="Hi", previous_response_id=response.id)
    assert caught.value.status_code == 503


async def test_a_store_that_never_answers(monkeypatch):
    monkeypatch.setattr(database, "TIMEOUT", 0.0)
    with pytest.raises(store.ApiError, match="within 0 s"):
        await ResponseStore(database.IN_MEMORY, 100).get("", "x")


def stored(number, size, previous=None):
    return StoredResponse(
        id=f"resp_{number}",
        previous=previous,
        input=b"[]",
        output=b"[]",
        answer=b"x" * (size - 4),
        num_items=2,
    )


async def test_the_oldest_make_room_for_the_newest():
    kept = ResponseStore(database.IN_MEMORY, 1000)
    for number in range(5):
        assert await kept.put("a", stored(number, 300))
    await kept.put("b", stored(9, 900))
    assert [await kept.get("a", f"resp_{number}") is not None for number in range(5)] == [
        False, False, True, True, True,
    ]  # fmt: skip
    assert not await kept.put("a", stored(6, 1001))
    assert await kept.get("b", "resp_9") is not None
    assert await kept.get("a", "resp_9") is None
    await kept.close()


async def test_a_conversation_that_is_too_long(monkeypatch):
    monkeypatch.setattr(store, "MAX_TURNS", 3)
    kept = ResponseStore(database.IN_MEMORY, 10_000)
    for previous, number in itertools.pairwise([None, *range(4)]):
        await kept.put("", stored(number, 10, None if previous is None else f"resp_{previous}"))
    assert len(await kept.conversation("", "resp_2", 12)) == 6
    with pytest.raises(store.ApiError, match="more than 3 responses"):
        await kept.conversation("", "resp_3", 100)
    with pytest.raises(store.ApiError, match="more than 11 bytes"):
        await kept.conversation("", "resp_2", 11)
    monkeypatch.setattr(store, "MAX_ITEMS", 5)
    with pytest.raises(store.ApiError, match="more than 5 items"):
        await kept.conversation("", "resp_2", 100)
    await kept.delete("", "resp_1")
    with pytest.raises(store.ApiError, match="no response 'resp_1'"):
        await kept.conversation("", "resp_2", 100)


async def test_a_conversation_that_goes_round_in_a_damaged_file_ends(tmp_path):
    path = tmp_path / "responses.sqlite"
    kept = ResponseStore(str(path), 10_000)
    await kept.put("", stored(1, 10, "resp_2"))
    await kept.put("", stored(2, 10, "resp_1"))
    with pytest.raises(store.ApiError, match="more than 1000 responses"):
        await kept.conversation("", "resp_1", 10_000)
    await kept.close()
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT id FROM responses").fetchall() == [("resp_1",), ("resp_2",)]
