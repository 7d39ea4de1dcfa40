"""Writes texts that grow concurrently to one stream, in order."""

from __future__ import annotations

from typing import TextIO


class OrderedStreams:
    """Writes texts that grow concurrently as if they had been generated one after the other.

    The first unfinished text is written as it grows; later ones are held back until it is their turn.

    Args:
        stream: where to write; flushed after every write.
        headings: what to write before each text, one entry per text; "": nothing.
    """

    def __init__(self, stream: TextIO, headings: list[str]) -> None:
        self._stream = stream
        self._headings = headings
        self._texts = [""] * len(headings)
        self._finished = [False] * len(headings)
        self._current = 0
        self._written: int | None = None  # characters of the current text; None before its heading

    def update(self, index: int, text: str, *, finished: bool) -> None:
        """Set text `index` to `text`, which extends its previous value, and write what can be written."""
        self._texts[index] = text
        self._finished[index] = finished
        if index == self._current:
            self._write()

    def finish(self, index: int) -> None:
        """Mark text `index` as complete."""
        self.update(index, self._texts[index], finished=True)

    def close(self) -> None:
        """End the line if a text was interrupted."""
        if self._written is not None:
            self._written = None
            self._stream.write("\n")
            self._stream.flush()

    def _write(self) -> None:
        while self._current < len(self._texts):
            text = self._texts[self._current]
            finished = self._finished[self._current]
            if not text and not finished:
                break
            if self._written is None:
                self._stream.write(self._headings[self._current])
                self._written = 0
            self._stream.write(text[self._written :])
            self._written = len(text)
            if not finished:
                break
            if text or self._headings[self._current]:
                self._stream.write("\n")
            self._current += 1
            self._written = None
        self._stream.flush()
