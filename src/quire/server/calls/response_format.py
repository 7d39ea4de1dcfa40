"""Output formats in bodies: OpenAI's response_format, vLLM's structured_outputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from quire.errors import InvalidRequestError
from quire.server.wire.strict_model import StrictModel, optional_field
from quire.structured_outputs import MAX_CHOICES, StructuredOutputsParams

ANY_OBJECT = '{"type": "object"}'

SchemaName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


def _schema_form(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else "=schema" if isinstance(value, dict) else None


Schema = Annotated[
    Annotated[str, Tag("=text")] | Annotated[dict[str, Any], Tag("=schema")],
    Discriminator(
        _schema_form, custom_error_type="form", custom_error_message="it must be a JSON schema or its text"
    ),
]


class StructuredOutputs(StrictModel):
    """A grammar that the output must follow: exactly one of the fields."""

    path_prefix = "structured_outputs."

    json_: Schema | None = optional_field(StructuredOutputsParams, "json", alias="json")
    regex: str | None = optional_field(StructuredOutputsParams, "regex")
    choice: Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICES)] | None = optional_field(
        StructuredOutputsParams, "choice"
    )
    grammar: str | None = optional_field(StructuredOutputsParams, "grammar")

    def params(self) -> StructuredOutputsParams:
        """Return the engine's parameters.

        Raises:
            InvalidRequestError: not exactly one of the fields is given, or it is unusable.
        """
        return StructuredOutputsParams(
            json=self.json_,
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
        )


def structure_of_schema(schema: Schema, field: str) -> StructuredOutputsParams:
    """Convert a JSON schema in a body's `field` to the engine's parameters.

    Raises:
        InvalidRequestError: it is unusable.
    """
    try:
        return StructuredOutputsParams(json=schema)
    except InvalidRequestError as error:
        problem = str(error).removeprefix("structured_outputs.json")
        raise InvalidRequestError(f"{field}{problem}", param=field) from None


class NamedSchema(StrictModel):
    """A JSON schema in OpenAI's form, always enforced regardless of `strict`."""

    path_prefix = "response_format.json_schema."

    name: SchemaName
    schema_: dict[str, Any] = Field(alias="schema", description="The schema; at most 64 KiB as text.")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The format of the answer: text, any JSON object, or JSON valid against a schema."""

    path_prefix = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(None, description="Only with the type json_schema.")

    def params(self) -> StructuredOutputsParams | None:
        """Return the engine's parameters for this format; None for text.

        Raises:
            InvalidRequestError: a schema is missing, unusable, or given with another type.
        """
        if (self.json_schema is not None) != (self.type == "json_schema"):
            problem = "needs" if self.json_schema is None else "does not take"
            raise InvalidRequestError(
                f"response_format.type is {self.type!r}, which {problem} a json_schema",
                param="response_format.json_schema",
            )
        if self.json_schema is not None:
            return structure_of_schema(self.json_schema.schema_, "response_format.json_schema.schema")
        return StructuredOutputsParams(json=ANY_OBJECT) if self.type == "json_object" else None
