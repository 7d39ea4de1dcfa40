"""Every operation that moves KV, between sides of each two roles that can be linked."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import sides
from conformance import row
from pairs import TRANSPORTS
from sides import byte_desc, pattern, read_cache, register_new, write_cache

from quire.datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    KvCache,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

PROMPT, DECODER, MIX = LLMRole.PROMPT, LLMRole.DECODER, LLMRole.MIX
SUCCESS = LLMStatusCode.LLM_SUCCESS
INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK

DESC = byte_desc(3)
SOURCE, TARGET = 1, 2  # the slot or block that is copied, and where it goes

Made = tuple[str, str]
"""Whether a cache's memory was allocated or registered, and whether it has slots or blocks."""


class Side:
    """A side with a cache of each kind."""

    def __init__(self, datadist: LLMDataDist) -> None:
        self.datadist = datadist
        self.manager = datadist.cache_manager
        self.id = datadist.cluster_id
        key = None if datadist.role is DECODER else BlocksCacheKey(self.id, 1)
        self.caches: dict[Made, KvCache] = {
            ("allocated", "slots"): self.manager.allocate_cache(DESC),
            ("allocated", "blocks"): self.manager.allocate_blocks_cache(DESC, key),
            ("registered", "slots"): register_new(self.manager, DESC, seed=0, is_blocks=False),
            ("registered", "blocks"): register_new(self.manager, DESC, BlocksCacheKey(self.id, 2), seed=0),
        }

    def id_key(self, made: Made, slot: int) -> CacheKeyByIdAndIndex:
        """Return what names a slot, or a blocks cache."""
        return CacheKeyByIdAndIndex(self.id, self.caches[made].cache_id, slot if made[1] == "slots" else 0)

    def blocks_key(self, made: Made) -> BlocksCacheKey:
        return BlocksCacheKey(self.id, 1 if made[0] == "allocated" else 2)


Operation = Callable[[Side, Made, Side, Made], Any]
"""Of a side with a cache of its own, and a peer with one."""


def pull_cache(me: Side, mine: Made, peer: Side, theirs: Made) -> None:
    me.manager.pull_cache(peer.id_key(theirs, SOURCE), me.caches[mine], TARGET)


def pull_blocks(me: Side, mine: Made, peer: Side, theirs: Made) -> None:
    me.manager.pull_blocks(peer.id_key(theirs, 0), me.caches[mine], [SOURCE], [TARGET])


def pull_keyed_blocks(me: Side, mine: Made, peer: Side, theirs: Made) -> None:
    me.manager.pull_blocks(peer.blocks_key(theirs), me.caches[mine], [SOURCE], [TARGET])


def push_cache(me: Side, mine: Made, peer: Side, theirs: Made) -> None:
    me.manager.push_cache(peer.id_key(theirs, TARGET), me.caches[mine], SOURCE)


def push_blocks(me: Side, mine: Made, peer: Side, theirs: Made) -> None:
    me.manager.push_blocks(peer.id_key(theirs, 0), me.caches[mine], [SOURCE], [TARGET])


def push_keyed_blocks(me: Side, mine: Made, peer: Side, theirs: Made) -> None:
    me.manager.push_blocks(peer.blocks_key(theirs), me.caches[mine], [SOURCE], [TARGET])


def transfer_by_key(me: Side, mine: Made, peer: Side, theirs: Made) -> LLMStatusCode:
    key = peer.id_key(theirs, TARGET)
    return transfer(me, mine, TransferWithCacheKeyConfig(key, src_batch_index=SOURCE))


def transfer_by_address(me: Side, mine: Made, peer: Side, theirs: Made) -> LLMStatusCode:
    offset = TARGET * DESC.slot_bytes if theirs[1] == "slots" else 0
    addresses = [address + offset for address in peer.caches[theirs].tensor_addrs]
    return transfer(me, mine, TransferConfig(peer.id, addresses, src_batch_index=SOURCE))


