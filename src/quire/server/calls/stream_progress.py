"""Streams that survive their server: a router keeps their progress, and another server goes on from there.

A router asks for the progress of a stream (`PROGRESS`). Each piece of the stream then ends with a comment,
whose lines are: in the first one, its `StreamStart`; for each output of the engine that the piece was made
of, that output's new tokens. If the server dies, the router sends the request to another one, with the
lines of the pieces that came whole behind the body, and their length in `CONTINUATION`. That server repeats
the outputs, which gives the same events, and its engine continues; the router passes on the events that its
client does not have. The tokens are those of an uninterrupted stream, since they depend only on the prompt,
the parameters and the seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request

from quire.errors import InvalidRequestError
from quire.front.continuation import SequenceOutput
from quire.front.text.input_processor import ProcessedRequest
from quire.request_output import RequestOutput
from quire.server.wire.bodies import CONTINUATION

PROGRESS = "X-Quire-Progress"
"""Header of a request for a stream, and of the answer: the stream has its progress in comments."""

COMMENT = b":"
LINE = b"\n:"
"""Between two lines of a comment."""
END = b"\n\n"


class StreamStart(msgspec.Struct, array_like=True, frozen=True):
    """What another server must know besides the request to make the same events.

    Args:
        answer_id: the answer's id.
        created: when the answer was begun, in seconds since the epoch.
        seed: the seed of the request's first completion.
    """

    answer_id: Annotated[str, Meta(pattern=r"\A[!-~]{1,256}\Z")]
    created: int
    seed: int


class StreamSoFar:
    """The progress of a stream that another server has begun.

    Args:
        lines: what the comments of the stream have in their lines, in order.

    Raises:
        InvalidRequestError: they are not those of a stream.
    """

    def __init__(self, lines: Sequence[bytes]) -> None:
        first, *others = lines
        try:
            self.start = msgspec.json.decode(first, type=StreamStart)
            self.outputs = [_decode_output(one) for one in others]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(
                f"what is behind the body is no progress of a stream: {error}", param=CONTINUATION
            ) from None


_decode_output = msgspec.json.Decoder(list[SequenceOutput]).decode
_encode = msgspec.json.Encoder().encode


def stream_so_far(request: Request) -> StreamSoFar | None:
    """Return the progress of the stream that a request continues; None: it is new."""
    progress: bytes | None = request.scope["state"].get("progress")
    return None if progress is None else StreamSoFar(progress.split(b"\n"))


class StreamProgress:
    """Writes the progress of one stream.

    Args:
        answer_id: as in `StreamStart`.
        created: as in `StreamStart`.
    """

    def __init__(self, answer_id: str, created: int) -> None:
        self._answer_id = answer_id
        self._created = created
        self._unsent: list[bytes] = []
        self._num_tokens: dict[int, int] = {}
        self._ended: set[int] = set()

    def begin(self, processed: ProcessedRequest) -> None:
        """Note the engine's request, before its first output."""
        self._unsent = [_encode(StreamStart(self._answer_id, self._created, processed.core_request.seeds[0]))]

    def note(self, prompt_index: int, output: RequestOutput) -> None:
        """Note an output, before the piece that is made of it."""
        new: list[SequenceOutput] = []
        for one in output.outputs:
            if one.index in self._ended:
                continue
            start, self._num_tokens[one.index] = self._num_tokens.get(one.index, 0), len(one.token_ids)
            if one.finish_reason is not None:
                self._ended.add(one.index)
            new.append(
                SequenceOutput(one.index, list(one.token_ids[start:]), one.finish_reason, one.stop_reason)
            )
        self._unsent.append(_encode(new))

    async def after(self, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the stream, each with what it adds to the progress after it."""
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                lines, self._unsent = self._unsent or [b""], []
                yield b"".join([piece, COMMENT, LINE.join(lines), END])
