"""Leases against a naive model that keeps a plain dictionary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from held import num_held
from quire.kv.blocks.leases import LeaseKind, LeaseTable

ids = st.sampled_from([f"lease-{number}" for number in range(6)])
times = st.integers(0, 20)
blocks = st.lists(st.integers(0, 30), unique=True, max_size=5)


def in_groups(block_ids: Sequence[int]) -> np.ndarray:
    """The blocks of one group, and those of another beside them."""
    return np.array([block_ids, [block_id + 100 for block_id in block_ids]], dtype=np.int32)


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.naive: dict[str, tuple[LeaseKind, tuple[int, ...], float]] = {}

    @rule(lease_id=ids, kind=st.sampled_from(LeaseKind), block_ids=blocks, deadline=times)
    def grant(self, lease_id, kind, block_ids, deadline):
        if lease_id in self.naive:
            with pytest.raises(ValueError, match="held already"):
                self.table.grant(lease_id, kind, in_groups(block_ids), deadline)
            return
        self.table.grant(lease_id, kind, in_groups(block_ids), deadline)
        self.naive[lease_id] = (kind, tuple(block_ids), deadline)

    @rule(lease_id=ids, deadline=times)
    def renew(self, lease_id, deadline):
        assert self.table.renew(lease_id, deadline) == (lease_id in self.naive)
        if lease_id in self.naive:
            *rest, before = self.naive[lease_id]
            self.naive[lease_id] = (*rest, max(before, deadline))

    @rule(lease_id=ids)
    def release(self, lease_id):
        lease, expected = self.table.release(lease_id), self.naive.pop(lease_id, None)
        assert (lease is None) == (expected is None)
        if lease is not None:
            assert np.array_equal(lease.block_ids, in_groups(expected[1]))
            assert (lease.kind, lease.deadline) == (expected[0], expected[2])

    @rule(now=times)
    def expired(self, now):
        due = self.table.expired(now)
        assert sorted(due) == sorted(name for name, lease in self.naive.items() if lease[2] <= now)
        assert [self.naive[name][2] for name in due] == sorted(self.naive[name][2] for name in due)
        assert sorted(self.table.expired(now)) == sorted(due)

    @rule()
    def break_pins(self):
        pins = [name for name, lease in self.naive.items() if lease[0] is LeaseKind.PIN and lease[1]]
        empty = {name for name, lease in self.naive.items() if lease[0] is LeaseKind.PIN and not lease[1]}
        broken = {lease.lease_id: lease.block_ids for lease in self.table.break_pins()}
        assert set(pins) <= set(broken) <= set(pins) | empty
        for name, block_ids in broken.items():
            assert np.array_equal(block_ids, in_groups(self.naive.pop(name)[1]))

    @invariant()
    def same_blocks(self):
        assert Counter(block for held in self.table.held() for block in held[0].tolist()) == Counter(
            b for _, held, _ in self.naive.values() for b in held
        )
        assert len(self.table) == len(self.naive)
        for kind in LeaseKind:
            held = [lease[1] for lease in self.naive.values() if lease[0] is kind]
            assert self.table.num_blocks(kind) == sum(map(len, held))

    @invariant()
    def same_description(self):
        described = {summary.kind: summary for summary in self.table.describe()}
        for kind in LeaseKind:
            leases = [lease for lease in self.naive.values() if lease[0] is kind]
            assert (kind in described) == bool(leases)
            if leases:
                summary = described[kind]
                assert summary.num_leases == len(leases)
                assert summary.num_blocks == len({b for _, held, _ in leases for b in held})
                assert summary.last_deadline == max(deadline for *_, deadline in leases)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=30)


@given(st.integers(1, 400))
@settings(max_examples=5)
def test_heartbeats_leave_no_trace(count: int):
    table = LeaseTable()
    table.grant("peer", LeaseKind.TRANSFER, in_groups([1, 2]), 0.0)
    held = num_held(table)
    for beat in range(count):
        table.renew("peer", float(beat))
        table.renew("peer", beat - 0.5)
        assert table.expired(beat - 1.0) == []
    assert num_held(table) <= held + 100


def test_short_leases_beside_a_long_one_leave_no_trace():
    table = LeaseTable()
    table.grant("pinned", LeaseKind.PIN, in_groups([0]), 1e9)
    held = num_held(table)
    for number in range(1000):
        table.grant(f"transfer-{number}", LeaseKind.TRANSFER, in_groups([1]), 1e8)
        table.release(f"transfer-{number}")
    assert num_held(table) <= held + 100
