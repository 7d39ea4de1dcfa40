"""smolagents: OpenAIModel, by itself and in a ToolCallingAgent, which requires a call in each step."""

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
from smolagents import ChatMessage, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key="none", max_tokens=MAX_TOKENS)


@tool
def get_weather(city: str, days: int) -> str:
    """Weather of a city.

    Args:
        city: its name
        days: number of days
    """
    return "rain"


get_weather.inputs = {
    "city": {"type": "string", "description": "its name", "enum": WEATHER["properties"]["city"]["enum"]},
    "days": {
        "type": "integer",
        "description": "number of days",
        "enum": WEATHER["properties"]["days"]["enum"],
    },
}


def user(content):
    return ChatMessage(role="user", content=[{"type": "text", "text": content}])


def text():
    same(model([user(QUESTION)]).content, ANSWER)


def streaming():
    streamed([delta.content or "" for delta in model.generate_stream([user(QUESTION)])])


def tools():
    weather(
        model([user(WEATHER_QUESTION)], tools_to_call_from=[get_weather]).tool_calls[0].function.arguments
    )


def structured():
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    weather(model([user(WEATHER_QUESTION)], response_format=form).content)


def second_turn():
    first = model([user(QUESTION)])
    same(model([user(QUESTION), first, user(SECOND_QUESTION)]).content, SECOND_ANSWER)
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=2, verbosity_level=0)
    agent.run(WEATHER_QUESTION)
    errors = [str(step.error) for step in agent.memory.steps if getattr(step, "error", None)]
    same([error for error in errors if "Error code" in error], [])
    assert agent.memory.get_full_steps()[1]["tool_calls"], "the agent called no tool"


report(text=text, streaming=streaming, tools=tools, structured_output=structured, second_turn=second_turn)
