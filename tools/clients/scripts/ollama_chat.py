"""ollama: chat and generate of Ollama's own API."""

from typing import Literal

from checks import (
    ANSWER,
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
asked_forecast = {"role": "user", "content": "Please check the forecast for Berlin."}


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: the city's name
    """
    return '{"temperature": 21}' if city == "Berlin" else '{"error": "no such city"}'


def call():
    message = client.chat(model=MODEL, messages=[asked_forecast], tools=[get_weather]).message
    [called] = message.tool_calls
    return message, called.function


def tools():
    _, function = call()
    same([function.name, function.arguments], ["get_weather", {"city": "Berlin"}])


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
    called, function = call()
    result = {"role": "tool", "tool_name": function.name, "content": get_weather(**function.arguments)}
    answer = client.chat(model=MODEL, messages=[asked_forecast, called, result], tools=[get_weather])
    same(answer.message.content, "It is 21 degrees in Berlin.")


report(text=text, streaming=streaming, tools=tools, structured_output=structured, second_turn=second_turn)
