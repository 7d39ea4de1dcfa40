"""KV blocks that no running request holds: those of leases, and those of loads whose request waits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from quire.config import SchedulerConfig
from quire.kv.blocks.leases import Lease, LeaseKind, LeaseSummary, LeaseTable
from quire.kv.blocks.manager import KVCacheManager
from quire.request import Request
from quire.scheduling.accounts.remote_loads import RemoteLoads
from quire.scheduling.accounts.steps_in_flight import Fences
from quire.scheduling.guards.connector_calls import ConnectorCalls
from quire.scheduling.guards.context import StepClock
from quire.step import IntArray


class KVHoldings:
    """Takes and drops the references of leases and loads.

    Args:
        config: has the time limits of transfers and pins, and the shares of the blocks that pins may hold.
        kv: has the blocks.
        loads: loads whose request does not run yet.
        fences: hold the blocks of a cancelled load back.
        connector: gets cancelled loads, and transfers that have ended.
        clock: of deadlines.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        loads: RemoteLoads,
        fences: Fences,
        connector: ConnectorCalls,
        clock: StepClock,
    ) -> None:
        self._kv = kv
        self._loads = loads
        self._fences = fences
        self._connector = connector
        self._clock = clock
        self._transfer_timeout = config.kv_transfer_timeout
        self._max_pin_time = config.max_pin_time
        self._pinned = PinnedBlocks(
            int(config.max_pinned_share * kv.pools.first.num_blocks),
            int(config.max_pinned_share_per_tenant * kv.pools.first.num_blocks),
        )
        self._leases = LeaseTable()
        self._held_states: dict[str, bytes] = {}  # by lease: the digest before the checkpoint that it holds

    @property
    def transfer_deadline(self) -> float:
        """When a load or a transfer that starts now times out (seconds)."""
        return self._clock.now + self._transfer_timeout

    # -- leases --------------------------------------------------------------------------------------------

    def has_lease(self, request_id: str) -> bool:
        """Whether a peer may still read the blocks of a request that has ended."""
        return request_id in self._leases

    def pin(self, request: Request) -> None:
        """Hold what is cached of a request's prompt, if pins may hold so much.

        Pins of the same blocks are one, to the later end.
        """
        block_ids, digest = self._kv.find_full_blocks(request.request_id, request.prompt_array)
        if not block_ids.size:
            return
        lease_id = f"pin {digest.hex()}"
        deadline = self._clock.now + min(request.pin_prefix, self._max_pin_time)
        held = block_ids[0].tolist()
        if not self._leases.renew(lease_id, deadline) and self._pinned.has_room(request.tenant, held):
            self._kv.pools.acquire(block_ids)
            self._leases.grant(lease_id, LeaseKind.PIN, block_ids, deadline)
            self._pinned.add(lease_id, request.tenant, held)

    def hold_for_peer(self, request_id: str, block_ids: IntArray, state: bytes | None) -> None:
        """Hold the blocks [G, blocks] of a request that ends until a peer has read them.

        So is the checkpoint behind the block with the digest `state`, if that is not None.
        """
        self._kv.pools.acquire(block_ids)
        if self._kv.checkpoints is not None and state is not None:
            self._kv.checkpoints.hold(state)
            self._held_states[request_id] = state
        self._leases.grant(request_id, LeaseKind.TRANSFER, block_ids, self.transfer_deadline)

    def renew(self, request_ids: Iterable[str]) -> None:
        """Put off the deadlines of transfers whose peer has been heard of."""
        for request_id in request_ids:
            self._leases.renew(request_id, self.transfer_deadline)

    def end_lease(self, lease_id: str) -> None:
        """Free the blocks of a lease, if it is still held."""
        lease = self._leases.release(lease_id)
        if lease is not None:
            self._free(lease)
            if lease.kind is LeaseKind.TRANSFER:
                self._connector.end_lease(lease_id)

    def end_expired_leases(self) -> None:
        """Free the blocks of the leases whose deadline has passed."""
        for lease_id in self._leases.expired(self._clock.now):
            self.end_lease(lease_id)

    def next_lease_end(self) -> float | None:
        """Return when the next lease ends unless it is renewed (seconds); None: there is none."""
        return self._leases.next_deadline()

    def end_all_leases(self) -> None:
        """Free the blocks of all leases."""
        for lease_id in self._leases.expired(math.inf):
            self.end_lease(lease_id)

    def break_pins(self) -> bool:
        """Free all pinned blocks; whether there were any."""
        pins = self._leases.break_pins()
        for pin in pins:
            self._free(pin)
        return bool(pins)

    def _free(self, lease: Lease) -> None:
        """Drop the references of a lease that has ended."""
        if lease.kind is LeaseKind.PIN:
            self._pinned.remove(lease.lease_id, lease.block_ids[0].tolist())
        self._kv.pools.release(lease.block_ids[:, ::-1])
        state = self._held_states.pop(lease.lease_id, None)
        if self._kv.checkpoints is not None and state is not None:
            self._kv.checkpoints.let_go(state)

    # -- loads ---------------------------------------------------------------------------------------------

    def drop_load(self, request_id: str) -> None:
        """Give up what a waiting request has loaded or is loading, if anything.

        A transfer that is under way may write to its blocks until the runner has seen that it is cancelled.
        """
        load = self._loads.pop(request_id)
        if load is None:
            return
        if load.has_arrived:
            self._kv.pools.release(load.block_ids[:, ::-1])
        else:
            self._fences.fence_blocks(request_id, load.block_ids, load.checkpoint)
            self._connector.cancel_load(request_id)

    def drop_newest_load(self, spared: Request | None = None) -> bool:
        """Give up the newest load that has arrived, but not that of `spared`; False if there is none."""
        load = self._loads.newest_arrived(spared)
        if load is not None:
            self.drop_load(load.request.request_id)
        return load is not None

    def cancel_loads_again(self, step: int) -> None:
        """Cancel once more the loads that steps up to `step` cancelled: the runner may not have seen it."""
        for request_id in self._fences.refence_blocks(step):
            self._connector.cancel_load(request_id)

    def loading_checkpoints(self) -> list[int]:
        """Return the checkpoints that loads may write to."""
        loading = [load.checkpoint for load in self._loads if load.checkpoint >= 0]
        return loading + self._fences.held_checkpoints()

    # -- accounts ------------------------------------------------------------------------------------------

    @property
    def num_leased_blocks(self) -> int:
        """Number of blocks held by leases, each counted once for every lease that holds it."""
        return sum(map(self._leases.num_blocks, LeaseKind))

    @property
    def num_blocks_held_for_peers(self) -> int:
        """Number of blocks held by transfers."""
        return self._leases.num_blocks(LeaseKind.TRANSFER)

    @property
    def num_blocks_in_transfer(self) -> int:
        """Number of blocks that come back by themselves: a peer reads them, or a load writes to them."""
        return self._fences.num_blocks + self._loads.num_loading_blocks + self.num_blocks_held_for_peers

    def describe_leases(self) -> list[LeaseSummary]:
        """Return, for each kind of lease that is held, how many blocks and until when."""
        return self._leases.describe()

    def held_blocks(self) -> Iterator[IntArray]:
        """Yield the blocks [G, blocks] of every holder that is not a running request: for invariant 2."""
        yield from self._leases.held()
        yield from self._loads.held()
        yield from self._fences.held_blocks()


