"""Specification of structured output: a JSON schema, a regular expression, choices or a grammar."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from quire.config import config, knob
from quire.errors import InvalidRequestError

MAX_SCHEMA_BYTES = 65_536  # of a JSON schema, or of all choices together, in UTF-8
MAX_GRAMMAR_BYTES = 16_384  # of a regular expression or a grammar; compiling may cost its length squared
MAX_CHOICES = 1024


@config
class ReasoningParams:
    """Reasoning with which the output may begin; a structure applies to what comes after it.

    Made where the prompt is tokenized. If `is_open`, the output begins within the reasoning, otherwise
    perhaps with `start`; it must if there are `bridge_token_ids`. The reasoning ends with `end`.
    """

    start: str = knob(default="", help="Text before the reasoning.")
    end: str = knob(default="", help="Text after the reasoning.")
    is_open: bool = knob(default=False, help="Whether the prompt ends with the text before it.")
    start_token_ids: tuple[int, ...] = knob(
        default=(), unit="token ids", help="Tokens of the text before it."
    )
    end_token_id: int | None = knob(
        default=None, help="The token that is the text after it. None: it consists of several."
    )
    budget: int | None = knob(
        default=None, unit="tokens", help="Maximum length of the reasoning. None: as long as it gets."
    )
    closing_token_ids: tuple[int, ...] = knob(
        default=(), unit="token ids", help="Tokens that end reasoning whose budget is spent."
    )

    bridge_token_ids: tuple[int, ...] = knob(
        default=(), unit="token ids", help="Tokens that lead from reasoning to what comes after it."
    )

    def __post_init__(self) -> None:
        if (
            not self.end
            or not (self.is_open or (self.start and self.start_token_ids))
            or (self.budget is not None and (self.budget < 0 or not self.closing_token_ids))
        ):
            raise _invalid_structure(
                f"structured_outputs.reasoning has the end {self.end!r:.80}, the budget {self.budget} and "
                f"{len(self.closing_token_ids)} closing tokens; it needs marks, and a budget must be at "
                "least 0 and needs closing tokens"
            )


@config
class StructuredOutputsParams:
    """A grammar that the output must follow: exactly one of the fields, or none but reasoning.

    A schema given as a dict is kept as text. A malformed or too large specification is refused with an
    `InvalidRequestError`; the engine finds out whether it can be compiled.
    """

    json: str | dict[str, Any] | None = knob(
        default=None,
        help="JSON schema, as text or as a dict, that the output must conform to; at most 64 KiB.",
    )
    regex: str | None = knob(
        default=None, help="Regular expression that the whole output must match; at most 16 KiB."
    )
    choice: tuple[str, ...] | None = knob(
        default=None,
        help="Strings of which the output must be one; at most 1,024, of 64 KiB in total.",
    )
    grammar: str | None = knob(
        default=None, help="Context-free grammar, in Lark or GBNF notation; at most 16 KiB."
    )
    reasoning: ReasoningParams | None = knob(
        default=None, help="What may come before; set by the server for models that think."
    )

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURE_KINDS if getattr(self, name) is not None]
        if len(given) != 1 and (given or self.reasoning is None):
            raise _invalid_structure(
                f"structured_outputs has {', '.join(given) or 'no field'}; it must have exactly one of json, "
                "regex, choice and grammar"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(f"structured_outputs.{name}", getattr(self, name), MAX_GRAMMAR_BYTES)

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """What must come after the reasoning; None: anything may."""
        if self.reasoning is None:
            return self
        has_structure = any(getattr(self, name) is not None for name in STRUCTURE_KINDS)
        return dataclasses.replace(self, reasoning=None) if has_structure else None

    @property
    def may_begin_output(self) -> bool:
        """Whether a structure may apply from the first token on."""
        return self.structure is not None and not (self.reasoning is not None and self.reasoning.is_open)


STRUCTURE_KINDS = ("json", "regex", "choice", "grammar")


def _schema_text(schema: Any) -> str:
    """Return a JSON schema as text."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
        _check_text("structured_outputs.json", text, MAX_SCHEMA_BYTES)
        parsed = json.loads(text)
        if text is schema:  # Python reads numbers that are no JSON
            json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise _invalid_structure(f"structured_outputs.json is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise _invalid_structure(
            f"structured_outputs.json is {text[:80]}; a JSON schema must be an object, such as "
            '{"type": "object"}'
        )
    return text


def _choices(given: Any) -> tuple[str, ...]:
    """Return the strings to choose from, each once."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise _invalid_structure(
            f"structured_outputs.choice is {given!r:.80}; it must be a list of at least one string"
        )
    if len(given) > MAX_CHOICES:
        raise _invalid_structure(
            f"structured_outputs.choice holds {len(given)} strings; at most {MAX_CHOICES} fit"
        )
    for choice in given:
        _check_text("a string of structured_outputs.choice", choice, MAX_SCHEMA_BYTES)
    _check_text("structured_outputs.choice", "".join(given), MAX_SCHEMA_BYTES)
    return tuple(dict.fromkeys(given))


def _check_text(name: str, text: Any, max_bytes: int) -> None:
    if not isinstance(text, str):
        raise _invalid_structure(f"{name} is {text!r:.80}; it must be text")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _invalid_structure(
            f"{name} holds a lone surrogate at position {error.start}; it must be valid Unicode"
        ) from error
    if size > max_bytes:
        raise _invalid_structure(f"{name} has {size} bytes in UTF-8; the limit is {max_bytes}")


def _invalid_structure(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="structured_outputs")
