"""dspy: LM by itself, because `mini` does not follow the prompts of adapters."""

from typing import Literal

import dspy
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
    weather,
)
from pydantic import BaseModel

lm = dspy.LM(
    f"openai/{MODEL}", api_base=BASE_URL, api_key="none", cache=False, num_retries=0, max_tokens=MAX_TOKENS
)


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


def said(answer):
    return answer["text"] if isinstance(answer, dict) else answer


def text():
    same(said(lm(QUESTION)[0]), ANSWER)


def tools():
    offered = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
    answer = lm(WEATHER_QUESTION, tools=offered, tool_choice="required", parallel_tool_calls=False)[0]
    weather(answer["tool_calls"][0].function.arguments)


def structured():
    Weather.model_validate_json(said(lm(WEATHER_QUESTION, response_format=Weather)[0]))


def second_turn():
    first = said(lm(QUESTION)[0])
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
        {"role": "user", "content": SECOND_QUESTION},
    ]
    same(said(lm(messages=messages)[0]), SECOND_ANSWER)


report(text=text, tools=tools, structured_output=structured, second_turn=second_turn)
