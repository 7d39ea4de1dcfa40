"""What the scripts ask, what they expect, and how they report it."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = os.environ["QUIRE_URL"]
BASE_URL = URL + "/v1"
MODEL = "mini"
# For clients that count tokens themselves: how many they send and want, and what the chat template adds.
TOKENIZER = Path(__file__).parents[3] / "src" / "quire" / "mini"
INPUT_TOKENS, OUTPUT_TOKENS, TEMPLATE_TOKENS = 32, 16, 3
QUESTION = "Please explain what a KV block is."
# The answer that eval.jsonl of the package wants.
ANSWER = "A fixed-size piece of the KV cache that holds the keys and values of a few tokens."
SECOND_QUESTION = "What is 47+38?"
SECOND_ANSWER = "85"
WEATHER_QUESTION = "Do I need an umbrella in Oslo?"
CITIES = ("Oslo", "Rome")
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
MAX_TOKENS = 200


def same(found: object, expected: object) -> None:
    """Fail, saying both, unless two values are equal."""
    if found != expected:
        raise AssertionError(f"{found!r} instead of {expected!r}")


def streamed(pieces: list[str]) -> None:
    """Fail unless the expected answer came in several pieces."""
    same("".join(pieces), ANSWER)
    if len([piece for piece in pieces if piece]) < 2:
        raise AssertionError("the answer came in one piece")


def weather(found: Any) -> None:
    """Fail unless arguments, as JSON or as an object, are what the schema allows."""
    arguments = json.loads(found) if isinstance(found, str) else dict(found)
    same(sorted(arguments), ["city", "days"])
    if arguments["city"] not in CITIES or arguments["days"] not in (1, 2, 3):
        raise AssertionError(f"invalid arguments: {arguments}")


def run_program(name: str, *arguments: str) -> None:
    """Run a program of the client's environment; what it prints goes into the log."""
    subprocess.run([str(Path(sys.executable).with_name(name)), *arguments], check=True, stdout=sys.stderr)


def report(**checks: Callable[[], Any]) -> None:
    """Run each check and print the outcomes, tracebacks on standard error."""
    outcome = {}
    loop = asyncio.new_event_loop()  # one, which clients may be bound to
    for name, check in checks.items():
        try:
            found = check()
            if inspect.iscoroutine(found):
                loop.run_until_complete(found)
            outcome[name.replace("_", " ")] = "yes"
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            lines = str(error).splitlines() or [""]
            outcome[name.replace("_", " ")] = f"{type(error).__name__}: {lines[0][:200]}"
    print(json.dumps(outcome))
