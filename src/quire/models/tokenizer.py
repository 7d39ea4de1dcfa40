"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import tokenizers

from quire.errors import InvalidRequestError, ModelError
from quire.models.checkpoints.gguf.file import GGUFFile
from quire.models.checkpoints.gguf.location import find_gguf
from quire.models.checkpoints.gguf.tokenizer import read_gguf_tokenizer
from quire.models.config import read_json

if TYPE_CHECKING:
    from quire.models.chat_template import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"

_GGUF_TOKENS = ("bos", "eos", "eot", "eom", "unk", "pad")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: the tokenizer itself.
        special_tokens: text by name, such as bos_token.
        eos_token_ids: ids that end a sequence.
        bos_token_id: id that starts one, if the model has it.
        chat_template: jinja2 text, if the model has a template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        bos_token_id: int | None,
        chat_template: str | None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._chat_template_source = chat_template
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(id_ for id_, token in added.items() if token.special)

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        """Read `tokenizer.json` and what stands beside it in a model directory.

        Of a GGUF file, read the tokenizer that it holds, unless a tokenizer.json lies beside it.

        Raises:
            ModelError: there is no tokenizer, or it cannot be read.
        """
        gguf = find_gguf(path)
        if gguf is not None:
            directory = gguf.parent
            return cls._from_gguf(gguf, directory if (directory / TOKENIZER_FILE).is_file() else None)
        backend = _read_backend(path)
        settings = read_json(path / "tokenizer_config.json") or {}
        model_config = read_json(path / "config.json") or {}
        special_tokens = _special_tokens((read_json(path / "special_tokens_map.json") or {}) | settings)
        bos_token = special_tokens.get("bos_token")
        bos_id = model_config.get("bos_token_id") if bos_token is None else backend.token_to_id(bos_token)
        eos_token = special_tokens.get("eos_token")
        eos_ids = [
            *_ids((read_json(path / "generation_config.json") or {}).get("eos_token_id")),
            *_ids(model_config.get("eos_token_id")),
            *_ids(None if eos_token is None else backend.token_to_id(eos_token)),
        ]
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=tuple(dict.fromkeys(eos_ids)),
            bos_token_id=bos_id,
            chat_template=_template_source(path, settings),
        )

    @classmethod
    def _from_gguf(cls, file: Path, directory: Path | None) -> Self:
        """Read a GGUF file's tokenizer; the text's rules from `directory` if there is one."""
        content = GGUFFile(file)
        metadata = content.metadata
        tokens = metadata.get("tokenizer.ggml.tokens") or []
        numbers = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _GGUF_TOKENS}
        ends = (numbers["eos"], numbers["eot"], numbers["eom"])
        return cls(
            read_gguf_tokenizer(content) if directory is None else _read_backend(directory),
            special_tokens={
                f"{name}_token": tokens[number]
                for name, number in numbers.items()
                if number is not None and f"{name}_token" in _NAMED_TOKENS and number < len(tokens)
            },
            eos_token_ids=tuple(dict.fromkeys(number for number in ends if number is not None)),
            bos_token_id=numbers["bos"],
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; with `add_special_tokens`, those that the model wants around it.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, which is not a character.
        """
        try:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            _refuse_surrogates(text, error)
            raise
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are not UTF-8 show as U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text that a token stands for inside a sequence, its leading space included."""
        anchor, anchor_text = self._anchor
        return self.decode([*anchor, token_id], skip_special_tokens=False)[len(anchor_text) :]

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's own tokenizer, for those who must know how it decodes."""
        return self._backend

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""
        return self._chat_template_source is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the text that the model was trained on.

        Encode it with `add_special_tokens=False`: the template has put them in.

        Raises:
            InvalidRequestError: the model has no template, or its template refuses the messages.
        """
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate:
        from quire.models.chat_template import ChatTemplate

        if self._chat_template_source is None:
            raise InvalidRequestError(
                "the model has no chat template; send a plain prompt instead", param="messages"
            )
        return ChatTemplate(self._chat_template_source, self._special_tokens)

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """A token to put in front of another, since some decoders drop a sequence's first space."""
        ids = self.encode("a", add_special_tokens=False)[-1:]
        return ids, self.decode(ids, skip_special_tokens=False)


def tokenizer_json(path: Path) -> str:
    """Return a model's `tokenizer.json`, or what a GGUF file without one beside it holds, in that form.

    Raises:
        ModelError: the GGUF file's tokenizer cannot be read.
        OSError: the file cannot be read.
    """
    gguf = find_gguf(path)
    file = (path if gguf is None else gguf.parent) / TOKENIZER_FILE
    if gguf is None or file.is_file():
        return file.read_text(encoding="utf-8")
    text: str = read_gguf_tokenizer(GGUFFile(gguf)).to_str()
    return text


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / TOKENIZER_FILE
    if not file.is_file():
        raise ModelError(f"{path} holds no tokenizer.json, the only tokenizer format that Quire reads")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} cannot be read: {error}") from error


def _template_source(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if template is None:
        template = (read_json(path / "chat_template.json") or {}).get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the named tokens' text; an entry is the text itself or an object with `content`."""
    found = {}
    for name in _NAMED_TOKENS:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _ids(value: Any) -> list[int]:
    """Return the ids in an entry that holds none, one or a list."""
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _refuse_surrogates(text: str, error: Exception) -> None:
    for position, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            raise InvalidRequestError(
                f"the text holds U+{ord(character):04X} at character {position}, half of a surrogate pair "
                "and not a character; send valid Unicode",
                param="prompt",
            ) from error
