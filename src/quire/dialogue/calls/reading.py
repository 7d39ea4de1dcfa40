"""The reader common to all call notations: the text, the tools and the current call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from quire.dialogue.calls.grammar_writing import GrammarWriter
from quire.dialogue.calls.tools import Tool
from quire.dialogue.events import AnswerEvent, ArgumentsDelta, CallBegin, CallEnd
from quire.dialogue.incoming_text import IncomingText, Reading

MAX_NAME_LENGTH = 256  # characters of a tool's name, as a model writes it

_ANYTHING: Mapping[str, Any] = {}
_NAME = re.compile(r"[\w.:/-]+")

Emit = Callable[[str], None]


class NotACallError(Exception):
    """The text does not follow the notation."""


class CallReader:
    """The text, and the call that is being read from it.

    Args:
        text: that the model writes.
        tools: JSON schema of each tool's arguments.
        known_only: whether only calls of `tools` are calls.
        events: not yet emitted; new ones are added.

    Attributes:
        is_open: whether a call has begun and not ended.
        num_calls: begun and ended, except those not yet emitted.
        are_complete: whether all calls that have ended are complete.
        schema: JSON schema of the arguments of the call that has begun.
        types: that a parameter's values may have, by the id of its schema, so that each is searched once.
    """

    def __init__(
        self,
        text: IncomingText,
        tools: Mapping[str, Mapping[str, Any]],
        known_only: bool,
        events: list[AnswerEvent],
    ) -> None:
        self.text = text
        self.is_open = False
        self.num_calls = 0
        self.are_complete = True
        self.schema: Mapping[str, Any] = {}
        self.types: dict[int, frozenset[str]] = {}
        self._tools = tools
        self._known_only = known_only
        self._events = events
        self._has_arguments = False

    def begin(self, name: str) -> None:
        """Begin a call: its name is known.

        Raises:
            NotACallError: there is no such tool, and only calls of known ones are calls.
        """
        if not name or (self._known_only and name not in self._tools):
            raise NotACallError
        self.is_open = True
        self._has_arguments = False
        self.schema = self._tools.get(name, {})
        self._events.append(CallBegin(self.num_calls, name))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that has begun."""
        if text:
            self._has_arguments = True
            self._events.append(ArgumentsDelta(self.num_calls, text))

    def end(self) -> None:
        """End the call, which is complete; one without arguments has an empty object."""
        if not self._has_arguments:
            self.arguments("{}")
        self._end(is_complete=True)

    def cut_off(self) -> None:
        """End the call with the arguments that it has, the answer being cut off."""
        self._end(is_complete=False)

    def take_back(self) -> None:
        """End the malformed call, and drop its events that were not emitted."""
        index = len(self._events)
        while index and isinstance(self._events[index - 1], ArgumentsDelta):
            index -= 1
        self.are_complete = False
        if index and isinstance(self._events[index - 1], CallBegin):
            del self._events[index - 1 :]
            self.is_open = False
        else:
            del self._events[index:]
            self._end(is_complete=False)

    def _end(self, *, is_complete: bool) -> None:
        self._events.append(CallEnd(self.num_calls, is_complete=is_complete))
        self.are_complete &= is_complete
        self.is_open = False
        self.num_calls += 1
        self.text.mark()

    def parameter(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of one of the call's parameters; empty if there is none."""
        properties = self.schema.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else _ANYTHING

    def name(self) -> Reading[str]:
        """Read a name by itself; "" if there is none.

        Raises:
            NotACallError: it is too long to be a name.
        """
        name: str = yield from self.text.whole_run(_NAME, MAX_NAME_LENGTH)
        if len(name) > MAX_NAME_LENGTH:
            raise NotACallError
        return name

    def expect(self, *literals: str) -> Reading[str]:
        """Read one of `literals`, after white space.

        Raises:
            NotACallError: something else comes.
        """
        yield from self.text.skip_space()
        found: str = yield from self.text.match(*literals)
        if not found:
            raise NotACallError
        return found


class CallNotation(Protocol):
    """How calls are written between the marks that begin and end them."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks inside calls; any may be a special token of the model."""

    def read(self, reader: CallReader) -> Reading[None]:
        """Read calls up to what follows them.

        Raises:
            NotACallError: the text is malformed from here on.
        """

    def grammar(self, writer: GrammarWriter, tool: Tool) -> str:
        """Return the expression for one call of a tool, with arguments that are valid for it.

        Raises:
            InvalidRequestError: the notation cannot express what the tool's schema wants.
        """


def json_text(value: Any) -> str:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return text, which may have halves of surrogate pairs, escaped for a JSON string."""
    return json_text(text)[1:-1].encode(errors="backslashreplace").decode()
