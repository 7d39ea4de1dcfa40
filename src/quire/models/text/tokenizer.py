"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tokenizers

from quire.config import ChatTemplateConfig
from quire.errors import InvalidRequestError
from quire.models.text.command_tokens import CommandTokens, TokenList
from quire.models.text.message_content import with_ending
from quire.models.text.template_messages import RenderedChat
from quire.token_bytes import TokenBytes, TokenPlaces

if TYPE_CHECKING:
    from quire.models.text.template_renderer import TemplateRenderer

_SAMPLE = (
    "The quick brown fox jumps over 13 lazy dogs, doesn't it?  Unbelievably, 3.14159 > 2,718 -- e.g. #42!\n\n"
    "def f(x_1: list[int]) -> None:\n\treturn {**x, 'naïve': \"café\"}  # TODO\r\n"
    "Übergröße, œuvre, Ελληνικά, Русский язык, العربية, עברית, हिन्दी, "
    "ภาษาไทย, 日本語の文章, 简体中文, 한국어 🙂"
)
"""Text over which tokenizers that are not the same differ."""

_SHORT_TEXT = 2_000
"""Characters up to which the library's `encode` is used: it holds the interpreter's lock, but takes none of
the library's threads, which may all be busy with long texts."""

_FEW_TOKENS = 1_000
"""Tokens up to which the library's `decode` is used."""


_SURROGATE = re.compile("[\ud800-\udfff]")
_ROLES_OF_PAIRS = re.compile(r"""(?<=['"])(?:query|document)(?=['"])""")
_TEMPLATES_OWN = frozenset({"messages", "add_generation_prompt", "tools"})

