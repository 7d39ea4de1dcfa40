"""Bodies of requests: strict pydantic models of what OpenAI's clients send, plus Quire's sampling fields.

A field that is null counts as left out. Fields that OpenAI defines and Quire does not support are declared
with the type `Unsupported`, so that they are refused by name, or as `Ignored` if they change no token; see
`quire.server.wire.leniency` for other names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    create_model,
)
from pydantic_core import PydanticCustomError
from typing_extensions import override

from quire.dialogue.calls.tools import ToolUse
from quire.errors import InvalidRequestError
from quire.limits import NonNegativeInt, PositiveInt, limits_of
from quire.request_options import RequestOptions, ShortText
from quire.sampling_params import (
    MAX_BEAM_WIDTH,
    Bias,
    NumLogprobs,
    NumSequences,
    SamplingParams,
    StopText,
    TokenId,
)
from quire.server.calls.bodies import GenerationBody, PromptFields
from quire.server.calls.reasoning import ReasoningEffort, Thinking
from quire.server.calls.response_format import ResponseFormat, StructuredOutputs
from quire.server.calls.tool_fields import (
    ToolChoice,
    Tools,
    tool_use_of,
)
from quire.server.openai.chat_messages import ChatMessage
from quire.server.sampling_defaults import SamplingDefaults
from quire.server.wire.leniency import Ignorable, Leniency
from quire.server.wire.other_names import NAMES_IN_CHATS, NAMES_IN_COMPLETIONS, take_other_values
from quire.server.wire.strict_model import (
    Ignored,
    JsonObject,
    StrictModel,
    Unsupported,
    body_fields,
    optional_field,
    text_or_list,
)

MAX_PROMPTS = 1024
MAX_LOGIT_BIASES = 1024
DEFAULT_COMPLETION_TOKENS = 16
_OTHERWISE_IN_BODIES = (  # in another form, or in only one of the bodies
    "bad_words_token_ids",
    "best_of",
    "logit_bias",
    "logprobs",
    "stop",
    "structured_outputs",
)

TokenIdText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]


def prompt_form(value: Any) -> str | None:
    """Return the tag of the form that a prompt, or several, is given in; None: of none."""
    if isinstance(value, str):
        return "=text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "=token_lists"
    return "=texts" if isinstance(first, str) else "=tokens"


TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
PromptForms = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("=texts")]
    | Annotated[TokenIds, Tag("=tokens")]
    | Annotated[
        list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("=token_lists")
    ],
    Discriminator(
        prompt_form,
        custom_error_type="form",
        custom_error_message="it must be text, token ids, or a list of either",
    ),
]
Stop = Annotated[
    Annotated[StopText, Tag("=text")]
    | Annotated[
        list[StopText],
        Field(fail_fast=True, max_length=limits_of(SamplingParams)["stop"].bounds["max_length"]),
        Tag("=texts"),
    ],
    text_or_list("=texts", "a string or a list of strings"),
]


def _few_enough(biases: Any) -> Any:
    """Check the size before the items, of which there may be a million."""
    if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIASES:
        raise PydanticCustomError("too_long", f"it may have at most {MAX_LOGIT_BIASES} entries")
    return biases


LogitBias = Annotated[
    dict[TokenIdText, Bias], Field(max_length=MAX_LOGIT_BIASES), BeforeValidator(_few_enough)
]


class StreamOptions(StrictModel):
    """What a stream contains besides the text."""

    path_prefix = "stream_options."

    include_usage: bool | None = Field(None, description="Send a final event with the token usage.")
    continuous_usage_stats: bool | None = Field(
        None,
        description="Send the usage so far with every event, and the total in a final event.",
    )
    include_obfuscation: Annotated[Literal[False] | None, Ignorable()] = Field(
        None, description="Padding is never added."
    )


_OPTIONS = body_fields(RequestOptions, exclude=("tenant", "tenant_weight"))
_OptionFields = create_model("_OptionFields", __base__=GenerationBody, **_OPTIONS)


class OptionFields(_OptionFields):  # type: ignore[valid-type, misc]
    """Options of a request whose answer may be a stream."""

    stream: bool | None = Field(None, description="Send tokens as server-sent events as they are generated.")
    stream_options: StreamOptions | None = Field(None, description="Options for streaming; needs stream.")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event that carries the usage.

        Raises:
            InvalidRequestError: `stream_options` without `stream`.
        """
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
        return bool(self.stream_options.include_usage) or self.includes_usage_so_far

    @property
    def includes_usage_so_far(self) -> bool:
        """Whether each event of a stream carries the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @override
    def request_options(self) -> dict[str, Any]:
        return {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}


_PARAMETERS = body_fields(SamplingParams, exclude=_OTHERWISE_IN_BODIES)
_ParameterFields = create_model("_ParameterFields", __base__=StrictModel, **_PARAMETERS)


class SharedSamplingFields(_ParameterFields):  # type: ignore[valid-type, misc]
    """Sampling parameters that have one form in all bodies."""

    logit_bias: LogitBias | None = optional_field(SamplingParams, "logit_bias")
    structured_outputs: StructuredOutputs | None = optional_field(SamplingParams, "structured_outputs")

    @classmethod
    def adapt(cls, values: dict[str, Any], leniency: Leniency) -> None:
        """Convert other servers' values for which Quire has another form."""
        take_other_values(values)

    def sampling_fields(self) -> dict[str, Any]:
        """Return the given fields that have the same name in `SamplingParams`."""
        names = limits_of(SamplingParams)
        given = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.structured_outputs is not None:
            given["structured_outputs"] = self.structured_outputs.params()
        return given