class PinnedBlocks:
    """Counts pinned blocks, each once however many pins hold it, and bounds them.

    Args:
        most: blocks that all pins may hold.
        most_of_tenant: blocks that the pins of one tenant may hold.
    """

    def __init__(self, most: int, most_of_tenant: int) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._all: Counter[int] = Counter()  # pins by block
        self._by_tenant: dict[str, Counter[int]] = {}  # of those that have pins
        self._owners: dict[str, str] = {}  # tenants by pin

    def has_room(self, tenant: str, block_ids: Sequence[int]) -> bool:
        """Whether a pin of these blocks would be within the bounds."""
        own = self._by_tenant.get(tenant, Counter())
        return _num_held(self._all, block_ids) <= self._most and (
            _num_held(own, block_ids) <= self._most_of_tenant
        )

    def add(self, pin_id: str, tenant: str, block_ids: Sequence[int]) -> None:
        """Count a pin that is not counted yet."""
        self._owners[pin_id] = tenant
        for held in (self._all, self._by_tenant.setdefault(tenant, Counter())):
            held.update(block_ids)

    def remove(self, pin_id: str, block_ids: Sequence[int]) -> None:
        """Count a pin no more."""
        tenant = self._owners.pop(pin_id)
        for held in (self._all, self._by_tenant[tenant]):
            held.subtract(block_ids)
            for block_id in block_ids:
                if not held[block_id]:
                    del held[block_id]
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


def _num_held(held: Counter[int], block_ids: Sequence[int]) -> int:
    return len(held) + sum(block_id not in held for block_id in block_ids)
