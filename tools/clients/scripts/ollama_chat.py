"""ollama: chat and generate of Ollama's own API."""

import json
from typing import Literal

from checks import (
    ANSWER,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    SECOND_ANSWER,
    SECOND_QUESTION,
    URL,
    WEATHER_QUESTION,
    report,
    same,
    streamed,
)
from ollama import Client
from pydantic import BaseModel

client = Client(host=URL)
asked = [{"role": "user", "content": QUESTION}]
asked_weather = {"role": "user", "content": WEATHER_QUESTION}


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: the city's name
    """
    return json.dumps({"city": city, "rain": True})


def text():
    same(client.chat(model=MODEL, messages=asked).message.content, ANSWER)
    same(client.generate(model=MODEL, prompt=QUESTION).response, ANSWER)


def streaming():
    chunks = client.chat(model=MODEL, messages=asked, stream=True)
    streamed([chunk.message.content or "" for chunk in chunks])
    streamed([chunk.response or "" for chunk in client.generate(model=MODEL, prompt=QUESTION, stream=True)])


def structured():
    class Weather(BaseModel):
        city: Literal["Oslo", "Rome"]
        rain: bool

    answer = client.chat(model=MODEL, messages=[asked_weather], format=Weather.model_json_schema())
    Weather.model_validate_json(answer.message.content)


def second_turn():
    first = client.chat(model=MODEL, messages=asked).message
    messages = [*asked, first, {"role": "user", "content": SECOND_QUESTION}]
    same(client.chat(model=MODEL, messages=messages).message.content, SECOND_ANSWER)
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    called = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Oslo")}
    answer = client.chat(
        model=MODEL,
        messages=[asked_weather, called, result],
        tools=[get_weather],
        options={"num_predict": MAX_TOKENS},
    )
    assert answer.message.content, "no answer from the tool's result"


report(text=text, streaming=streaming, structured_output=structured, second_turn=second_turn)
