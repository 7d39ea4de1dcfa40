"""Bodies of requests: strict pydantic models of what OpenAI's clients send, plus Quire's sampling fields.

A field that is null counts as left out. Fields that OpenAI defines and Quire does not support are declared
with the type `Unsupported`, so that they are refused by name; any other name is refused as unknown.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quire.errors import InvalidRequestError, nearest_name
from quire.request import SamplingParams

MAX_PROMPTS = 1024
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 1024
DEFAULT_COMPLETION_TOKENS = 16
_MOST_LISTED = 1024  # entries of a list before duplicates are merged; SamplingParams has the real bounds

Unsupported: TypeAlias = None
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenIdText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]
Role = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]

UNKNOWN_NAME = "unknown_name"
"""Type of the validation error about a name that a model does not have; `name` and `hint` in its context."""

UNION_TAGS = frozenset({"=text", "=texts", "=tokens", "=token_lists", "=parts"})
"""Names of the forms that a field may take; they are no part of a field's path."""


def _prompt_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "=text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "=token_lists"
    return "=texts" if isinstance(first, str) else "=tokens"


def _one_of(form: str, list_form: str, meaning: str) -> Discriminator:
    """Tell a string from a list; anything else is refused with `meaning`."""

    def form_of(value: Any) -> str | None:
        return form if isinstance(value, str) else list_form if isinstance(value, list) else None

    return Discriminator(form_of, custom_error_type="form", custom_error_message=f"it must be {meaning}")


TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("=texts")]
    | Annotated[TokenIds, Tag("=tokens")]
    | Annotated[
        list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("=token_lists")
    ],
    Discriminator(
        _prompt_form,
        custom_error_type="form",
        custom_error_message="it must be text, token ids, or a list of either",
    ),
]
Stop = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOP_STRINGS), Tag("=texts")],
    _one_of("=text", "=texts", "a string or a list of strings"),
]


def _few_enough(biases: Any) -> Any:
    """Check the size before the items: there may be a million of them."""
    if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIASES:
        raise PydanticCustomError("too_long", f"it may have at most {MAX_LOGIT_BIASES} entries")
    return biases


LogitBias = Annotated[
    dict[TokenIdText, float], Field(max_length=MAX_LOGIT_BIASES), BeforeValidator(_few_enough)
]


class StrictModel(BaseModel):
    """No unknown names, no conversion between types, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, values: Any) -> Any:
        """Stop at the first unknown name; pydantic's own check would describe every one of a million."""
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                known = [key for key, field in cls.model_fields.items() if field.annotation is not type(None)]
                context = {"name": name, "hint": nearest_name(name, known)}
                raise PydanticCustomError(UNKNOWN_NAME, "unknown name", context)
        return values


class StreamOptions(StrictModel):
    """What a stream carries besides the text."""

    include_usage: bool | None = Field(None, description="Send a last event with the usage.")
    include_obfuscation: Literal[False] | None = Field(None, description="Padding is never added.")


def _sampling_field(name: str) -> Any:
    """Return an optional field described as in `SamplingParams`."""
    [field] = [field for field in dataclasses.fields(SamplingParams) if field.name == name]
    return Field(None, description=field.metadata["help"])


