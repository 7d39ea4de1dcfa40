"""The spans of bytes of a cache to transfer, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

Window = list[tuple[int, int, int]]
"""Parts moved by one system call: tensor, offset and length in bytes."""

WINDOW_BYTES = 4 << 20  # large enough to make the cost of calls negligible
WINDOW_PARTS = 512  # a system call takes at most 1,024


@dataclasses.dataclass(frozen=True)
class ByteSpans:
    """The same spans of bytes in each of several tensors: tensor by tensor, span by span.

    Attributes:
        tensors: indices of the tensors, step 1.
        offsets: offsets of the spans in a tensor, in bytes [N].
        lengths: lengths of the spans, in bytes [N].
    """

    tensors: range
    offsets: Int64Array
    lengths: Int64Array

    @property
    def num_bytes(self) -> int:
        """Bytes of all spans in all tensors."""
        return len(self.tensors) * int(self.lengths.sum())

    def is_within(self, num_tensors: int, tensor_bytes: int) -> bool:
        """Return whether all of these bytes are within `num_tensors` tensors of `tensor_bytes` bytes each."""
        ends = self.offsets + self.lengths
        return (
            0 <= self.tensors.start <= self.tensors.stop <= num_tensors
            and self.tensors.step == 1
            and bool(np.all((self.offsets >= 0) & (self.lengths > 0)))
            and bool(np.all((ends > self.offsets) & (ends <= tensor_bytes)))
        )

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """Yield the bytes from `start` to `stop`, counted in order over all tensors, in windows."""
        window: Window = []
        room = WINDOW_BYTES
        for tensor, offset, length in self._parts(start, stop):
            done = 0
            while done < length:
                taken = min(length - done, room)
                window.append((tensor, offset + done, taken))
                done += taken
                room -= taken
                if not room or len(window) == WINDOW_PARTS:
                    yield window
                    window, room = [], WINDOW_BYTES
        if window:
            yield window

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        ends = np.cumsum(self.lengths)
        tensor_bytes = int(ends[-1]) if len(ends) else 0
        for number, tensor in enumerate(self.tensors):
            first = max(start - number * tensor_bytes, 0)
            last = min(stop - number * tensor_bytes, tensor_bytes)
            if first >= last:
                continue
            begin = int(np.searchsorted(ends, first, side="right"))
            end = int(np.searchsorted(ends, last, side="left")) + 1
            rows = zip(
                self.offsets[begin:end].tolist(),
                self.lengths[begin:end].tolist(),
                ends[begin:end].tolist(),
                strict=True,
            )
            for offset, length, span_end in rows:
                skipped = max(first - (span_end - length), 0)
                yield tensor, offset + skipped, length - skipped - max(span_end - last, 0)


def slot_spans(tensors: range, offset: int, num_bytes: int) -> ByteSpans:
    """Return one span of each tensor."""
    return ByteSpans(tensors, np.array([offset], dtype=np.int64), np.array([num_bytes], dtype=np.int64))


def block_spans(tensors: range, starts: Int64Array, counts: Int64Array, block_bytes: int) -> ByteSpans:
    """Return the spans of runs of adjacent blocks, as `runs` returns them."""
    return ByteSpans(tensors, starts * block_bytes, counts * block_bytes)


def part_spans(blocks: Int64Array, block_bytes: int, offset: int, num_bytes: int) -> ByteSpans:
    """Return the same part of each block in the first tensor, in order; whole blocks in runs."""
    if num_bytes == block_bytes:
        return block_spans(range(1), *runs(blocks), block_bytes)
    return ByteSpans(range(1), blocks * block_bytes + offset, np.full(len(blocks), num_bytes, dtype=np.int64))


def runs(blocks: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return starts and lengths of the runs of adjacent blocks, in order."""
    is_start = np.ones(len(blocks), dtype=bool)
    is_start[1:] = np.diff(blocks) != 1
    begins = np.flatnonzero(is_start)
    counts = np.diff(np.append(begins, len(blocks)))
    return blocks[begins], counts


def common_pieces(
    source: ByteSpans, target: ByteSpans, max_bytes: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Split spans of equal total length into pieces that lie in one span of both.

    Returns:
        Offset in the source, offset in the target, and length of each piece, in bytes, of any one tensor.
    """
    source_ends, target_ends = np.cumsum(source.lengths), np.cumsum(target.lengths)
    cuts = np.arange(max_bytes, target_ends[-1], max_bytes, dtype=np.int64)
    ends = np.unique(np.concatenate([source_ends, target_ends, cuts]))
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])

    def offsets(spans: ByteSpans, span_ends: Int64Array) -> Int64Array:
        span = np.searchsorted(span_ends, starts, side="right")
        found: Int64Array = spans.offsets[span] + starts - (span_ends - spans.lengths)[span]
        return found

    return offsets(source, source_ends), offsets(target, target_ends), ends - starts
