"""Chat templates: a conversation to the text that the model was trained on, in a sandbox.

Only `quire.models.template_process` renders: the sandbox does not limit time or memory.

Templates are jinja2 with Hugging Face's additions: `raise_exception`, `strftime_now`, `tojson` without HTML
escapes, loop controls, and `{% generation %}` blocks.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from quire.errors import InvalidRequestError

# What a template can raise over messages that it was not written for.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,  # too deep a recursion
)


class ChatTemplate:
    """A compiled template.

    Args:
        source: the jinja2 text.
        special_tokens: names that the template may use, such as bos_token.

    Raises:
        InvalidRequestError: the template is not valid jinja2.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequestError(
                f"the chat template is not valid jinja2: {error}; correct it, or give another "
                "(chat_template)",
                param="messages",
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the text of a conversation; with `add_generation_prompt`, up to where the answer starts.

        `variables` are what else the template may use.

        Raises:
            InvalidRequestError: the template refuses these messages.
        """
        all_variables = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
        }
        try:
            return self._template.render(all_variables)
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` blocks mark the assistant's words for training; here they only show their inside."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it this way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return what is inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
