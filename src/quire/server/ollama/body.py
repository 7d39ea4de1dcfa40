"""Bodies of POST /api/chat and /api/generate."""

from __future__ import annotations

import abc
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import override

from quire.dialogue.calls.tools import ToolUse
from quire.errors import InvalidRequestError
from quire.sampling_params import NumLogprobs, SamplingParams
from quire.server.calls.bodies import ConversationBody, GenerationBody, PromptOptions
from quire.server.calls.reasoning import Thinking
from quire.server.calls.response_format import ANY_OBJECT, structure_of_schema
from quire.server.calls.tool_fields import Tools, tool_use_of
from quire.server.ollama.messages import NoImages, OllamaMessage, openai_messages
from quire.server.ollama.options import OllamaOptions
from quire.server.sampling_defaults import SamplingDefaults
from quire.server.wire.strict_model import Ignored, Unsupported


def _format_form(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else "=schema" if isinstance(value, dict) else None


Format = Annotated[
    Annotated[Literal["", "json"], Tag("=text")] | Annotated[dict[str, Any], Tag("=schema")],
    Discriminator(
        _format_form, custom_error_type="form", custom_error_message="it must be json or a JSON schema"
    ),
]


def _think_form(value: Any) -> str | None:
    return "=switch" if isinstance(value, bool) else "=effort" if isinstance(value, str) else None


Think = Annotated[
    Annotated[bool, Tag("=switch")] | Annotated[Literal["low", "medium", "high", "max"], Tag("=effort")],
    Discriminator(
        _think_form, custom_error_type="form", custom_error_message="it must be true, false or an effort"
    ),
]


def _refuse_context(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError("context", "earlier messages cannot be given as tokens; use /api/chat")


def _refuse_template(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError(
            "template", "a request has no template of its own; set raw to true and send the whole prompt"
        )


class OllamaRequest(ConversationBody, GenerationBody):
    """Common fields of both bodies."""

    model: str = Field(description="The served model's name; the tag latest may be left out or added.")
    stream: Annotated[bool, BeforeValidator(lambda value: True if value is None else value)] = Field(
        True, description="Send the answer in lines of JSON as it is generated."
    )
    options: OllamaOptions | None = None
    format: Format | None = Field(None, description="json for any object, or a JSON schema for the answer.")
    think: Think | None = Field(
        None, description="Whether the model reasons, or its effort, if its chat template has a switch."
    )
    logprobs: bool | None = Field(None, description="Return the log-probabilities of the answer's tokens.")
    top_logprobs: NumLogprobs | None = Field(
        None, description="Number of most likely tokens to also return; needs logprobs."
    )
    keep_alive: Ignored = None
    shift: Ignored = None
    truncate: Ignored = None

    @property
    @abc.abstractmethod
    def only_loads(self) -> bool:
        """Whether the client only wants to load the model."""

    def raw_prompt(self, chat_template: str) -> str | None:
        """Return the prompt if the chat template is not applied; None if it is."""
        return None

    @override
    def thinking_options(self) -> Thinking:
        if isinstance(self.think, str):
            return Thinking(is_on=True, effort=self.think)
        return Thinking(is_on=self.think, is_shown=self.think is not False)

    @abc.abstractmethod
    def given_messages(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's form."""

    @override
    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        fields = {} if self.options is None else self.options.sampling_fields()
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.format:
            schema = ANY_OBJECT if self.format == "json" else self.format
            fields["structured_outputs"] = structure_of_schema(schema, "format")
        return defaults.params(fields)


class OllamaChatRequest(OllamaRequest):
    """Body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = Field(
        None, description="The conversation so far. None: only load the model."
    )
    tools: Tools | None = Field(None, description="Tools that the model may call; at most 128.")

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to answer."""
        return not self.messages

    @override
    def tool_use(self) -> ToolUse | None:
        return tool_use_of(self.tools, None, parallel_tool_calls=None)

    def given_messages(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's form."""
        return openai_messages(self.messages or [])

    @override
    def prompt_options(self) -> PromptOptions:
        last = self.messages[-1] if self.messages else None
        continues = last is not None and last.role == "assistant" and not last.tool_calls
        return PromptOptions(continue_final_message=continues or None)


class OllamaGenerateRequest(OllamaRequest):
    """Body of POST /api/generate."""

    prompt: str | None = Field(None, description="The user's message. None: only load the model.")
    system: str | None = Field(None, description="System prompt.")
    raw: bool | None = Field(
        None, description="Continue the prompt without applying the chat template. Default: false."
    )
    context: Annotated[Unsupported, BeforeValidator(_refuse_context)] = None
    images: NoImages = None
    suffix: Unsupported = None
    template: Annotated[Unsupported, BeforeValidator(_refuse_template)] = None

    @property
    def only_loads(self) -> bool:
        """Whether there is nothing to answer."""
        return not self.prompt

    def raw_prompt(self, chat_template: str) -> str | None:
        """Return the prompt if it does not pass through the chat template; None if it does.

        Raises:
            InvalidRequestError: it is not applied, and there is a system message.
        """
        if chat_template and not self.raw:
            return None
        if self.system:
            problem = "raw is true" if self.raw else "the model has no chat template"
            raise InvalidRequestError(
                f"{problem}, so a system message has no place; put it into the prompt", param="system"
            )
        return self.prompt or ""

    def given_messages(self) -> list[dict[str, Any]]:
        """Return the messages in OpenAI's form."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt or ""}]
