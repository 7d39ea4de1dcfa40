"""openai-agents: a runner with the Responses API, its default."""

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
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
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_default_openai_client(AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0))
set_tracing_disabled(True)
plain = Agent(name="plain", model=MODEL)


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


async def text():
    same((await Runner.run(plain, QUESTION)).final_output, ANSWER)


async def streaming():
    result = Runner.run_streamed(plain, QUESTION)
    events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    streamed([event.delta for event in events if event.type == "response.output_text.delta"])


async def tools():
    called = []

    @function_tool
    def get_weather(city: Literal["Oslo", "Rome"], days: Literal[1, 2, 3]) -> str:
        """Weather of a city."""
        called.append((city, days))
        return "rain"

    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=MAX_TOKENS)
    agent = Agent(name="weather", model=MODEL, tools=[get_weather], model_settings=settings)
    assert (await Runner.run(agent, WEATHER_QUESTION)).final_output, "no answer from the tool's result"
    same(len(called), 1)


async def structured():
    agent = Agent(
        name="weather", model=MODEL, output_type=Weather, model_settings=ModelSettings(max_tokens=MAX_TOKENS)
    )
    same(type((await Runner.run(agent, WEATHER_QUESTION)).final_output), Weather)


async def second_turn():
    first = await Runner.run(plain, QUESTION)
    second = [*first.to_input_list(), {"role": "user", "content": SECOND_QUESTION}]
    same((await Runner.run(plain, second)).final_output, SECOND_ANSWER)
    second = await Runner.run(plain, SECOND_QUESTION, previous_response_id=first.last_response_id)
    same(second.final_output, SECOND_ANSWER)


report(text=text, streaming=streaming, tools=tools, structured_output=structured, second_turn=second_turn)
