"""Body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, Tag
from typing_extensions import override

from quire.dialogue.calls.tools import ToolUse
from quire.errors import InvalidRequestError
from quire.limits import PositiveInt
from quire.request_options import RequestOptions, ShortText
from quire.sampling_params import NumLogprobs, SamplingParams
from quire.server.calls.bodies import ConversationBody, GenerationBody
from quire.server.calls.reasoning import ReasoningEffort, Thinking
from quire.server.calls.response_format import ANY_OBJECT, SchemaName, structure_of_schema
from quire.server.calls.tool_fields import (
    CHOICE_FORMS,
    MAX_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    FunctionTool,
    NamedTool,
    ToolName,
    function_tool,
    named_tool,
    tool_use_of,
)
from quire.server.responses.items import Items, MessageItem
from quire.server.sampling_defaults import SamplingDefaults
from quire.server.wire.leniency import Leniency
from quire.server.wire.other_names import take_other_values
from quire.server.wire.strict_model import Ignored, StrictModel, Unsupported, optional_field, text_or_list
from quire.structured_outputs import StructuredOutputsParams

LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""

ResponseId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
Metadata = Annotated[dict[ShortText, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


class Tool(StrictModel):
    """A function that the model may call; server-side tools are not available."""

    path_prefix = "tools[]."

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments, an object.")
    strict: bool | None = Field(None, description="Enforce the schema.")
    allowed_callers: Ignored = None
    defer_loading: Ignored = None
    output_schema: Ignored = None

    def as_function(self) -> FunctionTool:
        """Return the tool as chat completions describe it."""
        return function_tool(self.name, self.description, self.parameters, strict=self.strict)


class NamedFunction(StrictModel):
    """One of the tools."""

    path_prefix = "tool_choice."

    type: Literal["function"]
    name: ToolName

    def as_choice(self) -> NamedTool:
        """Return it as chat completions have it."""
        return named_tool(self.name)


class AllowedFunctions(StrictModel):
    """Some of the tools, and whether one of them must be called."""

    path_prefix = "tool_choice."

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]

    def as_choice(self) -> AllowedToolsChoice:
        """Return it as chat completions have it."""
        allowed = AllowedTools(mode=self.mode, tools=[tool.as_choice() for tool in self.tools])
        return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("=text")]
    | Annotated[NamedFunction, Tag("=named")]
    | Annotated[AllowedFunctions, Tag("=allowed")],
    CHOICE_FORMS,
]


class TextFormat(StrictModel):
    """The format of the answer's text."""

    path_prefix = "text.format."

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="Only with the type json_schema; at most 64 KiB as text."
    )
    description: str | None = None
    strict: bool | None = Field(None, description="Not used: the schema is always enforced.")

    def params(self) -> StructuredOutputsParams | None:
        """Return the engine's parameters for this format; None for text.

        Raises:
            InvalidRequestError: a schema is missing, unusable, or given with another type.
        """
        if (self.schema_ is not None) != (self.type == "json_schema"):
            problem = "needs" if self.schema_ is None else "does not take"
            raise InvalidRequestError(
                f"text.format.type is {self.type!r}, which {problem} a schema", param="text.format.schema"
            )
        if self.schema_ is not None:
            return structure_of_schema(self.schema_, "text.format.schema")
        return StructuredOutputsParams(json=ANY_OBJECT) if self.type == "json_object" else None


class TextOptions(StrictModel):
    """Format options of the answer's text."""

    path_prefix = "text."

    format: TextFormat | None = None
    verbosity: Ignored = None


class ReasoningOptions(StrictModel):
    """Reasoning options."""

    path_prefix = "reasoning."

    effort: ReasoningEffort | None = Field(
        None, description="Reasoning effort, if the chat template knows efforts; none: no reasoning."
    )
    summary: Ignored = None
    generate_summary: Ignored = None