class GenerationRequest(SharedSamplingFields, OptionFields):
    """Fields that completions and chat share."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    stop: Stop | None = optional_field(SamplingParams, "stop")
    use_beam_search: bool | None = Field(
        None,
        description="Use beam search with beam_width beams. If beam_width is not given: best_of or n beams.",
    )
    user: ShortText | None = optional_field(RequestOptions, "tenant")
    return_token_ids: bool | None = Field(
        None, description="Return the token ids of the prompt and of the output."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Name tokens in log-probabilities by their ids, as token_id:5."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None,
        description="Number of prompt tokens to keep; -1: as many as fit beside max_tokens. Default: all.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which side truncate_prompt_tokens cuts off. Default: left."
    )

    @classmethod
    def adapt(cls, values: dict[str, Any], leniency: Leniency) -> None:
        """Drop what has no effect in this body, besides what all bodies convert."""
        super().adapt(values, leniency)
        if values.get("stream_options") is not None and not values.get("stream"):
            del values["stream_options"]
            leniency.ignore("stream_options")
        if values.get("truncate_prompt_tokens") is None and values.pop("truncation_side", None) is not None:
            leniency.ignore("truncation_side")

    @property
    def only_scores_prompt(self) -> bool:
        """Whether the prompt is to be echoed with nothing after it."""
        return False

    @override
    def request_options(self) -> dict[str, Any]:
        options = super().request_options()
        return options if self.user is None else {**options, "tenant": self.user}

    def checked_params(self, fields: dict[str, Any], defaults: SamplingDefaults) -> SamplingParams:
        """Return the sampling parameters: those given, and defaults for the others.

        Raises:
            InvalidRequestError: a value is out of range, two contradict each other, or a stream is asked for
                with completions that are only known once all have ended.
        """
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "stream is true, but prompt_logprobs are only in whole answers; set stream to false",
                param="stream",
            )
        if self.use_beam_search:
            fields.setdefault("beam_width", fields.pop("best_of", fields.get("n", 1)))
            if not 2 <= fields["beam_width"] <= MAX_BEAM_WIDTH:
                raise InvalidRequestError(
                    f"use_beam_search with {fields['beam_width']} beams; set beam_width to a number from "
                    f"2 to {MAX_BEAM_WIDTH}",
                    param="use_beam_search",
                )
        elif self.use_beam_search is False and self.beam_width:
            raise InvalidRequestError(
                f"use_beam_search is false, but beam_width is {self.beam_width}", param="use_beam_search"
            )
        params = defaults.params(fields)
        if self.stream and params.is_ranked:
            kind = "beam search" if params.beam_width else f"best_of {params.best_of} above n {params.n}"
            raise InvalidRequestError(
                f"stream is true, but with {kind} no text is known before the end; set stream to false",
                param="stream",
            )
        return params


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    names_of_other_servers = NAMES_IN_COMPLETIONS

    prompt: PromptForms = Field(description="Text or token ids to continue, one or several.")
    max_tokens: NonNegativeInt | None = Field(
        None,
        description="Maximum number of output tokens; 0 only with echo. "
        f"Default: {DEFAULT_COMPLETION_TOKENS}.",
    )
    best_of: NumSequences | None = optional_field(SamplingParams, "best_of")
    echo: bool | None = Field(
        None, description="Put the prompt in front of the text. With max_tokens 0: return only the prompt."
    )
    logprobs: NumLogprobs | None = optional_field(SamplingParams, "logprobs")
    add_special_tokens: bool | None = Field(
        None, description="Add the model's special tokens to a text. Default: true."
    )
    suffix: Unsupported = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # a list whose first item is an int holds ints
        return self.prompt  # type: ignore[return-value]

    @property
    def only_scores_prompt(self) -> bool:
        """Whether the prompt is to be echoed with nothing after it."""
        return bool(self.echo) and self.max_tokens == 0

    @override
    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        fields = self.sampling_fields()
        fields.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
        if self.only_scores_prompt:
            fields["max_tokens"] = 1  # the engine samples at least one token; it is dropped
            fields.pop("min_tokens", None)
        elif self.max_tokens == 0:
            raise InvalidRequestError(
                "max_tokens is 0; it must be at least 1, or echo must be true", param="max_tokens"
            )
        if self.logprobs is not None and self.echo:
            fields["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self.checked_params(fields, defaults)


class ChatCompletionRequest(PromptFields, GenerationRequest):
    """Body of POST /v1/chat/completions."""

    names_of_other_servers = NAMES_IN_CHATS

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] = Field(
        description="The conversation so far."
    )
    max_completion_tokens: PositiveInt | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Return the log-probabilities of the answer's tokens.")
    top_logprobs: NumLogprobs | None = Field(
        None, description="Number of most likely tokens to also return; needs logprobs."
    )
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    service_tier: Annotated[Literal["auto", "default"] | None, Ignorable()] = None
    store: Annotated[Literal[False] | None, Ignorable()] = None
    tools: Tools | None = Field(None, description="Tools that the model may call; at most 128.")
    tool_choice: ToolChoice | None = Field(
        None, description="Whether tools may or must be called, and which. Default: auto."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls. Default: true."
    )
    chat_template_kwargs: JsonObject | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="Reasoning effort, if the chat template knows efforts; none: no reasoning."
    )
    thinking_token_budget: NonNegativeInt | None = Field(
        None, description="Maximum number of reasoning tokens, after which the answer begins."
    )
    include_reasoning: bool | None = Field(
        None, description="Return the reasoning as reasoning_content. Default: true."
    )
    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    metadata: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    verbosity: Ignored = None
    web_search_options: Unsupported = None

    @classmethod
    def adapt(cls, values: dict[str, Any], leniency: Leniency) -> None:
        """Let max_completion_tokens override max_tokens, and top_logprobs imply logprobs."""
        super().adapt(values, leniency)
        if values.get("top_logprobs") is not None and values.get("logprobs") is None:
            values["logprobs"] = True
        if values.get("max_completion_tokens") is not None:
            older = values.pop("max_tokens", None)
            if older is not None and older != values["max_completion_tokens"]:
                leniency.ignore("max_tokens")

    @override
    def tool_use(self) -> ToolUse | None:
        return tool_use_of(self.tools, self.tool_choice, parallel_tool_calls=self.parallel_tool_calls)

    def given_messages(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's form."""
        return [message.as_given() for message in self.messages]

    @override
    def thinking_options(self) -> Thinking:
        return Thinking(
            is_on=None if self.reasoning_effort is None else self.reasoning_effort != "none",
            effort=self.reasoning_effort,
            template_kwargs=self.chat_template_kwargs or {},
            budget=self.thinking_token_budget,
            is_shown=self.include_reasoning is not False,
        )

    @override
    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        fields = self.sampling_fields()
        structure = None if self.response_format is None else self.response_format.params()
        if structure is not None:
            if "structured_outputs" in fields:
                raise InvalidRequestError(
                    "response_format and structured_outputs both constrain the output; give one of them",
                    param="response_format",
                )
            fields["structured_outputs"] = structure
        newer = self.max_completion_tokens
        if newer is not None:
            if self.max_tokens is not None and self.max_tokens != newer:
                raise InvalidRequestError(
                    f"max_tokens is {self.max_tokens} and max_completion_tokens {newer}; give one of them",
                    param="max_tokens",
                )
            fields["max_tokens"] = newer
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        fields["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return self.checked_params(fields, defaults)
