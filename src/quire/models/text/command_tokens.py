"""Control tokens: only a chat template produces them, never text from clients.

Commands are the special tokens, and those of the other added tokens that the template has or that are a
name in angle or square brackets. The tokenizers library makes them of their spellings, wherever these are in
a text. So where the client's part of a text spells some, those of the template get other spellings, which
cannot be guessed, and the text is tokenized by a copy of the tokenizer that has only these: the client's
spellings are plain text to it. In all else the copy equals the model's own tokenizer.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import operator
import re
import secrets
import unicodedata
from collections.abc import Callable

import tokenizers
from tokenizers import AddedToken
from tokenizers import models as tokenizer_models

from quire.errors import InvalidRequestError
from quire.models.text.template_messages import RenderedChat

_LETTERS = "\u2d30\ua4ed\u16a0x"  # one that no command has stands for given letters
_SYMBOLS = "\u2e3a\u203b\u2042~"  # and one for all else that is not white space
_KINDS_OF_WORDS = ("L", "M", "Nd", "Nl", "Pc")  # categories of Unicode
_JOINERS = "\u200c\u200d"
_MARK = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
_SPACE = "\u2581"  # as SentencePiece writes it


@dataclasses.dataclass(frozen=True, slots=True)
class TokenList:
    """Tokens of a text, as far as they are needed of a `tokenizers.Encoding`.

    Args:
        ids: ids of the tokens.
        special_tokens_mask: 1 for those that the tokenizer adds around a text, else 0.
    """

    ids: list[int]
    special_tokens_mask: list[int]

    def __len__(self) -> int:
        return len(self.ids)


@dataclasses.dataclass(frozen=True, slots=True)
class _Command:
    token_id: int
    start: int  # in the text, without white space that the token takes in
    end: int


class CommandTokens:
    """The commands of one tokenizer.

    Args:
        backend: the tokenizer.
        template: source of the chat template, which may have words among its commands.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: str) -> None:
        self._model = backend.model
        added = dict(sorted(backend.get_added_tokens_decoder().items()))
        self._commands = {id_: token for id_, token in added.items() if _is_command(token, template)}
        secret = secrets.token_hex(16)
        self._names = {
            id_: _other_spelling(token.content, f"{secret}{id_:x}g") for id_, token in self._commands.items()
        }
        finding = tokenizers.Tokenizer(tokenizer_models.WordLevel(vocab={"": 0}, unk_token=""))
        writing = tokenizers.Tokenizer(self._model)
        for one in (finding, writing):
            if backend.normalizer is not None:
                one.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            writing.pre_tokenizer = backend.pre_tokenizer
        if backend.post_processor is not None:
            writing.post_processor = backend.post_processor
        finding.add_tokens(list(added.values()))
        writing.add_tokens([_renamed(token, self._names.get(id_)) for id_, token in added.items()])
        self._finding, self._writing = finding, writing
        self._found_ids = {finding.token_to_id(token.content): id_ for id_, token in added.items()}
        self._written_ids = {
            writing.token_to_id(self._names.get(id_, token.content)): id_ for id_, token in added.items()
        }
        self._unknown_ids = _unknown_ids(self._model)
        self._any_overlaps = any(_overlaps_itself(token.content) for token in self._commands.values())
        spellings = "".join(token.content for token in self._commands.values())
        self._letter = next((one for one in _LETTERS if one not in spellings), _LETTERS[0])
        self._symbol = next((one for one in _SYMBOLS if one not in spellings), _SYMBOLS[0])
        self._pieces: dict[int, list[int]] = {}

    def tokenize(
        self,
        chat: RenderedChat,
        tokenize: Callable[..., tokenizers.Encoding],
        *,
        add_special_tokens: bool,
    ) -> tokenizers.Encoding | TokenList:
        """Return the tokens of a chat, in which only the template has made commands.

        Args:
            chat: the text, parts of which are given.
            tokenize: returns the library's tokens of a text, for a chat whose given parts spell no commands.
            add_special_tokens: whether the tokens that the model wants around a text are added.

        Raises:
            InvalidRequestError: the template's commands and the client's cannot be distinguished in this
                tokenizer.
        """
        own = self._own_commands(chat)
        encoding = tokenize(chat.text, add_special_tokens=add_special_tokens)
        inside = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        made = [id_ for id_, is_around in inside if id_ in self._commands and not is_around]
        if made == list(map(operator.attrgetter("token_id"), own)) and not self._any_overlaps:
            return encoding
        pieces, at = [], 0
        for command in own:
            pieces += [chat.text[at : command.start], self._names[command.token_id]]
            at = command.end
        encoding = self._writing.encode_batch_fast(
            ["".join([*pieces, chat.text[at:]])], add_special_tokens=add_special_tokens
        )[0]
        return self._without_others(encoding, len(own))

    def _own_commands(self, chat: RenderedChat) -> list[_Command]:
        """Return the commands that the library finds in the template's own text, in order.

        Of each given run, it only sees the kinds of the characters at its ends.
        """
        pieces: list[str] = []
        starts, ends, shown_starts = [0], [], [0]  # of the template's runs; the last in what is searched
        for start, end in chat.given:
            own = chat.text[starts[-1] : start]
            pieces += [own, self._hidden(chat.text[start]), self._hidden(chat.text[end - 1])]
            shown_starts.append(shown_starts[-1] + len(own) + 2)
            ends.append(start)
            starts.append(end)
        ends.append(len(chat.text))
        shown = "".join([*pieces, chat.text[starts[-1] :]])
        commands: list[_Command] = []
        encoding = self._finding.encode(shown, add_special_tokens=False)  # short: templates' own text is
        for found, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._commands.get(token_id := self._found_ids.get(found, -1))
            if token is None:
                continue
            start, end, text = first, last, shown[first:last]
            if not text.isspace():  # spaces around it are the token's by its flags, or by normalization
                start += 0 if token.content[0].isspace() else len(text) - len(text.lstrip())
                end -= 0 if token.content[-1].isspace() else len(text) - len(text.rstrip())
            run = bisect.bisect_right(shown_starts, start) - 1
            offset = starts[run] - shown_starts[run]
            if end + offset <= ends[run]:
                commands.append(_Command(token_id, start + offset, end + offset))
        return commands

    def _hidden(self, character: str) -> str:
        """Return a character that no command has, in place of a given one; white space stays."""
        if character.isspace():
            return character
        return self._letter if _is_of_word(character) else self._symbol

    def _without_others(self, encoding: tokenizers.Encoding, num_own: int) -> TokenList:
        """Return tokens with the model's ids, and the client's commands as plain text."""
        ids: list[int] = []
        mask: list[int] = []
        for id_, is_around in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            own_id = id_ if is_around else self._written_ids.get(id_)
            if own_id is not None:
                ids.append(own_id)
                num_own -= not is_around and own_id in self._commands
            elif id_ in self._commands and id_ not in self._unknown_ids:
                ids += self._pieces_of(id_)
            else:
                ids.append(id_)
            mask += [is_around] * (len(ids) - len(mask))
        if num_own:
            raise InvalidRequestError(
                "a message contains a special token of the model that its tokenizer cannot encode as "
                "text; leave it out, or start with special_tokens_in_content",
                param="messages",
            )
        return TokenList(ids, mask)

    def _pieces_of(self, id_: int) -> list[int]:
        """Return a token's text as other tokens, the longest first; parts that no token has are dropped."""
        if id_ not in self._pieces:
            text, pieces = self._model.id_to_token(id_) or "", []
            while text:
                for length in range(len(text), 0, -1):
                    piece = self._model.token_to_id(text[:length])
                    if piece is not None and piece not in self._commands:
                        pieces.append(piece)
                        break
                text = text[length:]
            self._pieces[id_] = pieces
        return self._pieces[id_]


