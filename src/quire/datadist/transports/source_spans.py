"""Spans of a source, sent by a PROMPT to a DECODER that reads it directly."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from quire.datadist.caches.spans import ByteSpans
from quire.datadist.wire.protocol import MAX_BLOCK_RUNS, ProtocolError, decode_runs

EncodedSpans = Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCK_RUNS * 16)]
"""First byte and number of bytes of each span, as `protocol.encode_runs` returns them."""


def decode_source_spans(
    encoded: EncodedSpans, num_tensors: int, tensor_bytes: int, target: ByteSpans
) -> ByteSpans:
    """Return the spans of a source of `num_tensors` tensors of `tensor_bytes` bytes each.

    Raises:
        ProtocolError: they are not within the source, or not as long as `target`.
    """
    offsets, lengths = decode_runs(encoded)
    spans = ByteSpans(range(num_tensors), offsets, lengths)
    if (
        bool((lengths > int(target.lengths.sum())).any())  # an overflowing sum becomes negative
        or bool((np.cumsum(lengths) <= 0).any())
        or num_tensors != len(target.tensors)
        or not spans.is_within(num_tensors, tensor_bytes)
        or spans.num_bytes != target.num_bytes
    ):
        raise ProtocolError("the peer's spans are not within its tensors, or not as long as the destination")
    return spans
