"""Finds the files that an engine's configuration names: model, tokenizer, chat template."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from quire.config import ChatTemplateConfig, EngineConfig
from quire.errors import ConfigError, InvalidRequestError, ModelError
from quire.models.checkpoints.hub import resolve_model
from quire.models.checkpoints.model_files import MAX_TEMPLATE_BYTES, read_text
from quire.models.text.template_renderer import TemplateRenderer

_ONLY_IN_TEXT = frozenset("{}\n")  # in every template, but not in file names


def resolve_files(config: EngineConfig) -> tuple[Path, EngineConfig]:
    """Return the directory or GGUF file of an engine's model, and its configuration with resolved paths.

    In that, the tokenizer is a path, and the chat template is its text; either may be empty as before.
    What is on the hub is downloaded if need be.

    Raises:
        ModelNotFoundError: says what was tried.
        ConfigError: there is a revision of a model on this machine, or the chat template cannot be used.
    """
    model_path = resolve_model(config.model, revision=config.revision)
    tokenizer = str(resolve_model(config.tokenizer, weights=False)) if config.tokenizer else ""
    templating = _with_template_text(config.chat_templating)
    return model_path, dataclasses.replace(config, tokenizer=tokenizer, chat_templating=templating)


def _with_template_text(templating: ChatTemplateConfig) -> ChatTemplateConfig:
    """Return `templating` with the text of its template, after compiling it in a process."""
    if not templating.chat_template:
        return templating
    source = _template_text(templating.chat_template)
    renderer = TemplateRenderer(source, {}, templating)
    try:
        renderer.compile()
    except InvalidRequestError as error:
        raise ConfigError(f"ChatTemplateConfig.chat_template: {error}") from None
    finally:
        renderer.close()
    return dataclasses.replace(templating, chat_template=source)


def _template_text(given: str) -> str:
    """Return the text of a template, given as a file or as text."""
    file = Path(given).expanduser()
    try:
        is_file = file.is_file()
    except OSError:  # too long for a name
        is_file = False
    if is_file:
        try:
            return read_text(file, MAX_TEMPLATE_BYTES)
        except ModelError as error:
            raise ConfigError(f"ChatTemplateConfig.chat_template: {error}") from None
    if not _ONLY_IN_TEXT & set(given):
        raise ConfigError(
            f"ChatTemplateConfig.chat_template is {given!r:.200}, neither a file nor a template: a "
            "template has braces"
        )
    if len(given) > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"ChatTemplateConfig.chat_template has {len(given)} characters; at most {MAX_TEMPLATE_BYTES} fit"
        )
    return given
