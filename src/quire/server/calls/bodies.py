"""Base classes of request bodies, shared by all APIs."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from typing_extensions import override

from quire.dialogue.calls.tools import ToolUse
from quire.dialogue.formats import uses_name
from quire.dialogue.reasoning.formats import ReasoningFormat
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.server.calls.reasoning import Thinking
from quire.server.sampling_defaults import SamplingDefaults
from quire.server.wire.leniency import Leniency
from quire.server.wire.strict_model import JsonObject, StrictModel

MAX_DOCUMENTS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class PromptOptions:
    """How messages become a prompt; None: the default of `InputProcessor.process_chat`."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None  # for the chat template

    def given(self) -> dict[str, Any]:
        """Return the options that were given."""
        names = ("add_generation_prompt", "continue_final_message", "add_special_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def note_documents_without_effect(self, template: str, leniency: Leniency) -> None:
        """Report documents that the chat template does not use.

        Raises:
            InvalidRequestError: the server is strict.
        """
        if not self.documents or uses_name(template, "documents"):
            return
        if leniency.is_strict:
            raise InvalidRequestError(
                f"there are {len(self.documents)} documents, for which the model's chat template has no "
                "place; put them into the messages",
                param="documents",
            )
        leniency.ignore("documents")


class GenerationBody(StrictModel):
    """A body of a generation request, with the fields `model` and `stream`."""

    if TYPE_CHECKING:

        @property
        def model(self) -> str | None:
            """The served model's name; None: whichever is served."""

        stream: bool | None

    @abc.abstractmethod
    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the sampling parameters: those given, and defaults for the others.

        Raises:
            InvalidRequestError: a value is out of range, or two contradict each other.
        """

    def request_options(self) -> dict[str, Any]:
        """Return the fields of `RequestOptions` that were given."""
        return {}


class ConversationBody(StrictModel):
    """A body with the messages of a conversation."""

    def tool_use(self) -> ToolUse | None:
        """Return which tools the answer may or must call; None: none.

        Raises:
            InvalidRequestError: a tool is unusable or duplicate, or the choice names an unknown one.
        """
        return None

    def thinking_options(self) -> Thinking:
        """Return the reasoning options."""
        return Thinking()

    def prompt_options(self) -> PromptOptions:
        """Return how the messages become a prompt."""
        return PromptOptions()


def template_options(
    body: ConversationBody, use: ToolUse | None, template: str, reasoning_format: ReasoningFormat | None
) -> dict[str, Any]:
    """Return the chat template's inputs besides a body's messages, as options of `AsyncLLM.chat`.

    Args:
        body: the body.
        use: its `tool_use`.
        template: chat template of the model.
        reasoning_format: reasoning format of the model.
    """
    prompt_options = body.prompt_options()
    options = prompt_options.given()
    if use is not None:
        options["tools"] = [tool.for_template() for tool in use.tools]
    variables = body.thinking_options().variables(template, reasoning_format)
    if prompt_options.documents is not None:
        variables = {"documents": prompt_options.documents, **variables}
    if variables:
        options["chat_template_kwargs"] = variables
    return options


class PromptFields(ConversationBody):
    """Fields of a body that control how its messages become a prompt."""

    add_generation_prompt: bool | None = Field(
        None,
        description="End a conversation's prompt with the header of the model's turn. Default: true, unless "
        "continue_final_message is.",
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message instead of starting a new one."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Add the model's special tokens. Default: true for a text, and false for messages, whose "
        "template adds them.",
    )
    documents: Annotated[list[JsonObject], Field(max_length=MAX_DOCUMENTS)] | None = Field(
        None, description=f"Documents for the chat template, such as title and text; at most {MAX_DOCUMENTS}."
    )

    @override
    def prompt_options(self) -> PromptOptions:
        return PromptOptions(
            self.add_generation_prompt,
            self.continue_final_message,
            self.add_special_tokens,
            self.documents,
        )
