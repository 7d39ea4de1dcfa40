"""How bodies of conversations say what their prompt is to be, besides the messages."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import Field

from quire.dialogue.template_names import uses_name
from quire.errors import InvalidRequestError
from quire.server.wire.leniency import Leniency
from quire.server.wire.strict_model import JsonObject, StrictModel

MAX_DOCUMENTS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class PromptOptions:
    """How messages become a prompt; see `InputProcessor.process_chat`. None: its default."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None  # that the chat template may show

    def given(self) -> dict[str, Any]:
        """Return those options of the engine's that are not left to it."""
        names = ("add_generation_prompt", "continue_final_message", "add_special_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def note_documents_without_effect(self, template: str, leniency: Leniency) -> None:
        """Note documents that the chat template has no place for.

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


class PromptFields(StrictModel):
    """Fields of a body that say how its messages become a prompt."""

    add_generation_prompt: bool | None = Field(
        None,
        description="End a conversation's prompt with what begins the model's message. Default: true, unless "
        "continue_final_message is.",
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message instead of beginning another."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Add the tokens that the model wants around a text. Default: true for a text, and false "
        "for messages, whose template has written them.",
    )
    documents: Annotated[list[JsonObject], Field(max_length=MAX_DOCUMENTS)] | None = Field(
        None, description=f"Documents for the chat template, such as title and text; at most {MAX_DOCUMENTS}."
    )

    def prompt_options(self) -> PromptOptions:
        """Return how the messages become a prompt."""
        return PromptOptions(
            self.add_generation_prompt,
            self.continue_final_message,
            self.add_special_tokens,
            self.documents,
        )