def transfer(me: Side, mine: Made, config: Any) -> LLMStatusCode:
    blocks = ([SOURCE], [TARGET]) if mine[1] == "blocks" else ()
    task = me.manager.transfer_cache_async(me.caches[mine], sides.Layers(), [config], *blocks)
    return task.synchronize(sides.PATIENT)


OPERATIONS: dict[Operation, tuple[str, ...]] = {
    pull_cache: ("slots",),
    pull_blocks: ("blocks",),
    pull_keyed_blocks: ("blocks",),
    push_cache: ("slots",),
    push_blocks: ("blocks",),
    push_keyed_blocks: ("blocks",),
    transfer_by_key: ("slots", "blocks"),
    transfer_by_address: ("slots", "blocks"),
}
"""With what they move."""

PULLS = (pull_cache, pull_blocks, pull_keyed_blocks)


@dataclasses.dataclass(frozen=True)
class Cell:
    """An operation on two caches."""

    operation: Operation
    mine: Made
    theirs: Made

    def run(self, me: Side, peer: Side) -> LLMStatusCode:
        try:
            return self.operation(me, self.mine, peer, self.theirs) or SUCCESS
        except LLMException as error:
            return error.status_code

    def expected(self, me: LLMRole, peer: LLMRole, *, has_linked: bool) -> LLMStatusCode:
        """Return what the page says of a side of one role that has linked to the other, or the reverse."""
        if self.operation in PULLS:
            if me is PROMPT:
                return INVALID
            return SUCCESS if has_linked else NOT_LINKED
        is_allowed = me is not DECODER and (not has_linked or peer is MIX)
        if not is_allowed:
            return INVALID
        if self.theirs[0] == "registered" or self.operation is transfer_by_address:
            return SUCCESS
        is_named_by_id = self.operation is not push_keyed_blocks
        return INVALID if is_named_by_id or peer is not DECODER else NOT_EXIST  # it cannot have such a key


def cells() -> Iterator[Cell]:
    for operation, layouts in OPERATIONS.items():
        for mine, theirs, layout in itertools.product(*[("allocated", "registered")] * 2, layouts):
            yield Cell(operation, (mine, layout), (theirs, layout))


@pytest.mark.formats
@pytest.mark.first_case
@row("role MIX", "push_cache", "push_blocks", "transfer_cache_async")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("linking", "listening"), [(DECODER, PROMPT), (DECODER, MIX), (MIX, PROMPT), (MIX, MIX)]
)
def test_each_operation_moves_the_bytes_or_is_refused(new_datadist, linking, listening, transport):
    first, second = new_datadist(linking, 1), new_datadist(listening, 2)
    first.init(sides.options(transport=transport))
    second.init(sides.options(transport=transport, listen="127.0.0.1:0"))
    assert first.link_clusters([sides.cluster_info(2, second.listen_port)], sides.PATIENT)[0] is SUCCESS
    client, server = Side(first), Side(second)
    for seed, (cell, has_linked) in enumerate(itertools.product(cells(), (True, False))):
        me, peer = (client, server) if has_linked else (server, client)
        what = cell, me.datadist.role, peer.datadist.role
        ends = [(me.manager, me.caches[cell.mine]), (peer.manager, peer.caches[cell.theirs])]
        source, target = reversed(ends) if cell.operation in PULLS else ends
        write_cache(*source, 2 * seed)
        write_cache(*target, 2 * seed + 1)
        code = cell.run(me, peer)
        assert code is cell.expected(*what[1:], has_linked=has_linked), what
        expected = pattern(DESC, 2 * seed + 1)
        if code is SUCCESS:
            expected[:, TARGET] = pattern(DESC, 2 * seed)[:, SOURCE]
        np.testing.assert_array_equal(read_cache(*target), expected, str(what))
    first.check_link_status(2)  # no refusal has broken it
    assert first.unlink_clusters([sides.cluster_info(2, 0)], sides.PATIENT)[0] is SUCCESS
    assert not sides.transports_of(second)
