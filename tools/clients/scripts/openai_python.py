"""openai: chat completions, and responses for a second turn."""

import json
from typing import Literal

from checks import (
    ANSWER,
    BASE_URL,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    SECOND_ANSWER,
    SECOND_QUESTION,
    WEATHER,
    WEATHER_QUESTION,
    report,
    same,
    streamed,
    weather,
)
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
asked = [{"role": "user", "content": QUESTION}]
asked_weather = [{"role": "user", "content": WEATHER_QUESTION}]


def text():
    answer = client.chat.completions.create(model=MODEL, messages=asked)
    same(answer.choices[0].message.content, ANSWER)
    same(client.responses.create(model=MODEL, input=QUESTION).output_text, ANSWER)


def streaming():
    chunks = client.chat.completions.create(
        model=MODEL, messages=asked, stream=True, stream_options={"include_usage": True}
    )
    streamed([choice.delta.content or "" for chunk in chunks for choice in chunk.choices])
    events = client.responses.create(model=MODEL, input=QUESTION, stream=True)
    streamed([event.delta for event in events if event.type == "response.output_text.delta"])


def calls():
    answer = client.chat.completions.create(
        model=MODEL, messages=asked_weather, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    return answer.choices[0].message


def tools_of_both():
    weather(calls().tool_calls[0].function.arguments)
    flat = [{"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}]
    answer = client.responses.create(
        model=MODEL,
        input=WEATHER_QUESTION,
        tools=flat,
        tool_choice={"type": "function", "name": "get_weather"},
    )
    weather(next(item for item in answer.output if item.type == "function_call").arguments)
    with client.chat.completions.stream(
        model=MODEL, messages=asked_weather, tools=tools, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        weather(stream.get_final_completion().choices[0].message.tool_calls[0].function.arguments)


def structured():
    class Weather(BaseModel):
        city: Literal["Oslo", "Rome"]
        rain: bool

    answer = client.chat.completions.parse(
        model=MODEL, messages=asked_weather, response_format=Weather, max_tokens=MAX_TOKENS
    )
    same(type(answer.choices[0].message.parsed), Weather)
    same(
        type(client.responses.parse(model=MODEL, input=WEATHER_QUESTION, text_format=Weather).output_parsed),
        Weather,
    )


def second_turn():
    first = client.chat.completions.create(model=MODEL, messages=asked).choices[0].message
    second = {"role": "user", "content": SECOND_QUESTION}
    answer = client.chat.completions.create(model=MODEL, messages=[*asked, first, second])
    same(answer.choices[0].message.content, SECOND_ANSWER)
    kept = client.responses.create(model=MODEL, input=QUESTION)
    answer = client.responses.create(model=MODEL, input=SECOND_QUESTION, previous_response_id=kept.id)
    same(answer.output_text, SECOND_ANSWER)
    called = calls()
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": json.dumps({"rain": True})}
    answer = client.chat.completions.create(
        model=MODEL, messages=[*asked_weather, called, result], tools=tools, max_tokens=MAX_TOKENS
    )
    assert answer.choices[0].message.content, "no answer from the tool's result"


report(
    text=text, streaming=streaming, tools=tools_of_both, structured_output=structured, second_turn=second_turn
)
