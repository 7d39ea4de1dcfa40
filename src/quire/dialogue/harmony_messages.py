"""Harmony, the format of gpt-oss: an answer is a list of messages with headers for their channels.

A call: `<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>`.
The first message's role is in the prompt, and a recipient is before the channel or after it. Source:
https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import dataclasses
import re

from quire.dialogue.incoming_text import SPACE, IncomingText, Reading

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END, RETURN, CALL = "<|message|>", "<|end|>", "<|return|>", "<|call|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
ENDS_OF_BODY = (START, CHANNEL, END, RETURN, CALL)  # the first two begin the next header

ANALYSIS = "analysis"
FUNCTIONS = "functions."
"""The namespace of a request's tools; built-in ones, which a template may offer, have others."""

MESSAGE_START = f"{START}assistant"
ANALYSIS_HEADER = f"{CHANNEL}{ANALYSIS}{MESSAGE}"
FINAL_HEADER = f"{CHANNEL}final{MESSAGE}"

MAX_HEADER_LENGTH = 512  # characters, marks included

_END_OF_BODY = re.compile("|".join(map(re.escape, ENDS_OF_BODY)))
_BEFORE_RECIPIENT = "to="
_BEGIN_HEADER = (START, CHANNEL, CONSTRAIN, MESSAGE, _BEFORE_RECIPIENT)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ONLY_RECIPIENT = re.compile(rf"\s*{_BEFORE_RECIPIENT}\S*")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """The header of a message.

    Args:
        channel: analysis, commentary or final; "" if the model left it out.
        recipient: recipient of a call; "" if the message is none.
    """

    channel: str = ""
    recipient: str = ""


class HarmonyMessages:
    """Reads the messages of one answer: a header, then its body piece by piece, and so on.

    Text without a header is a message of no channel, and so is a header of more than `MAX_HEADER_LENGTH`. A
    header that has no body is skipped.

    Args:
        text: text of the answer.
        in_analysis: whether the answer begins in the body of a message of the analysis channel.

    Attributes:
        skipped: text before the last header's body, since the body before it.
        is_closed: whether a mark has ended the body.
    """

    def __init__(self, text: IncomingText, *, in_analysis: bool = False) -> None:
        self.skipped = ""
        self._text = text
        self._in_analysis = in_analysis
        self._is_first = True
        self._mark = ""  # that has ended the body
        self._lead = ""  # of the body: it was read as something else

    @property
    def is_closed(self) -> bool:
        """Whether a mark has ended the body."""
        return bool(self._mark)

    def header(self) -> Reading[Header | None]:
        """Return the header of the next message; None: there is none."""
        self._text.mark()
        self.skipped = ""
        is_first, self._is_first = self._is_first, False
        if is_first and self._in_analysis:
            return Header(ANALYSIS)
        space, marker, self._mark = "", self._mark, ""
        while True:
            if marker in _BEGIN_HEADER:
                header = yield from self._read_header(space + marker)
                if header is not None:
                    return header
                space, marker, self._mark = "", self._mark, ""
                if not marker:
                    return None
            else:
                self.skipped += space + marker
                space = yield from self._text.whole_run(SPACE)
                expected = (*MARKS, _BEFORE_RECIPIENT) if is_first else MARKS
                marker = yield from self._text.match(*expected)
                if not marker:
                    return (yield from self._text_without_header(space, may_be_blank=is_first))
                is_first = False

    def body(self) -> Reading[str]:
        """Return the next piece of the message's body; "" once it is over."""
        self._text.mark()
        if self._lead:
            lead, self._lead = self._lead, ""
            return lead
        piece = ""
        if not self._mark:
            piece, self._mark = yield from self._text.piece_before(ENDS_OF_BODY)
        return piece

    def unread(self, text: str) -> None:
        """Give back what has been read of the body; without marks that end one, it is the next piece."""
        self._lead = _END_OF_BODY.sub("", text)

    def _text_without_header(self, space: str, *, may_be_blank: bool) -> Reading[Header | None]:
        if (yield from self._text.peek()) or (may_be_blank and space):
            self._lead = space
            return Header()
        self.skipped += space
        return None

    def _read_header(self, written: str) -> Reading[Header | None]:
        """Read a header on to its end; None: no body follows, but the mark that is kept, or nothing."""
        marker = MESSAGE if written.endswith(MESSAGE) else ""
        while marker != MESSAGE:
            piece, marker = yield from self._text.piece_before(MARKS)
            written += piece
            is_over = (marker in ENDS_OF_BODY and marker != CHANNEL) or not (piece or marker)
            if len(written) > MAX_HEADER_LENGTH or (is_over and not _looks_like_header(written)):
                return self._no_header(written, marker)
            if is_over:
                self.skipped += written
                self._mark = marker
                return None
            written += marker
        self.skipped += written
        channel, recipient = _CHANNEL_NAME.search(written), _RECIPIENT.search(written)
        return Header(channel[1] if channel else "", recipient[1] if recipient else "")

    def _no_header(self, written: str, marker: str) -> Header:
        """Take for a body what was read as a header, up to a mark."""
        if marker in ENDS_OF_BODY:
            self._lead, self._mark = written, marker
        else:
            self._lead = written + marker
        return Header()


def _looks_like_header(written: str) -> bool:
    return bool(_ONLY_RECIPIENT.fullmatch(written)) or any(mark in written for mark in MARKS)
