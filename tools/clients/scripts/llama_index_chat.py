"""llama-index: OpenAILike."""

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
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

llm = OpenAILike(
    model=MODEL, api_base=BASE_URL, api_key="none", is_chat_model=True, is_function_calling_model=True,
    context_window=4096, max_tokens=MAX_TOKENS, max_retries=0,
)  # fmt: skip


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


def get_weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Weather of a city."""
    return f"rain in {city} for {days} days"


def call():
    return llm.chat_with_tools(
        [FunctionTool.from_defaults(get_weather)], user_msg=WEATHER_QUESTION, tool_required=True
    )


def text():
    same(llm.chat([ChatMessage(content=QUESTION)]).message.content, ANSWER)


def streaming():
    streamed([chunk.delta or "" for chunk in llm.stream_chat([ChatMessage(content=QUESTION)])])


def tools():
    weather(llm.get_tool_calls_from_response(call())[0].tool_kwargs)


def structured():
    same(type(llm.as_structured_llm(Weather).complete(WEATHER_QUESTION).raw), Weather)


def second_turn():
    first = llm.chat([ChatMessage(content=QUESTION)]).message
    messages = [ChatMessage(content=QUESTION), first, ChatMessage(content=SECOND_QUESTION)]
    same(llm.chat(messages).message.content, SECOND_ANSWER)
    called = call()
    results = [
        ChatMessage(role="tool", content="rain", additional_kwargs={"tool_call_id": one.tool_id})
        for one in llm.get_tool_calls_from_response(called)
    ]
    messages = [ChatMessage(content=WEATHER_QUESTION), called.message, *results]
    assert llm.chat(messages).message.content, "no answer from the tool's result"


report(text=text, streaming=streaming, tools=tools, structured_output=structured, second_turn=second_turn)
