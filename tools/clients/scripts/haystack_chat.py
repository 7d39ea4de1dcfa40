"""haystack: OpenAIChatGenerator."""

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
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

generator = OpenAIChatGenerator(
    model=MODEL, api_base_url=BASE_URL, api_key=Secret.from_token("none"), max_retries=0,
    generation_kwargs={"max_completion_tokens": MAX_TOKENS},
)  # fmt: skip
get_weather = Tool(
    name="get_weather", description="Weather of a city", parameters=WEATHER, function=lambda **_: "rain"
)


def reply(messages, **fields):
    return generator.run(messages, **fields)["replies"][0]


def call():
    return reply([ChatMessage.from_user(WEATHER_QUESTION)], tools=[get_weather],
                 generation_kwargs={"tool_choice": "required", "parallel_tool_calls": False})  # fmt: skip


def text():
    same(reply([ChatMessage.from_user(QUESTION)]).text, ANSWER)


def streaming():
    chunks = []
    reply([ChatMessage.from_user(QUESTION)], streaming_callback=lambda chunk: chunks.append(chunk.content))
    streamed(chunks)


def tools():
    weather(call().tool_calls[0].arguments)


def structured():
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    weather(
        reply([ChatMessage.from_user(WEATHER_QUESTION)], generation_kwargs={"response_format": form}).text
    )


def second_turn():
    question = ChatMessage.from_user(QUESTION)
    messages = [question, reply([question]), ChatMessage.from_user(SECOND_QUESTION)]
    same(reply(messages).text, SECOND_ANSWER)
    called = call()
    result = ChatMessage.from_tool("rain", origin=called.tool_calls[0])
    answer = reply([ChatMessage.from_user(WEATHER_QUESTION), called, result], tools=[get_weather])
    assert answer.text or answer.tool_calls, "no answer from the tool's result"


report(text=text, streaming=streaming, tools=tools, structured_output=structured, second_turn=second_turn)