class GenerationRequest(StrictModel):
    """Fields that completions and chat share."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    n: Count | None = _sampling_field("n")
    max_tokens: Count | None = _sampling_field("max_tokens")
    min_tokens: Count | None = _sampling_field("min_tokens")
    temperature: float | None = _sampling_field("temperature")
    top_k: Count | None = _sampling_field("top_k")
    top_p: float | None = _sampling_field("top_p")
    min_p: float | None = _sampling_field("min_p")
    repetition_penalty: float | None = _sampling_field("repetition_penalty")
    presence_penalty: float | None = _sampling_field("presence_penalty")
    frequency_penalty: float | None = _sampling_field("frequency_penalty")
    logit_bias: LogitBias | None = _sampling_field("logit_bias")
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=_MOST_LISTED)] | None = _sampling_field(
        "bad_words"
    )
    stop: Stop | None = _sampling_field("stop")
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=_MOST_LISTED)] | None = (
        _sampling_field("stop_token_ids")
    )
    include_stop_str_in_output: bool | None = _sampling_field("include_stop_str_in_output")
    ignore_eos: bool | None = _sampling_field("ignore_eos")
    seed: int | None = _sampling_field("seed")
    skip_special_tokens: bool | None = _sampling_field("skip_special_tokens")
    priority: Count | None = Field(None, description="Lower is served first under the priority policy.")
    cache_salt: str | None = Field(
        None, max_length=256, description="Share prefix-cache blocks only with requests of the same salt."
    )
    stream: bool | None = Field(None, description="Send server-sent events as tokens come.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    user: str | None = Field(None, max_length=256, description="A label for the caller's own use; no effect.")

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
        return bool(self.stream_options.include_usage)

    def shared_sampling_fields(self) -> dict[str, Any]:
        """Return those fields that `SamplingParams` has under the same name and that were given."""
        names = _SHARED_SAMPLING_FIELDS
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return given


_SHARED_SAMPLING_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in GenerationRequest.model_fields and field.name != "logit_bias"
)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompt = Field(description="Text or token ids to continue, one or several.")
    best_of: Count | None = Field(None, description="Must equal n: choices are not ranked and dropped.")
    echo: bool | None = Field(None, description="Start the text with the prompt; with max_tokens 0, only it.")
    logprobs: Count | None = _sampling_field("logprobs")
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

    def sampling_params(self) -> SamplingParams:
        """Return the engine's parameters.

        Raises:
            InvalidRequestError: a value out of range, or two that contradict each other.
        """
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise InvalidRequestError(
                f"best_of is {self.best_of}; it must equal n ({self.n or 1}), or be left out", param="best_of"
            )
        fields = self.shared_sampling_fields()
        fields.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
        if self.only_scores_prompt:
            fields["max_tokens"] = 1  # the engine samples at least one token; it is dropped
            fields.pop("min_tokens", None)
        elif self.max_tokens == 0:
            raise InvalidRequestError(
                "max_tokens is 0; it must be at least 1, or echo must be true", param="max_tokens"
            )
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
            fields["prompt_logprobs"] = self.logprobs if self.echo else None
        return SamplingParams(**fields)


class TextPart(StrictModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(StrictModel):
    """One message; which roles there are, and in which order, is the chat template's affair."""

    role: Role
    content: Annotated[
        Annotated[str, Tag("=text")]
        | Annotated[list[TextPart], Field(fail_fast=True, min_length=1), Tag("=parts")],
        _one_of("=text", "=parts", "a string or a list of text parts"),
    ]
    name: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    refusal: Unsupported = None
    tool_call_id: Unsupported = None
    tool_calls: Unsupported = None

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates expect it, its parts joined."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ResponseFormat(StrictModel):
    """The form of the answer: text."""

    type: Literal["text"]


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] = Field(
        description="The conversation so far."
    )
    max_completion_tokens: Count | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Return the log-probabilities of the answer's tokens.")
    top_logprobs: Count | None = Field(None, description="And of this many likeliest ones, 0 to 20.")
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    tool_choice: Literal["none"] | None = None
    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    metadata: Unsupported = None
    parallel_tool_calls: Unsupported = None
    prediction: Unsupported = None
    prompt_cache_key: Unsupported = None
    prompt_cache_retention: Unsupported = None
    reasoning_effort: Unsupported = None
    safety_identifier: Unsupported = None
    tools: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    def sampling_params(self) -> SamplingParams:
        """Return the engine's parameters.

        Raises:
            InvalidRequestError: a value out of range, or two that contradict each other.
        """
        fields = self.shared_sampling_fields()
        newer = self.max_completion_tokens
        if newer is not None:
            if self.max_tokens is not None and self.max_tokens != newer:
                raise InvalidRequestError(
                    f"max_tokens is {self.max_tokens} and max_completion_tokens {newer}; give one of them",
                    param="max_tokens",
                )
            fields["max_tokens"] = newer
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs is not None:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return SamplingParams(**fields)
