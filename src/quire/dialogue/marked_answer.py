"""Answers with reasoning first, then content, and calls between marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.dialogue.calls.marked_call_format import MarkedCallFormat
from quire.dialogue.calls.reading import CallNotation, CallReader, NotACallError
from quire.dialogue.events import AnswerEvent, ContentDelta, ReasoningDelta
from quire.dialogue.incoming_text import SPACE, IncomingText, Reading
from quire.dialogue.reasoning.formats import ExpectedReasoning


class MarkedAnswer:
    """Reads an answer.

    Args:
        text: text of the answer.
        calls: reads each call.
        emit: takes each event.
        call_format: in which the model calls tools; None: it has none to call.
        reasoning: with which the answer may begin; None: with none.
        content_marks: around content, and no part of it.
    """

    def __init__(
        self,
        text: IncomingText,
        calls: CallReader,
        emit: Callable[[AnswerEvent], None],
        call_format: MarkedCallFormat | None,
        reasoning: ExpectedReasoning | None,
        *,
        content_marks: tuple[str, ...],
    ) -> None:
        self._text = text
        self._calls = calls
        self._emit = emit
        self._format = call_format
        self._reasoning = reasoning
        self._content_marks = content_marks
        self._unsaid: list[str] = []  # white space after reasoning
        self._held: list[str] = []  # what may be calls in reasoning
        self._space: list[str] = []  # after content, or before anything
        self._has_content = False
        self._follows_mark = False  # of calls or content

    def read(self) -> Reading[None]:
        """Read the whole answer."""
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._format is not None:
            yield from self._read_start(self._format)
        if self._format is not None or self._content_marks:
            yield from self._read_content_and_calls(self._format)
        else:
            yield from self._read_content()
        if not self._follows_mark and any(self._space):
            self._emit(ContentDelta("".join(self._space)))

    def _read_reasoning(self, reasoning: ExpectedReasoning) -> Reading[None]:
        """Read the reasoning that begins the answer, if one does.

        Calls with which the answer ends before the reasoning does are left to be read: models forget its end.
        """
        space = yield from self._text.whole_run(SPACE)
        has_start = yield from self._text.match(reasoning.format.start)
        if not reasoning.is_open and not has_start:
            self._add_content(space)
            return
        yield from self._text.skip_space()
        end, marker = reasoning.format.end, ""
        begins = () if self._format is None or not self._format.closings else self._format.beginnings
        while marker != end:
            self._text.mark()
            if self._format is not None and marker in begins:
                marker, are_calls = yield from self._read_possible_calls(self._format, marker, end)
                if are_calls:
                    return
                continue
            piece, marker = yield from self._text.piece_before((end, *begins))
            if not piece and not marker:
                return
            self._say_reasoning(piece)
        yield from self._text.skip_space()

    def _read_possible_calls(
        self, call_format: MarkedCallFormat, beginning: str, end: str
    ) -> Reading[tuple[str, bool]]:
        """Read what may be calls in reasoning, and leave them to be read if the answer ends with them.

        Return the mark that has been read after it, the end of the reasoning or a beginning, and whether the
        answer ends with calls.
        """
        is_call = False
        while beginning:
            self._held.append(beginning)
            if beginning in call_format.openings:
                marker, is_call = yield from self._read_draft(call_format, beginning, end)
                if marker not in call_format.closings:
                    return marker, False
            self._held.append((yield from self._text.whole_run(SPACE)))
            beginning = yield from self._text.match(*call_format.beginnings)
        if is_call and not (yield from self._text.peek()) and not self._text.is_cut_off:
            self._text.add("".join(self._held))
            return "", True
        self._say_held()
        return "", False

    def _read_draft(
        self, call_format: MarkedCallFormat, beginning: str, end: str
    ) -> Reading[tuple[str, bool]]:
        """Read up to the next mark; return it, and whether the text is a call. What is none is reasoning."""
        notation = call_format.notation
        draft, first = _Draft(notation), beginning if beginning in notation.marks else ""
        others = tuple(mark for mark in call_format.beginnings if mark not in notation.marks)
        may_be_call, marker = True, ""
        while not marker:
            self._text.mark()
            piece, marker = yield from self._text.piece_before((end, *others, *call_format.closings))
            is_closed = marker in call_format.closings
            goes_on = is_closed or bool(piece and not marker)
            may_be_call = may_be_call and goes_on and draft.may_be_call(first + piece, is_whole=is_closed)
            first = ""
            self._held.append(piece + marker if is_closed else piece)
            if not may_be_call:
                self._say_held()
            if not piece and not marker:
                break
        return marker, may_be_call

    def _say_held(self) -> None:
        self._say_reasoning("".join(self._held))
        self._held.clear()

    def _say_reasoning(self, text: str) -> None:
        """Emit more reasoning; white space at the end only once something follows it."""
        if said := text.rstrip():
            self._emit(ReasoningDelta("".join(self._unsaid) + said))
            self._unsaid.clear()
        self._unsaid.append(text[len(said) :])

    def _read_content(self) -> Reading[None]:
        while piece := (yield from self._text.piece()):
            self._text.mark()
            self._add_content(piece)

    def _read_content_and_calls(self, call_format: MarkedCallFormat | None) -> Reading[None]:
        of_calls = () if call_format is None else call_format.beginnings
        markers = (*of_calls, *self._content_marks)
        while True:
            self._text.mark()
            before, marker = yield from self._text.piece_before(markers)
            if not marker and self._is_cut_off_mark(before, markers):
                return
            self._add_content(before)
            self._follows_mark |= marker in self._content_marks
            if call_format is not None and marker in call_format.openings:
                yield from self._read_calls(call_format, marker)
            if not before and not marker and not (yield from self._text.peek()):
                return

    def _read_start(self, call_format: MarkedCallFormat) -> Reading[None]:
        """Read calls that begin the answer without a mark."""
        if call_format.start:
            self._add_content((yield from self._text.whole_run(SPACE)))
            if (yield from self._text.peek()) in tuple(call_format.start):
                yield from self._read_calls(call_format, "")

    def _read_calls(self, call_format: MarkedCallFormat, opening: str) -> Reading[None]:
        """Read calls after the mark that begins them, and the mark that ends them."""
        num_before = self._calls.num_calls
        is_marked = bool(opening)
        if opening in call_format.notation.marks:  # it is the call's own
            self._text.unread(opening)
            opening = ""
        self._text.mark()
        remainder = ""
        try:
            yield from call_format.notation.read(self._calls)
        except NotACallError:
            remainder = self._text.since_mark()
        has_calls = self._calls.num_calls > num_before
        if (is_marked or has_calls or self._calls.is_open) and self._is_cut_off:
            if self._calls.is_open:
                self._calls.cut_off()
            yield from self._drop_rest()
            return
        if self._calls.is_open:
            self._calls.take_back()
        self._follows_mark |= has_calls
        self._add_content(remainder if has_calls else opening + remainder)
        if has_calls and not remainder and call_format.closings:
            yield from self._text.skip_space()
            yield from self._text.match(*call_format.closings)
            if self._is_cut_off:
                yield from self._drop_rest()

    @property
    def _is_cut_off(self) -> bool:
        """Whether something that was looked for may have begun when the answer was cut off."""
        return self._text.is_cut_off and self._text.has_run_out

    def _is_cut_off_mark(self, text: str, markers: Sequence[str]) -> bool:
        """Whether the last text after a mark may be the beginning of another."""
        is_last = self._follows_mark and self._text.is_cut_off
        return is_last and any(marker.startswith(text.strip()) for marker in markers)

    def _drop_rest(self) -> Reading[None]:
        """Leave out the beginning of a call, or of its mark, that is all that is left."""
        self._follows_mark = True
        yield from self._text.piece()

    def _add_content(self, text: str) -> None:
        """Emit more content; white space at the end only once something follows it."""
        if self._follows_mark:
            text = text.lstrip()
        said = text.rstrip()
        if not said:
            self._space += [text] if text else []
            return
        before = "" if self._follows_mark and not self._has_content else "".join(self._space)
        self._space[:] = [text[len(said) :]]
        self._has_content = True
        self._follows_mark = False
        self._emit(ContentDelta(before + said))


class _Draft:
    """Text in reasoning that may be a call.

    Args:
        notation: notation of the model's calls.
    """

    def __init__(self, notation: CallNotation) -> None:
        self._text = IncomingText()
        self._reading = self._read(notation)

    def may_be_call(self, more: str, *, is_whole: bool) -> bool:
        """Add a piece of the text; return whether it may be a call so far, or is one if it is whole."""
        self._text.add(more)
        if is_whole:
            self._text.end()
        try:
            next(self._reading, None)
        except NotACallError:
            return False
        return True

    def _read(self, notation: CallNotation) -> Reading[None]:
        yield from notation.read(CallReader(self._text, {}, False, []))
        yield from self._text.skip_space()
        if (yield from self._text.peek()):
            raise NotACallError