def _is_command(token: AddedToken, template: str) -> bool:
    """Return whether a token is a command; others are white space, letters, or words of the vocabulary."""
    text = token.content.replace(_SPACE, " ").strip()
    is_mark = _MARK.fullmatch(text) is not None or (len(text) > 1 and text in template)
    return bool(token.content) and (token.special or is_mark)


def _overlaps_itself(text: str) -> bool:
    """Return whether a text can begin within itself: a given one can then take another's place."""
    return any(text.startswith(text[at:]) for at in range(1, len(text)))


def _unknown_ids(model: tokenizer_models.Model) -> frozenset[int]:
    """Return the ids that the model gives a text that it does not know."""
    try:
        return frozenset(token.id for token in model.tokenize("\U0010ffff"))
    except Exception:  # the library raises no other: the model has no such token
        return frozenset()


def _other_spelling(text: str, name: str) -> str:
    """Return a name with letters at its ends where a token has them: `single_word` depends on them."""
    begins, ends = ("" if _is_of_word(text[at]) else "~" for at in (0, -1))
    return f"{begins}{name}{ends}"


@functools.lru_cache(4096)
def _is_of_word(character: str) -> bool:
    """Return whether a character is part of a word, as the library has it."""
    return unicodedata.category(character).startswith(_KINDS_OF_WORDS) or character in _JOINERS


def _renamed(token: AddedToken, name: str | None) -> AddedToken:
    if name is None:
        return token
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
