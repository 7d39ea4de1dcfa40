"""anthropic: messages."""

from typing import Literal

from anthropic import Anthropic
from checks import (
    ANSWER,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    SECOND_ANSWER,
    SECOND_QUESTION,
    URL,
    WEATHER,
    WEATHER_QUESTION,
    report,
    same,
    streamed,
    weather,
)
from pydantic import BaseModel

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
tools = [{"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER}]
asked = [{"role": "user", "content": QUESTION}]
asked_weather = [{"role": "user", "content": WEATHER_QUESTION}]


def text():
    answer = client.messages.create(model=MODEL, max_tokens=MAX_TOKENS, messages=asked)
    same(answer.content[0].text, ANSWER)


def streaming():
    with client.messages.stream(model=MODEL, max_tokens=MAX_TOKENS, messages=asked) as stream:
        streamed(list(stream.text_stream))
        same(stream.get_final_message().content[0].text, ANSWER)


def call():
    return client.messages.create(
        model=MODEL,
        max_tokens=MAX_TOKENS,
        messages=asked_weather,
        tools=tools,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )


def calls():
    weather(next(block for block in call().content if block.type == "tool_use").input)
    with client.messages.stream(
        model=MODEL,
        max_tokens=MAX_TOKENS,
        messages=asked_weather,
        tools=tools,
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as stream:
        weather(stream.get_final_message().content[0].input)


def structured():
    class Weather(BaseModel):
        city: Literal["Oslo", "Rome"]
        rain: bool

    answer = client.messages.parse(
        model=MODEL, max_tokens=MAX_TOKENS, messages=asked_weather, output_format=Weather
    )
    same(type(answer.parsed_output), Weather)


def second_turn():
    first = client.messages.create(model=MODEL, max_tokens=MAX_TOKENS, messages=asked)
    messages = [
        *asked,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": SECOND_QUESTION},
    ]
    answer = client.messages.create(model=MODEL, max_tokens=MAX_TOKENS, messages=messages)
    same(answer.content[0].text, SECOND_ANSWER)
    called = call()
    result = {"type": "tool_result", "tool_use_id": called.content[-1].id, "content": "rain"}
    messages = [
        *asked_weather,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(model=MODEL, max_tokens=MAX_TOKENS, messages=messages, tools=tools)
    assert answer.content[0].text, "no answer from the tool's result"


report(text=text, streaming=streaming, tools=calls, structured_output=structured, second_turn=second_turn)
