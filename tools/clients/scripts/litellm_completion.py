"""litellm: completion, with the provider openai."""

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
from litellm import completion
from pydantic import BaseModel

tools_offered = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]


def complete(messages, **fields):
    return completion(model=f"openai/{MODEL}", api_base=BASE_URL, api_key="none", messages=messages, **fields)


def user(content):
    return {"role": "user", "content": content}


def text():
    same(complete([user(QUESTION)]).choices[0].message.content, ANSWER)


def streaming():
    streamed([chunk.choices[0].delta.content or "" for chunk in complete([user(QUESTION)], stream=True)])


def call():
    answer = complete(
        [user(WEATHER_QUESTION)], tools=tools_offered, tool_choice="required", parallel_tool_calls=False
    )
    return answer.choices[0].message


def tools():
    weather(call().tool_calls[0].function.arguments)


def structured():
    class Weather(BaseModel):
        city: Literal["Oslo", "Rome"]
        rain: bool

    answer = complete([user(WEATHER_QUESTION)], response_format=Weather, max_tokens=MAX_TOKENS)
    Weather.model_validate_json(answer.choices[0].message.content)


def second_turn():
    first = complete([user(QUESTION)]).choices[0].message
    for sent_back in (first, first.model_dump()):
        answer = complete([user(QUESTION), sent_back, user(SECOND_QUESTION)])
        same(answer.choices[0].message.content, SECOND_ANSWER)
    called = call()
    result = {
        "role": "tool",
        "name": "get_weather",
        "tool_call_id": called.tool_calls[0].id,
        "content": "rain",
    }
    answer = complete([user(WEATHER_QUESTION), called, result], tools=tools_offered, max_tokens=MAX_TOKENS)
    assert answer.choices[0].message.content, "no answer from the tool's result"


report(text=text, streaming=streaming, tools=tools, structured_output=structured, second_turn=second_turn)
