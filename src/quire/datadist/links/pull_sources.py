"""The source of a pull on the PROMPT, checked against its caches."""

from __future__ import annotations

import dataclasses

from quire.datadist.caches.cache_desc import CacheDesc
from quire.datadist.caches.cache_holds import SourceHold
from quire.datadist.caches.cache_keys import CacheKey
from quire.datadist.caches.cache_pool import CachePool
from quire.datadist.caches.memory import CacheMemory
from quire.datadist.caches.spans import ByteSpans, block_spans, slot_spans
from quire.datadist.enums import DataType
from quire.datadist.status import LLMStatusCode, failure, invalid
from quire.datadist.wire.protocol import (
    BlocksSource,
    KeySource,
    LayerRange,
    NumberedBlocksSource,
    PullRequest,
    SlotSource,
    decode_runs,
)
from quire.datadist.wire.push_protocol import (
    AddressedTarget,
    PushRequest,
)


@dataclasses.dataclass(frozen=True)
class PullSource:
    """Bytes of a cache, held until `hold` ends."""

    hold: SourceHold[CacheMemory]
    spans: ByteSpans


def open_pull_source(pool: CachePool[CacheMemory], epoch: int, request: PullRequest) -> PullSource:
    """Hold the source named in a request.

    Raises:
        LLMException: LLM_NOT_YET_LINK, LLM_KV_CACHE_NOT_EXIST, LLM_PARAM_INVALID; nothing is held.
    """
    require_epoch(epoch, request.epoch)
    hold = hold_place(pool, request.source)
    try:
        return PullSource(
            hold,
            spans_of(hold, request.source, request, layer_argument="src_layer_range", offset=request.offset),
        )
    except BaseException:
        hold.end(consume=False)
        raise


def require_epoch(epoch: int, requested: int) -> None:
    """Raise `LLMException` (LLM_NOT_YET_LINK) if a request is for another start of the PROMPT."""
    if requested != epoch:
        raise failure(LLMStatusCode.LLM_NOT_YET_LINK, "the PROMPT has been restarted since it was linked")


def hold_place(
    pool: CachePool[CacheMemory], source: KeySource | SlotSource | BlocksSource | NumberedBlocksSource
) -> SourceHold[CacheMemory]:
    """Hold the cache named in a peer's request.

    Raises:
        LLMException: LLM_KV_CACHE_NOT_EXIST, LLM_PARAM_INVALID; nothing is held.
    """
    if isinstance(source, KeySource):
        return pool.hold_key(CacheKey(0, source.req_id, source.model_id, source.prefix_id))
    if isinstance(source, BlocksSource):
        return pool.hold_blocks(source.model_id)
    if isinstance(source, NumberedBlocksSource):
        return pool.hold_numbered_blocks(source.cache_id)
    return pool.hold_slot(source.cache_id, source.batch_index)


def spans_of(
    hold: SourceHold[CacheMemory],
    place: KeySource | SlotSource | BlocksSource | NumberedBlocksSource,
    request: PullRequest | PushRequest,
    *,
    layer_argument: str,
    offset: int = 0,
) -> ByteSpans:
    """Return the bytes named in a peer's request, checked to be within the cache.

    Args:
        hold: the hold of the cache.
        place: where in it.
        request: what the peer says of its own cache.
        layer_argument: name of the peer's argument with the range of layers.
        offset: first byte in a slot.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    desc = hold.cache.desc
    tensors = _tensors(desc, request, layer_argument)
    if isinstance(place, (BlocksSource, NumberedBlocksSource)):
        spans = block_spans_of(desc, tensors, place, request.num_bytes)
    else:
        assert hold.slot is not None
        spans = _slot_spans(desc, tensors, hold.slot, offset, request.num_bytes)
    if not spans.is_within(desc.num_tensors, desc.tensor_bytes):
        raise invalid(f"the request reaches beyond the peer's cache, which is {desc}")
    return spans


def require_data_type(desc: CacheDesc, request: PullRequest | PushRequest) -> None:
    """Raise `LLMException` (LLM_PARAM_INVALID) if a request has another data type."""
    if request.data_type != desc.data_type:
        raise invalid(
            f"the peer's cache has {desc.data_type.name}, not {DataType(request.data_type).name}"
            if request.data_type in tuple(DataType)
            else f"there is no data type {request.data_type}"
        )


def _tensors(desc: CacheDesc, request: PullRequest | PushRequest, layer_argument: str) -> range:
    require_data_type(desc, request)
    tensors = layer_tensors(layer_argument, request.layers, desc.num_tensors)
    if len(tensors) != request.num_tensors:
        raise invalid(f"{len(tensors)} tensors of the peer's cache do not match {request.num_tensors}")
    return tensors


def layer_tensors(name: str, layers: LayerRange | None, num_tensors: int) -> range:
    """Return the tensors of a range of layers, or all.

    Raises:
        LLMException: LLM_PARAM_INVALID; the message has the argument's `name`.
    """
    if layers is None:
        return range(num_tensors)
    per_layer = layers.tensors_per_layer
    if not 1 <= per_layer <= num_tensors or num_tensors % per_layer:
        raise invalid(f"tensor_num_per_layer is {per_layer}, which does not divide {num_tensors} tensors")
    if not 0 <= layers.start < layers.stop <= num_tensors // per_layer:
        raise invalid(
            f"{name} is {layers.start}..{layers.stop} of {num_tensors // per_layer} layers; it must be within"
        )
    return range(layers.start * per_layer, layers.stop * per_layer)


def _slot_spans(desc: CacheDesc, tensors: range, slot: int, offset: int, num_bytes: int) -> ByteSpans:
    if num_bytes < 1 or offset + num_bytes > desc.slot_bytes:
        raise invalid(
            f"{num_bytes} bytes from byte {offset} are not within the peer's slot, which has "
            f"{desc.slot_bytes}; pass a size"
        )
    return slot_spans(tensors, slot * desc.slot_bytes + offset, num_bytes)


def block_spans_of(
    desc: CacheDesc,
    tensors: range,
    source: BlocksSource | NumberedBlocksSource | AddressedTarget,
    num_bytes: int,
) -> ByteSpans:
    """Return the spans of the blocks named in a peer's request, checked to be within the cache.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    if source.block_bytes != desc.slot_bytes:
        raise invalid(f"blocks of the peer's cache have {desc.slot_bytes} bytes, not {source.block_bytes}")
    starts, counts = decode_runs(source.runs)
    num_blocks = desc.batch_size
    is_within = (starts >= 0) & (counts > 0) & (counts <= num_blocks) & (starts <= num_blocks - counts)
    if not is_within.all():
        raise invalid(f"a block is out of range: the peer's cache has {num_blocks}")
    if int(counts.sum()) * desc.slot_bytes != num_bytes:
        raise invalid(f"{int(counts.sum())} blocks are not {num_bytes} bytes")
    return block_spans(tensors, starts, counts, desc.slot_bytes)