DEFAULT_TEMPLATING = ChatTemplateConfig()


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: the tokenizer itself.
        special_tokens: text by name, such as bos_token.
        eos_token_ids: ids that end a sequence.
        bos_token_id: id that starts one, if the model has it.
        chat_template: jinja2 text, if the model has a template.
        template_limits: limits of the template.

    Attributes:
        chat_template_source: `chat_template`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        bos_token_id: int | None,
        chat_template: str | None,
        template_limits: ChatTemplateConfig = DEFAULT_TEMPLATING,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.token_bytes = TokenBytes(backend)
        self._special_tokens = dict(special_tokens)
        self.chat_template_source = chat_template
        self._template_limits = template_limits
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._added_token_ids = {token.content: id_ for id_, token in added.items()}
        self.special_token_ids = frozenset(id_ for id_, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; with `add_special_tokens`, those that the model wants around it.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, which is not a character.
        """
        ids: list[int] = self.tokenize(text, add_special_tokens=add_special_tokens).ids
        return ids

    def tokenize(
        self, text: str, second: str | None = None, *, add_special_tokens: bool = True
    ) -> tokenizers.Encoding:
        """Return the tokens of `text` as the library has them, which costs less than a list of their ids.

        Other threads run meanwhile if the text is long. With a second text, they are those of both, joined as
        the model wants it.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, which is not a character.
        """
        try:
            if len(text) + len(second or "") <= _SHORT_TEXT:
                return self._backend.encode(text, second, add_special_tokens=add_special_tokens)
            given = text if second is None else (text, second)
            [encoding] = self._backend.encode_batch_fast([given], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            for one in (text, second or ""):
                _refuse_surrogates(one)
            raise
        return encoding

    def tokenize_chat(
        self, chat: RenderedChat, *, add_special_tokens: bool = False
    ) -> tokenizers.Encoding | TokenList:
        """Return the tokens of a conversation's text; given text becomes no command.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, or spells a command that cannot be
                taken for text.
        """
        if not (chat.given and self._added_token_ids):
            return self.tokenize(chat.text, add_special_tokens=add_special_tokens)
        return self._commands.tokenize(chat, self.tokenize, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are not UTF-8 show as U+FFFD.

        Other threads run meanwhile if there are many.
        """
        if len(ids) <= _FEW_TOKENS:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        else:
            [text] = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def token_name(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it, such as `Ġthe`; empty if it has no such id."""
        return self._backend.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """Return the text of a token inside a sequence, its leading space included.

        Bytes of a part of a character show as U+FFFD.
        """
        return self.token_bytes.of(token_id).decode(errors="replace")

    def token_starts(self, text: str, token_ids: Sequence[int]) -> list[int] | None:
        """Return at which character of a text each of its tokens begins; None if it has other tokens.

        Those that the model wants around a text may be among them. The text is tokenized again; other threads
        run meanwhile.
        """
        return self._token_places.starts(text, token_ids)

    @functools.cached_property
    def _token_places(self) -> TokenPlaces:
        return TokenPlaces(self._backend, self.token_bytes)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest that two tokenizers share if they encode a sample alike and have the same chat template."""
        named = [self._special_tokens.get(name) for name in ("bos_token", "eos_token")]
        digested = [self.vocab_size, self.encode(_SAMPLE), self.chat_template_source, named]
        return blake2b(json.dumps(digested).encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def digest(self) -> str:
        """Digest of all that makes tokens of texts and messages; slow to compute for a large vocabulary."""
        digested = [self._backend.to_str(), self.chat_template_source, self._special_tokens]
        return blake2b(json.dumps(digested).encode(), digest_size=16).hexdigest()

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's own tokenizer, for those who must know how it decodes."""
        return self._backend

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Text of the tokens with a role, by its name, such as bos_token."""
        return MappingProxyType(self._special_tokens)

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that were added to the vocabulary, special or not, by their text."""
        return MappingProxyType(self._added_token_ids)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""
        return self.chat_template_source is not None

    @property
    def joins_pairs(self) -> bool:
        """Whether the chat template has the roles query and document, and so joins two texts."""
        return _has_roles_of_pairs(self.chat_template_source or "")

    def added_token_id(self, text: str) -> int | None:
        """Return the id of the token that was added to the vocabulary as `text`, special or not, if any."""
        return self._added_token_ids.get(text)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the text of `render_chat`, which has the same arguments, as plain `str`."""
        return self.render_chat(messages, **options).text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> RenderedChat:
        """Return a conversation as the text that the model was trained on.

        With `add_generation_prompt`, it ends where the next message begins; with `continue_final_message`
        instead, where the content of the last one ends.

        The content of a message is a text or a list of text parts. `tokenize_chat` makes tokens of it; the
        template has put in the special ones. The call waits for another process, which renders it. `tools`
        are those that the model may call, as OpenAI's API describes them; `variables` are what else the
        template may use, such as enable_thinking.

        Raises:
            InvalidRequestError: the model has no template, its template refuses the messages or takes too
                much time or memory for them, a variable has a name that is taken, or the last message
                cannot be continued.
            RequestTimeoutError: the machine is too busy.
            QueueFullError: no process can be started.
        """
        taken = sorted(_TEMPLATES_OWN & variables.keys())
        if taken:
            raise InvalidRequestError(
                f"chat_template_kwargs has {taken[0]!r}, which Quire sets itself; leave it out",
                param="chat_template_kwargs",
            )
        render = functools.partial(self._template_renderer.render, tools=tools, variables=variables)
        if not continue_final_message:
            return render(messages, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt are both true; the answer either continues "
                "the last message or begins another: leave add_generation_prompt out",
                param="continue_final_message",
            )
        mark = secrets.token_hex(16)  # it cannot have been written before
        chat = render(_with_mark(messages, mark), add_generation_prompt=False)
        end = chat.text.rfind(mark)
        if end < 0:
            raise InvalidRequestError(
                "the chat template does not show the content of the last message, so it cannot be continued; "
                "leave continue_final_message out",
                param="continue_final_message",
            )
        return chat.part(0, end)

    def check_chat_template(self) -> None:
        """Render a small conversation, so that a broken template fails early and later ones are faster.

        Raises:
            InvalidRequestError: as `apply_chat_template` does.
        """
        roles = ("query", "document") if self.joins_pairs else ("user",)
        self.tokenize_chat(self.render_chat([{"role": role, "content": "Hello"} for role in roles]))

    def close(self) -> None:
        """End the processes that render the chat template; another conversation starts them again."""
        if self.chat_template_source is not None:
            self._template_renderer.close()

    @functools.cached_property
    def _commands(self) -> CommandTokens:
        return CommandTokens(self._backend, self.chat_template_source or "")

    @functools.cached_property
    def _template_renderer(self) -> TemplateRenderer:
        from quire.models.text.template_renderer import TemplateRenderer

        if self.chat_template_source is None:
            raise InvalidRequestError(
                "the model has no chat template; send a plain prompt instead", param="messages"
            )
        return TemplateRenderer(self.chat_template_source, self._special_tokens, self._template_limits)


@functools.lru_cache(16)
def _has_roles_of_pairs(template: str) -> bool:
    return len(set(_ROLES_OF_PAIRS.findall(template))) == 2


def _with_mark(messages: Sequence[Mapping[str, Any]], mark: str) -> list[Mapping[str, Any]]:
    """Return the messages with a mark at the end of the last one's content."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if content is None or last.get("tool_calls"):
        raise InvalidRequestError(
            "the last message calls tools or has no text; only a text can be continued: leave "
            "continue_final_message out, or send the message's text",
            param="continue_final_message",
        )
    return [*messages[:-1], {**last, "content": with_ending(content, mark)}]


def _refuse_surrogates(text: str) -> None:
    if found := _SURROGATE.search(text):
        raise InvalidRequestError(
            f"the text holds U+{ord(found[0]):04X} at character {found.start()}, half of a surrogate pair "
            "and not a character; send valid Unicode",
            param="prompt",
        )
