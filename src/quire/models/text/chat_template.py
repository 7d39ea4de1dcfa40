"""Chat templates: a conversation to the text that the model was trained on, in a sandbox.

Only `quire.models.text.template_process` renders: the sandbox does not limit time or memory.

Templates are jinja2 with Hugging Face's additions: `raise_exception`, `strftime_now`, `tojson` without HTML
escapes, loop controls, and `{% generation %}` blocks.

The parts of the text that the client has given are tracked: all text of a conversation is `TracedText`,
and every operation of a template on text passes through the environment here. Where it cannot tell which part
of a new text was given, all of it counts as given.
"""

from __future__ import annotations

import datetime
import functools
import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from quire.errors import InvalidRequestError
from quire.models.text.template_messages import RenderedChat
from quire.models.text.traced_text import (
    TracedText,
    formatted,
    given_runs,
    given_text,
    given_value,
    joined,
    traced,
)

# Errors that a template may raise over unexpected messages.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,  # too deep a recursion
)


_ROLES = frozenset(
    {
        "assistant",
        "developer",
        "environment",
        "function",
        "ipython",
        "model",
        "observation",
        "system",
        "tool",
        "user",
    }
)
"""Roles that are no client's words: templates make tokens of them, such as <|user|>."""


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
            self._template = _Environment().from_string(source)
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
        traces: bool,
    ) -> RenderedChat:
        """Return the text of a conversation; with `add_generation_prompt`, up to where the answer starts.

        `variables` are further variables of the template; with `traces`, the result is a `TracedText`.

        Raises:
            InvalidRequestError: the template refuses these messages.
        """
        try:
            if traces:
                messages = [_given_message(message) for message in messages]
                tools, variables = given_value(tools), given_value(variables)
            all_variables = {
                **self._special_tokens,
                "documents": None,
                **variables,
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
                "tools": tools,
            }
            text = self._template.render(all_variables)
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return RenderedChat(str.__str__(text), given_runs(text))


def _given_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in which all texts count as given, except a role that templates know."""
    role = message.get("role")
    given: dict[str, Any] = given_value(message)
    return {**given, "role": role} if role in _ROLES else given


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` blocks mark the assistant's words for training; here they render their content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it this way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return what is inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Writes code in which the environment concatenates what is between "~"."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("environment.concatenated((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose operations on text track which characters were given."""

    code_generator_class = _CodeGenerator
    concat = staticmethod(joined)
    intercepted_binops = frozenset({"%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
            finalize=_shown,
        )
        self.filters.update({name: _tracing(self.filters[name]) for name in _TEXT_FILTERS})
        self.filters.update(
            format=_format,
            indent=_indent,
            join=_join,
            replace=_replace,
            safe=_safe,
            tojson=_tracing(_to_json),
        )
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def concatenated(self, values: Iterable[Any]) -> str:
        """Return the text of values that are between "~"."""
        return joined(str(_shown(value)) for value in values)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Return left % right."""
        return traced(left) % right if isinstance(left, str) else left % right

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute; of a text, a method that returns text that is traced."""
        if not isinstance(obj, str):
            return super().getattr(obj, attribute)
        if attribute in _TEXT_METHODS:
            return getattr(traced(obj), attribute)
        if attribute not in ("format", "format_map"):
            return super().getattr(obj, attribute)
        fill_in = super().getattr(str.__str__(obj), attribute)
        return lambda *args, **kwargs: formatted(obj, fill_in, args, kwargs)

    def call(
        __self,  # noqa: N805
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the result of a call; text of unknown origin counts as given."""
        if type(__obj) is types.MethodType and type(__obj.__self__) is TracedText:
            kwargs = {name: value for name, value in kwargs.items() if name not in _SCOPES}
            return __obj(*args, **kwargs)  # which traces the text itself
        result = super().call(__context, __obj, *args, **kwargs)
        if type(result) is str and not isinstance(__obj, _OWN_TEXT):
            owner = getattr(__obj, "__self__", None)
            return result if isinstance(owner, _OWNERS_OF_OWN_TEXT) else given_text(result)
        return result


_SCOPES = ("_loop_vars", "_block_vars")  # arguments that are jinja2's
_TEXT_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}

_OWN_TEXT = (jinja2.runtime.Macro, jinja2.runtime.BlockReference, jinja2.utils.Joiner)
_OWNERS_OF_OWN_TEXT = (dict, list, tuple, jinja2.utils.Cycler, jinja2.runtime.LoopContext)
"""What returns text as it is in the template or in its variables, and makes none."""

_TEXT_FILTERS = (
    "capitalize",
    "center",
    "e",
    "escape",
    "filesizeformat",
    "forceescape",
    "lower",
    "pprint",
    "string",
    "striptags",
    "title",
    "trim",
    "truncate",
    "upper",
    "urlencode",
    "urlize",
    "wordwrap",
    "xmlattr",
)
"""Filters that make text; the others return what they get, or parts of it."""

_PLAIN = (str, int, float, bool, type(None))
_SURROUNDINGS = (jinja2.Environment, jinja2.nodes.EvalContext, jinja2.runtime.Context)


def _tracing(text_filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose result counts as given, unless it is traced or from template text only."""

    @functools.wraps(text_filter)
    def tracing(*args: Any, **kwargs: Any) -> Any:
        result = text_filter(*args, **kwargs)
        if not isinstance(result, str) or isinstance(result, TracedText):
            return result
        values = [value for value in (*args, *kwargs.values()) if not isinstance(value, _SURROUNDINGS)]
        return result if all(type(value) in _PLAIN for value in values) else given_text(result)

    return tracing


def _shown(value: Any) -> Any:
    """Return a value as text; that of lists and the like counts as given."""
    if isinstance(value, jinja2.Undefined) or type(value) in _PLAIN or isinstance(value, TracedText):
        return value
    return given_text(str(value))


def _format(value: Any, *args: Any, **kwargs: Any) -> TracedText:
    return traced(str(value)) % (kwargs or args)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Any, d: Any = "", attribute: Any = None) -> TracedText:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return traced(str(d)).join(str(_shown(item)) for item in value)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> TracedText:
    space = width if isinstance(width, str) else " " * width
    lines = traced(str(_shown(s)) + "\n").splitlines()
    indented = [
        space + line if (first if not at else line or blank) else line for at, line in enumerate(lines)
    ]
    return traced("\n").join(indented)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> TracedText:
    return traced(str(_shown(s))).replace(str(old), str(new), -1 if count is None else count)


def _safe(value: Any) -> Any:
    return str(_shown(value))  # nothing is escaped


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
