"""Reading the prompts of `quire generate`: from arguments, a file, or standard input."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequestError

STDIN = Path("-")
ENCODING = "utf-8-sig"  # UTF-8 with or without a byte-order mark


@dataclasses.dataclass(frozen=True, slots=True)
class InputPrompt:
    """A prompt: a text, or the messages of a chat."""

    text: str
    messages: list[dict[str, Any]] | None = None


def read_prompts(arguments: list[str], source: Path | None) -> list[InputPrompt]:
    """Return the prompts given as arguments and in `source`; without either, those of a piped stdin.

    Raises:
        InvalidRequestError: there are no prompts, the file cannot be read, or a line is malformed.
    """
    prompts = [InputPrompt(text) for text in arguments]
    if source is None and not arguments and not sys.stdin.isatty():
        source = STDIN
    if source is not None:
        prompts += _parse_source(source)
    if not prompts:
        raise InvalidRequestError(
            "no prompt; give one as an argument, with --input FILE, or on standard input"
        )
    return prompts


def parse_lines(lines: Iterable[str], name: str) -> list[InputPrompt]:
    """Return one prompt per line that is not blank.

    A line that begins with "{" is a JSON object with a `prompt` (text) or `messages` (a chat).
    """
    return [
        _parse_json(line, f"line {number} of {name}")
        if line.startswith("{")
        else InputPrompt(line.rstrip("\r\n"))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parse_source(source: Path) -> list[InputPrompt]:
    name = "standard input" if source == STDIN else f"--input {source}"
    try:
        if source != STDIN:
            with source.open(encoding=ENCODING) as file:
                return parse_lines(file, name)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding=ENCODING, errors="strict")
        return parse_lines(sys.stdin, name)
    except OSError as error:
        raise InvalidRequestError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not UTF-8: {error}") from None


def _parse_json(line: str, place: str) -> InputPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"{place} is not valid JSON: {error}") from None
    text, messages = record.get("prompt"), record.get("messages")
    if isinstance(text, str) and messages is None:
        return InputPrompt(text)
    if isinstance(messages, list) and text is None and all(isinstance(m, dict) for m in messages):
        return InputPrompt(text=str(messages[-1].get("content", "")) if messages else "", messages=messages)
    raise InvalidRequestError(f"{place} must have either a prompt (a string) or messages (a list of objects)")
