"""The tools of a request, and those that its answer may or must call.

Every protocol translates into this.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidRequestError
from quire.schemas.json_schemas import enforceable_schema
from quire.structured_outputs import MAX_SCHEMA_BYTES

MAX_ENFORCED_BYTES = 4 * MAX_SCHEMA_BYTES  # of the schemas of all tools of a request
TOOL_NAME_PATTERN = r"^[A-Za-z0-9_.:/-]{1,128}$"


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client's.

    Args:
        name: by which it is called.
        description: for the model; "" if there is none.
        parameters: JSON schema of its arguments; empty if any object will do.
        strict: whether arguments must be valid against the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    strict: bool = False

    def enforceable(self, *, closes_objects: bool) -> Tool:
        """Return the tool with a schema that a grammar enforces fully, see `enforceable_schema`.

        Raises:
            InvalidRequestError: it cannot be enforced.
        """
        try:
            parameters = enforceable_schema(self.parameters, closes_objects=closes_objects)
        except ValueError as error:
            raise InvalidRequestError(
                f"the parameters of tool {self.name!r} cannot be enforced: {error}", param="tools"
            ) from None
        return dataclasses.replace(self, parameters=parameters)

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it, which is as OpenAI's API has it."""
        parameters = dict(self.parameters) or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how its answer may use them.

    Args:
        tools: shown to the model.
        callable_names: that it may call.
        must_call: whether the answer is calls and nothing else.
        several: whether it may have several calls.
    """

    tools: tuple[Tool, ...]
    callable_names: frozenset[str]
    must_call: bool = False
    several: bool = True

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [tool for tool in self.tools if tool.name in self.callable_names]

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar must constrain the answer's calls."""
        is_restricted = not self.several or len(self.callable_tools) < len(self.tools)
        return self.must_call or is_restricted or any(tool.strict for tool in self.callable_tools)

    def enforceable(self, *, closes_objects: bool) -> ToolUse:
        """Return the same with schemas that a grammar enforces fully, see `enforceable_schema`.

        Raises:
            InvalidRequestError: a schema cannot be enforced, or they are too large together.
        """
        size = sum(len(json.dumps(tool.parameters)) for tool in self.tools)
        if size > MAX_ENFORCED_BYTES:
            raise InvalidRequestError(
                f"the parameters of the tools have {size} bytes together; {MAX_ENFORCED_BYTES} at most can "
                "be enforced: send fewer tools, or neither tool_choice nor strict",
                param="tools",
            )
        tools = tuple(tool.enforceable(closes_objects=closes_objects) for tool in self.tools)
        return dataclasses.replace(self, tools=tools)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schema of each tool's arguments, by the tool's name."""
        return {tool.name: tool.parameters for tool in self.callable_tools}


def tool_of(tool: Mapping[str, Any]) -> Tool:
    """Return a tool that is described as OpenAI's API does it.

    Raises:
        InvalidRequestError: it is not a function, or malformed.
    """
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise InvalidRequestError(f"a tool is {tool!r:.80}; it must be a function", param="tools")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not re.fullmatch(TOOL_NAME_PATTERN, name):
        raise InvalidRequestError(
            f"a tool has the name {name!r:.80}; it must match {TOOL_NAME_PATTERN}", param="tools"
        )
    if not isinstance(description, str | None):
        raise InvalidRequestError(
            f"tool {name!r} has the description {description!r:.80}; it must be a string", param="tools"
        )
    parameters = checked_parameters(name, function.get("parameters") or {})
    return Tool(name, description or "", parameters, bool(function.get("strict")))


def checked_parameters(name: str, parameters: Any) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments.

    Raises:
        InvalidRequestError: it is no object's, too large, or has a number that JSON has not.
    """
    if not isinstance(parameters, Mapping):
        raise InvalidRequestError(
            f"the parameters of tool {name!r} are {parameters!r:.80}; they must be a JSON schema",
            param="tools",
        )
    if parameters.get("type", "object") != "object":
        raise InvalidRequestError(
            f"the parameters of tool {name!r} have the type {parameters['type']!r:.80}; "
            'arguments are always an object: set it to "object"',
            param="tools",
        )
    if not isinstance(parameters.get("properties", {}), Mapping):
        raise InvalidRequestError(
            f"in the parameters of tool {name!r}, properties must be an object", param="tools"
        )
    if not isinstance(parameters.get("required", []), list):
        raise InvalidRequestError(
            f"in the parameters of tool {name!r}, required must be a list", param="tools"
        )
    try:
        size = len(json.dumps(parameters, allow_nan=False).encode())
    except ValueError:
        raise InvalidRequestError(
            f"the parameters of tool {name!r} have a number above the limit of 1.8e308",
            param="tools",
        ) from None
    except TypeError as error:
        raise InvalidRequestError(
            f"the parameters of tool {name!r} cannot be written as JSON: {error}", param="tools"
        ) from None
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(
            f"the parameters of tool {name!r} have {size} bytes; the limit is {MAX_SCHEMA_BYTES}",
            param="tools",
        )
    return parameters
