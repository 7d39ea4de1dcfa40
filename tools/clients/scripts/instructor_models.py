"""instructor: models by tools, which is its default, and by JSON schema."""

from typing import Literal

import instructor
from checks import BASE_URL, MODEL, QUESTION, SECOND_QUESTION, WEATHER_QUESTION, report
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


def client(mode):
    return instructor.from_openai(OpenAI(base_url=BASE_URL, api_key="none", max_retries=0), mode=mode)


def extract(mode, question=WEATHER_QUESTION):
    messages = [{"role": "user", "content": question}]
    return client(mode).create_with_completion(
        model=MODEL, messages=messages, response_model=Weather, max_retries=0
    )


def streaming():
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    found = list(
        client(instructor.Mode.TOOLS).create_partial(
            model=MODEL, messages=messages, response_model=Weather, max_retries=0
        )
    )
    assert len(found) > 1, "it came in one piece"
    Weather.model_validate(found[-1].model_dump())


def tools():
    assert isinstance(extract(instructor.Mode.TOOLS)[0], Weather)


def structured():
    assert isinstance(extract(instructor.Mode.JSON_SCHEMA)[0], Weather)


def second_turn():
    _, completion = extract(instructor.Mode.JSON_SCHEMA)
    first = completion.choices[0].message.model_dump()
    messages = [{"role": "user", "content": QUESTION}, first, {"role": "user", "content": SECOND_QUESTION}]
    found = client(instructor.Mode.TOOLS).create(
        model=MODEL, messages=messages, response_model=Weather, max_retries=0
    )
    assert isinstance(found, Weather)


report(streaming=streaming, tools=tools, structured_output=structured, second_turn=second_turn)
