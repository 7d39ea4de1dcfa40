"""Bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import override

from quire.dialogue.calls.tools import ToolUse
from quire.errors import InvalidRequestError
from quire.limits import PositiveInt, limits_of
from quire.sampling_params import SamplingParams, StopText
from quire.server.anthropic.turns import Message, TextBlocks, ToolUseBlock, openai_messages
from quire.server.calls.bodies import ConversationBody, GenerationBody, PromptOptions
from quire.server.calls.reasoning import Thinking
from quire.server.calls.response_format import structure_of_schema
from quire.server.calls.tool_fields import (
    MAX_TOOLS,
    FunctionTool,
    ToolName,
    function_tool,
    named_tool,
    tool_use_of,
)
from quire.server.sampling_defaults import SamplingDefaults
from quire.server.wire.leniency import Leniency
from quire.server.wire.other_names import take_other_values
from quire.server.wire.strict_model import Ignored, StrictModel, Unsupported, optional_field
from quire.structured_outputs import StructuredOutputsParams


class CustomTool(StrictModel):
    """A tool that the client runs."""

    path_prefix = "tools[]."

    type: Literal["custom"] | None = Field(None, description="Server-side tools are not available.")
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON schema of the input, an object.")
    strict: bool | None = Field(None, description="Enforce the schema.")
    allowed_callers: Ignored = None
    cache_control: Ignored = None
    defer_loading: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None

    def as_function(self) -> FunctionTool:
        """Return the tool as chat completions describe it."""
        return function_tool(self.name, self.description, self.input_schema, strict=self.strict)


class ToolChoice(StrictModel):
    """Whether tools may or must be called, and which."""

    path_prefix = "tool_choice."

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = Field(None, description="Only with the type tool.")
    disable_parallel_tool_use: bool | None = None

    def as_choice(self) -> Any:
        """Return the choice in the form of chat completions.

        Raises:
            InvalidRequestError: a name is missing, or given with another type.
        """
        if (self.name is not None) != (self.type == "tool"):
            problem = "needs" if self.name is None else "does not take"
            raise InvalidRequestError(
                f"tool_choice.type is {self.type!r}, which {problem} a name", param="tool_choice.name"
            )
        if self.name is not None:
            return named_tool(self.name)
        return "required" if self.type == "any" else self.type


class JsonFormat(StrictModel):
    """A JSON schema that the answer must be valid against."""

    path_prefix = "output_config.format."

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="The schema; at most 64 KiB as text.")


class OutputConfig(StrictModel):
    """The format of the answer, and the reasoning effort."""

    path_prefix = "output_config."

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Reasoning effort, if the chat template knows efforts."
    )


class ThinkingConfig(StrictModel):
    """Whether the model reasons before it answers."""

    path_prefix = "thinking."

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: PositiveInt | None = Field(
        None, description="Maximum number of tokens of reasoning; with the type enabled."
    )
    display: Ignored = None


class CountTokensRequest(ConversationBody):
    """Body of POST /v1/messages/count_tokens."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] = Field(
        description="The conversation so far."
    )
    system: TextBlocks | None = Field(None, description="System prompt.")
    tools: Annotated[list[CustomTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None, description="Tools that the model may call; at most 128."
    )
    tool_choice: ToolChoice | None = Field(
        None, description="Whether tools may or must be called, and which. Default: auto."
    )
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="The older name of output_config.format.")
    thinking: ThinkingConfig | None = Field(
        None, description="Whether the model reasons, if its chat template has a switch."
    )
    cache_control: Ignored = None
    context_management: Ignored = None
    mcp_servers: Unsupported = None
    container: Unsupported = None

    @override
    def tool_use(self) -> ToolUse | None:
        choice = self.tool_choice
        return tool_use_of(
            None if self.tools is None else [tool.as_function() for tool in self.tools],
            None if choice is None else choice.as_choice(),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        )

    @override
    def thinking_options(self) -> Thinking:
        effort = None if self.output_config is None else self.output_config.effort
        is_on = None if effort is None else True
        if self.thinking is not None:
            is_on = self.thinking.type != "disabled"
        budget = self.thinking.budget_tokens if is_on and self.thinking is not None else None
        return Thinking(is_on=is_on, effort=effort, is_shown=is_on is not False, budget=budget)

    @override
    def prompt_options(self) -> PromptOptions:
        last = self.messages[-1]
        blocks = last.content if isinstance(last.content, list) else ()
        calls_tools = any(isinstance(block, ToolUseBlock) for block in blocks)
        return PromptOptions(continue_final_message=(last.role == "assistant" and not calls_tools) or None)

    def given_messages(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's form.

        Raises:
            InvalidRequestError: a message has blocks that do not belong there.
        """
        return openai_messages(self.system, self.messages)


class MessagesRequest(CountTokensRequest, GenerationBody):
    """Body of POST /v1/messages."""

    max_tokens: PositiveInt = Field(description="Maximum number of output tokens.")
    stop_sequences: (
        Annotated[
            list[StopText],
            Field(fail_fast=True, max_length=limits_of(SamplingParams)["stop"].bounds["max_length"]),
        ]
        | None
    ) = optional_field(SamplingParams, "stop")
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    temperature: float | None = optional_field(SamplingParams, "temperature")
    top_k: int | None = optional_field(SamplingParams, "top_k")
    top_p: float | None = optional_field(SamplingParams, "top_p")
    inference_geo: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None

    @classmethod
    def adapt(cls, values: dict[str, Any], leniency: Leniency) -> None:
        """Drop values that ask for nothing, and translate those of other servers."""
        take_other_values(values)
        if isinstance(values.get("stop_sequences"), list):
            values["stop_sequences"] = [text for text in values["stop_sequences"] if text != ""]

    @override
    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        given: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "stop": None if self.stop_sequences is None else tuple(self.stop_sequences),
            "structured_outputs": self._structure(),
        }
        return defaults.params({name: value for name, value in given.items() if value is not None})

    @property
    def structure_field(self) -> str:
        """The field that gives the answer's structure."""
        return "output_config.format" if self.output_format is None else "output_format"

    def _structure(self) -> StructuredOutputsParams | None:
        newer = None if self.output_config is None else self.output_config.format
        if newer is not None and self.output_format is not None:
            raise InvalidRequestError(
                "output_config.format and output_format are the same; give one of them", param="output_format"
            )
        form = newer or self.output_format
        return None if form is None else structure_of_schema(form.schema_, f"{self.structure_field}.schema")
