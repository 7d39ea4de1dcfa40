"""Tools, tool_choice and tool calls in bodies of chat completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from quire.dialogue.calls.tools import TOOL_NAME_PATTERN, Tool, ToolUse, checked_parameters
from quire.dialogue.messages import MAX_ID_LENGTH, MAX_NAME_LENGTH
from quire.errors import InvalidRequestError, nearest_name
from quire.server.wire.leniency import Ignorable
from quire.server.wire.strict_model import StrictModel

MAX_TOOLS = 128

ToolName = Annotated[str, StringConstraints(pattern=TOOL_NAME_PATTERN)]
CalledName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_LENGTH)]
CallId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID_LENGTH)]


class ToolFunction(StrictModel):
    """A function that the model may call."""

    path_prefix = "tools[].function."

    name: ToolName = Field(description="Letters, digits and _ . : / -; at most 128.")
    description: str | None = Field(None, description="Tells the model what the function does.")
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments, an object; at most 64 KiB as text."
    )
    strict: bool | None = Field(None, description="Enforce the schema.")


class FunctionTool(StrictModel):
    """A tool; functions are the only type."""

    path_prefix = "tools[]."

    type: Literal["function"]
    function: ToolFunction

    def tool(self) -> Tool:
        """Return the tool for the rest of the server.

        Raises:
            InvalidRequestError: the schema is not an object's, too large, or has a number that JSON has not.
        """
        function = self.function
        parameters = checked_parameters(function.name, function.parameters or {})
        return Tool(function.name, function.description or "", parameters, bool(function.strict))


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None
) -> FunctionTool:
    """Convert a tool of another API."""
    function = ToolFunction(name=name, description=description, parameters=parameters, strict=strict)
    return FunctionTool(type="function", function=function)


class FunctionName(StrictModel):
    """The name of one of the tools."""

    path_prefix = "tool_choice.function."

    name: ToolName


class NamedTool(StrictModel):
    """One of the tools."""

    path_prefix = "tool_choice."

    type: Literal["function"]
    function: FunctionName


def named_tool(name: str) -> NamedTool:
    """Convert the choice of a single tool of another API."""
    return NamedTool(type="function", function=FunctionName(name=name))


class AllowedTools(StrictModel):
    """Some of the tools, and whether one of them must be called."""

    path_prefix = "tool_choice.allowed_tools."

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(StrictModel):
    """A choice of some of the tools."""

    path_prefix = "tool_choice."

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "=text"
    if isinstance(value, dict):
        return "=allowed" if value.get("type") == "allowed_tools" else "=named"
    return None


CHOICE_FORMS = Discriminator(
    _choice_form,
    custom_error_type="form",
    custom_error_message="it must be none, auto, required, a function or allowed_tools",
)
"""Forms of a body's tool_choice: tagged `=text`, `=named` or `=allowed`."""

Tools = Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("=text")]
    | Annotated[NamedTool, Tag("=named")]
    | Annotated[AllowedToolsChoice, Tag("=allowed")],
    CHOICE_FORMS,
]


class CalledFunction(StrictModel):
    """A function that the model has called."""

    path_prefix = "messages[].tool_calls[].function."

    name: CalledName
    arguments: str = Field(description="JSON, as the model wrote it.")


class MessageToolCall(StrictModel):
    """A call in an assistant's message."""

    path_prefix = "messages[].tool_calls[]."

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int | None, Ignorable()] = None  # present in streamed calls


def tool_use_of(
    tools: list[FunctionTool] | None, choice: Any, *, parallel_tool_calls: bool | None
) -> ToolUse | None:
    """Return which tools the answer may or must call; None if it calls none.

    Args:
        tools: the body's tools.
        choice: the body's `tool_choice`.
        parallel_tool_calls: the body's value; None: true.

    Raises:
        InvalidRequestError: a tool is unusable or duplicate, or the choice names an unknown one.
    """
    known = tuple(tool.tool() for tool in tools or ())
    names = [tool.name for tool in known]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequestError(f"tools has {twice!r} twice; names must differ", param="tools")
    chosen, must_call = _chosen(choice, names)
    if not chosen:
        return None
    return ToolUse(known, frozenset(chosen), must_call, several=parallel_tool_calls is not False)


def _chosen(choice: Any, names: list[str]) -> tuple[list[str], bool]:
    """Return which tools may be called, and whether one must be."""
    if isinstance(choice, NamedTool):
        return _existing([choice], names), True
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        return _existing(allowed.tools, names), allowed.mode == "required"
    if choice == "required" and not names:
        raise InvalidRequestError(
            "tool_choice requires a tool call, but tools is empty; send tools", param="tool_choice"
        )
    return ([] if choice == "none" else names), choice == "required"


def _existing(chosen: list[NamedTool], names: list[str]) -> list[str]:
    for one in chosen:
        name = one.function.name
        if name not in names:
            hint = nearest_name(name, names) if names else "send tools"
            raise InvalidRequestError(
                f"tool_choice names {name!r}, which is not a tool; {hint}", param="tool_choice"
            )
    return [one.function.name for one in chosen]
