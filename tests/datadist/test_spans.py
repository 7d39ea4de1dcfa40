from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.datadist import CacheDesc, DataType
from quire.datadist.caches import spans as spans_module
from quire.datadist.caches.memory import DeviceMemory, HostMemory
from quire.datadist.caches.spans import ByteSpans, block_spans, common_pieces, runs, slot_spans


def naive_bytes(spans: ByteSpans) -> list[tuple[int, int]]:
    """Each byte as (tensor, offset), in order."""
    return [
        (tensor, offset + index)
        for tensor in spans.tensors
        for offset, length in zip(spans.offsets.tolist(), spans.lengths.tolist(), strict=True)
        for index in range(length)
    ]


def flat(windows) -> list[tuple[int, int]]:
    return [
        (tensor, offset + index)
        for window in windows
        for tensor, offset, length in window
        for index in range(length)
    ]


some_spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6)


@given(parts=some_spans, first=st.integers(0, 2), count=st.integers(1, 3), data=st.data())
def test_windows_are_the_bytes_in_order_wherever_they_begin_and_end(parts, first, count, data):
    offsets, lengths = np.array(parts, dtype=np.int64).T
    spans = ByteSpans(range(first, first + count), offsets, lengths)
    everything = naive_bytes(spans)
    start = data.draw(st.integers(0, spans.num_bytes))
    stop = data.draw(st.integers(start, spans.num_bytes))
    assert spans.num_bytes == len(everything)
    assert flat(spans.windows(start, stop)) == everything[start:stop]


@given(parts=some_spans)
def test_windows_are_bounded(parts):
    offsets, lengths = np.array(parts, dtype=np.int64).T
    spans = ByteSpans(range(2), offsets, lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans_module, "WINDOW_BYTES", 5)
        patch.setattr(spans_module, "WINDOW_PARTS", 2)
        windows = list(spans.windows(0, spans.num_bytes))
    assert flat(windows) == naive_bytes(spans)
    assert all(len(window) <= 2 and sum(part[2] for part in window) <= 5 for window in windows)


@given(blocks=st.lists(st.integers(0, 20), max_size=12), tensors=st.integers(1, 3))
def test_runs_of_blocks_are_the_blocks(blocks, tensors):
    starts, counts = runs(np.array(blocks, dtype=np.int64))
    spans = block_spans(range(tensors), starts, counts, 3)
    assert naive_bytes(spans) == [
        (tensor, block * 3 + byte) for tensor in range(tensors) for block in blocks for byte in range(3)
    ]
    assert not np.any(starts[1:] == starts[:-1] + counts[:-1]), "neighbours are one run"


@pytest.mark.parametrize(
    ("tensors", "offset", "length", "is_within"),
    [
        (range(2), 0, 10, True),
        (range(1, 2), 9, 1, True),
        (range(3), 0, 10, False),
        (range(-1, 1), 0, 10, False),
        (range(2, 0, -1), 0, 10, False),
        (range(2), 1, 10, False),
        (range(2), -1, 5, False),
        (range(2), 0, 0, False),
        (range(2), 10, 1, False),
        (range(2), 2**63 - 1, 2**63 - 1, False),
    ],
)
def test_spans_beyond_a_cache_are_noticed(tensors, offset, length, is_within):
    assert slot_spans(tensors, offset, length).is_within(2, 10) is is_within


@given(parts=some_spans)
def test_memory_of_a_device_is_read_and_written_as_that_of_the_host(parts):
    desc = CacheDesc(2, [1, 60], DataType.DT_UINT8)
    host, device = HostMemory(desc), DeviceMemory(desc, torch.device("cpu"))
    for index, one in enumerate(device.tensor_bytes):
        one.copy_(torch.arange(60) + 100 * index)
    offsets, lengths = np.array(parts, dtype=np.int64).T
    spans = ByteSpans(range(2), offsets, lengths)
    for window in spans.windows(0, spans.num_bytes):
        sent = b"".join(device.outgoing(window))
        for mine, theirs in zip(host.incoming(window), window, strict=True):
            mine[:] = sent[: len(mine)]
            sent = sent[len(mine) :]
            assert len(mine) == theirs[2]
        back = device.incoming(window)
        back[0][:] = bytes(255 - byte for byte in b"".join(host.outgoing(window)))
        device.arrived(window, back)
    touched = set(naive_bytes(spans))
    for tensor in range(2):
        for byte in range(60):
            original = (byte + 100 * tensor) % 256
            is_touched = (tensor, byte) in touched
            if is_touched and len(touched) == spans.num_bytes:  # else a byte was turned more than once
                assert host.tensor_bytes[tensor][byte] == original
                assert device.tensor_bytes[tensor][byte] == 255 - original
            elif not is_touched:
                assert host.tensor_bytes[tensor][byte] == 0
                assert device.tensor_bytes[tensor][byte] == original


@given(source=some_spans, target=some_spans, limit=st.integers(1, 12))
def test_common_pieces_pair_the_bytes_of_both_in_order(source, target, limit):
    num_bytes = min(sum(length for _, length in parts) for parts in (source, target))

    def first_bytes(parts) -> ByteSpans:
        taken, left = [], num_bytes
        for offset, length in parts:
            if left:
                taken.append((offset, min(length, left)))
                left -= taken[-1][1]
        offsets, lengths = np.array(taken, dtype=np.int64).T
        return ByteSpans(range(1), offsets, lengths)

    spans = [first_bytes(parts) for parts in (source, target)]
    pieces = list(zip(*(one.tolist() for one in common_pieces(*spans, limit)), strict=True))
    assert all(0 < length <= limit for _, _, length in pieces)
    pairs = [(first + index, second + index) for first, second, length in pieces for index in range(length)]
    expected = zip(*([offset for _, offset in naive_bytes(one)] for one in spans), strict=True)
    assert pairs == list(expected)