class StreamOptions(StrictModel):
    """Options of a stream."""

    path_prefix = "stream_options."

    include_obfuscation: Ignored = None


class ResponsesRequest(ConversationBody, GenerationBody):
    """Body of POST /v1/responses."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    background: bool | None = Field(
        None, description="Answer at once and generate later; get the response by its id."
    )
    previous_response_id: ResponseId | None = Field(
        None, description="The stored response that this conversation continues."
    )
    store: bool | None = Field(None, description="Keep the response for later turns. Default: true.")
    input: Annotated[
        Annotated[str, Tag("=text")] | Annotated[Items, Tag("=items")],
        text_or_list("=items", "a string or a list of items"),
    ] = Field(description="The user's message, or the conversation so far.")
    instructions: str | None = Field(None, description="System prompt.")
    max_output_tokens: PositiveInt | None = Field(
        None, description="Maximum number of output tokens. Default: as many as fit."
    )
    temperature: float | None = optional_field(SamplingParams, "temperature")
    top_p: float | None = optional_field(SamplingParams, "top_p")
    top_k: int | None = optional_field(SamplingParams, "top_k")
    seed: int | None = optional_field(SamplingParams, "seed")
    top_logprobs: NumLogprobs | None = Field(
        None, description=f"Number of most likely tokens to also return; needs {LOGPROBS} in include."
    )
    include: Annotated[list[ShortText], Field(max_length=16)] | None = Field(
        None, description=f"{LOGPROBS}: the log-probabilities of the text's tokens. Others have no effect."
    )
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None, description="Tools that the model may call; at most 128."
    )
    tool_choice: ToolChoice | None = Field(
        None, description="Whether tools may or must be called, and which. Default: auto."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls. Default: true."
    )
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled", "auto"] | None = Field(
        None, description="auto has no effect: input that is too long is refused."
    )
    user: ShortText | None = optional_field(RequestOptions, "tenant")
    metadata: (
        Annotated[dict[ShortText, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None
    ) = Field(None, description="Returned with the response.")
    cache_salt: ShortText | None = optional_field(RequestOptions, "cache_salt")
    priority: int | None = optional_field(RequestOptions, "priority")
    max_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    conversation: Unsupported = None
    prompt: Unsupported = None

    @classmethod
    def adapt(cls, values: dict[str, Any], leniency: Leniency) -> None:
        """Convert other servers' values, and report those without effect.

        Input is never truncated, and only log-probabilities can be included.
        """
        take_other_values(values)
        if values.get("truncation") == "auto":
            leniency.ignore("truncation")
        included = values.get("include")
        if isinstance(included, list) and any(one != LOGPROBS for one in included):
            leniency.ignore("include")

    @property
    def items(self) -> list[Any]:
        """The input items; text becomes a user message."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text has log-probabilities."""
        return LOGPROBS in (self.include or ())

    @override
    def tool_use(self) -> ToolUse | None:
        choice = self.tool_choice
        return tool_use_of(
            None if self.tools is None else [tool.as_function() for tool in self.tools],
            choice if choice is None or isinstance(choice, str) else choice.as_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
        )

    @override
    def thinking_options(self) -> Thinking:
        effort = None if self.reasoning is None else self.reasoning.effort
        return Thinking(is_on=None if effort is None else effort != "none", effort=effort)

    @override
    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequestError(f"top_logprobs needs {LOGPROBS} in include", param="top_logprobs")
        form = None if self.text is None else self.text.format
        given: dict[str, Any] = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "logprobs": self.top_logprobs or 0 if self.wants_logprobs else None,
            "structured_outputs": None if form is None else form.params(),
        }
        return defaults.params({name: value for name, value in given.items() if value is not None})

    @override
    def request_options(self) -> dict[str, Any]:
        given = {"tenant": self.user, "cache_salt": self.cache_salt, "priority": self.priority}
        return {name: value for name, value in given.items() if value is not None}
