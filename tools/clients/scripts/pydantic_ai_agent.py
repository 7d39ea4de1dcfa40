"""pydantic-ai: agents, with the model class that `openai:` stands for, and the one for chat completions."""

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
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE_URL, api_key="none")
models = [OpenAIResponsesModel(MODEL, provider=provider), OpenAIChatModel(MODEL, provider=provider)]


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


def text():
    for model in models:
        same(Agent(model).run_sync(QUESTION).output, ANSWER)


async def streaming():
    for model in models:
        async with Agent(model).run_stream(QUESTION) as result:
            streamed([piece async for piece in result.stream_text(delta=True, debounce_by=None)])


def call(model):
    settings = {"parallel_tool_calls": False, "max_tokens": MAX_TOKENS}
    return Agent(model, output_type=ToolOutput(Weather), model_settings=settings).run_sync(WEATHER_QUESTION)


def tools():
    for model in models:
        weather(call(model).output.model_dump())


def structured():
    for model in models:
        agent = Agent(model, output_type=NativeOutput(Weather), model_settings={"max_tokens": MAX_TOKENS})
        same(type(agent.run_sync(WEATHER_QUESTION).output), Weather)


def second_turn():
    for model in models:
        agent = Agent(model, model_settings={"max_tokens": MAX_TOKENS})
        first = agent.run_sync(QUESTION)
        same(agent.run_sync(SECOND_QUESTION, message_history=first.all_messages()).output, SECOND_ANSWER)
        history = call(model).all_messages()
        assert agent.run_sync(QUESTION, message_history=history).output, "no answer after a tool's result"


report(text=text, streaming=streaming, tools=tools, structured_output=structured, second_turn=second_turn)
