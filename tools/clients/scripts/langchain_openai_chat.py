"""langchain-openai: ChatOpenAI."""

from typing import Literal

from checks import (
    ANSWER,
    BASE_URL,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    SECOND_ANSWER,
    SECOND_QUESTION,
    WEATHER_QUESTION,
    report,
    same,
    streamed,
    weather,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key="none", max_retries=0)
limited = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key="none", max_retries=0, max_tokens=MAX_TOKENS)


@tool
def get_weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Weather of a city."""
    return f"rain in {city} for {days} days"


def text():
    same(model.invoke(QUESTION).content, ANSWER)


def streaming():
    streamed([chunk.content for chunk in model.stream(QUESTION)])


def tools():
    answer = model.bind_tools([get_weather], tool_choice="any").invoke(WEATHER_QUESTION)
    weather(answer.tool_calls[0]["args"])


def structured():
    class Weather(BaseModel):
        city: Literal["Oslo", "Rome"]
        rain: bool

    same(type(limited.with_structured_output(Weather).invoke(WEATHER_QUESTION)), Weather)


def second_turn():
    question = HumanMessage(QUESTION)
    messages = [question, model.invoke([question]), HumanMessage(SECOND_QUESTION)]
    same(model.invoke(messages).content, SECOND_ANSWER)
    question = HumanMessage(WEATHER_QUESTION)
    called = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke([question])
    result = get_weather.invoke(called.tool_calls[0])
    same(type(result), ToolMessage)
    assert limited.bind_tools([get_weather]).invoke([question, called, result]).content, "no answer"


report(text=text, streaming=streaming, tools=tools, structured_output=structured, second_turn=second_turn)
