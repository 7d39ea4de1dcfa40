"""The tier in a Mooncake store: a block is read as it was written or not at all, in bounded time."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_disk_tier import KEYS, LAYOUT, PAYLOAD, keys_of, read, write

from mooncake_faults import blocks_in, break_store, use_fake_mooncake
from quire.kv.blocks.state_pieces import piece_keys
from quire.kv.tiers.mooncake import client as mooncake_client
from quire.kv.tiers.mooncake import tier as mooncake_tier
from quire.kv.tiers.mooncake.client import MAX_BACKOFF, StoreClient
from quire.kv.tiers.mooncake.tier import MooncakeTier

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        use_fake_mooncake(patch)
        patch.setattr(mooncake_client, "CALL_TIMEOUT", 60.0)  # also on a busy machine
        patch.setattr(mooncake_client, "SETUP_TIMEOUT", 60.0)
        patch.setattr(mooncake_tier, "SETUP_TIMEOUT", 60.0)
        yield patch


class Bench:
    """A tier, its store, and the clock of its back-off."""

    def __init__(self, store: Path, identity: bytes = b"model") -> None:
        self.now = 0.0
        self.store = store
        setup = {"metadata_server": str(store), "global_segment_size": 0}
        self.client = StoreClient(setup, LAYOUT.header_bytes + PAYLOAD, clock=lambda: self.now)
        self.tier = MooncakeTier(self.client, LAYOUT, lambda: identity, min_uses=1)

    def find(self, keys=KEYS, num_pieces=0) -> int:
        """Return how many of the first blocks are known to be there after a search."""
        self.tier.search(keys, num_pieces).exception(60)
        return self.tier.residents.count_leading(keys)

    def recover(self) -> None:
        """End the faults and the back-off."""
        break_store(self.store, "")
        self.wait_for_searches()
        self.now += MAX_BACKOFF
        self.tier.refresh()
        self.wait_for_searches()
        assert self.tier.is_readable

    def wait_for_searches(self) -> None:
        self.tier._searches.call(lambda: None).result(60)

    def close(self) -> None:
        self.tier.close()


@pytest.fixture
def bench(patch, tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def lasting(patch, tmp_path_factory):
    """A bench for many faults, each of which it has to recover from."""
    bench = Bench(tmp_path_factory.mktemp("store"))
    yield bench
    bench.close()


@pytest.mark.representative
def test_blocks_are_found_by_all_tiers_with_the_same_identity_and_by_no_others(bench, tmp_path):
    prefix = keys_of(0)
    assert all(write(bench.tier, key) for key in prefix)
    same, other = Bench(tmp_path), Bench(tmp_path, b"other model")
    assert not read(same.tier, prefix[0]), "not looked for yet"
    assert same.find(prefix) == 4
    assert all(read(same.tier, key) for key in prefix)
    assert other.find(prefix) == 0
    bench.tier.clear()
    assert bench.find(prefix) == 0, "the weights may have changed"
    assert write(bench.tier, prefix[0])
    assert len(blocks_in(tmp_path)) == 5
    same.close()
    other.close()
    assert not same.tier.is_readable


def test_the_deepest_state_that_is_whole_is_found_with_its_block(bench, tmp_path):
    prefix = keys_of(0)
    states = [piece_keys(prefix[index], 3) for index in (0, 1, 3)]
    assert all(write(bench.tier, key) for key in [*prefix, *states[0], *states[1], *states[2][:2]])
    same = Bench(tmp_path)
    assert same.find(prefix, 3) == 4
    found = [same.tier.residents.count_leading(state) for state in states]
    assert found == [0, 3, 2], "none is looked for behind one that is whole"
    for path in blocks_in(tmp_path):
        if path.name.endswith(states[1][2].digest.hex()):
            path.unlink()
    same.find(prefix, 3)
    assert [same.tier.residents.count_leading(state) for state in states] == [3, 2, 2]
    same.close()


@pytest.mark.first_case
@pytest.mark.parametrize("fault", ["raise", "error", "text", "more", "empty", "huge"])
def test_a_call_that_fails_begins_a_backoff_and_changes_nothing(lasting, fault):
    lasting.recover()
    key, missing = keys_of(0)[0], keys_of(7)[0]
    for operation, try_it in (
        ("get", lambda: read(lasting.tier, key)),
        ("put", lambda: write(lasting.tier, missing)),
        ("exist", lambda: lasting.find([missing])),
    ):
        write(lasting.tier, key)
        assert lasting.find([key]) == 1
        break_store(lasting.store, f"{operation}={fault}")
        assert not try_it()
        assert lasting.tier.is_readable == (operation == "put" and fault in ("error", "huge"))
        assert not lasting.tier.is_writable
        break_store(lasting.store, "")
        assert not read(lasting.tier, key) or operation == "put"
        lasting.tier.refresh()
        lasting.recover()


def damage(content: bytes) -> bytes:
    return content[:5000] + b"damage" + content[5006:]


@pytest.mark.first_case
@pytest.mark.parametrize(
    "change",
    [damage, lambda content: content[:-1], lambda content: b"", lambda content: bytes(len(content))],
    ids=["damaged", "short", "empty", "zeros"],
)
def test_what_is_damaged_is_not_read_and_is_removed(lasting, change):
    lasting.recover()
    key = keys_of(0)[0]
    write(lasting.tier, key)
    [path] = blocks_in(lasting.store)
    path.write_bytes(change(path.read_bytes()))
    assert lasting.find([key]) == 1
    assert not read(lasting.tier, key)
    assert not path.exists()
    lasting.recover()
    assert write(lasting.tier, key)
    assert read(lasting.tier, key)


def test_a_block_in_the_place_of_another_is_not_read(bench):
    first, second = keys_of(0)[:2]
    assert write(bench.tier, first)
    [path] = blocks_in(bench.store)
    assert write(bench.tier, second)
    [other] = set(blocks_in(bench.store)) - {path}
    other.write_bytes(path.read_bytes())
    assert read(bench.tier, first)
    assert not read(bench.tier, second)


def test_what_the_store_has_evicted_is_forgotten(bench):
    prefix = keys_of(0)
    for key in prefix:
        write(bench.tier, key)
    for path in blocks_in(bench.store)[1:]:
        path.unlink()
    assert bench.find(prefix) <= 1


def test_a_full_store_is_read_and_not_written_until_the_next_refresh(bench):
    first, second = keys_of(0)[:2]
    write(bench.tier, first)
    break_store(bench.store, "put=full")
    assert not write(bench.tier, second)
    break_store(bench.store, "")
    assert bench.tier.is_readable
    assert not write(bench.tier, second)
    bench.tier.refresh()
    assert write(bench.tier, second)
    assert read(bench.tier, first)


@pytest.mark.representative
def test_calls_that_hang_take_bounded_time_and_the_client_is_replaced_in_the_end(bench, monkeypatch):
    monkeypatch.setattr(mooncake_client, "CLOSE_TIMEOUT", 0.1)
    keys = keys_of(0, 12)
    for key in keys:
        assert write(bench.tier, key)
    break_store(bench.store, "get=hang")
    with monkeypatch.context() as patch:
        patch.setattr(mooncake_client, "CALL_TIMEOUT", 0.1)
        for key in keys[: mooncake_client.MAX_HANGS]:
            bench.now += MAX_BACKOFF
            assert bench.tier.is_readable
            assert not read(bench.tier, key)
            assert not bench.tier.is_readable
    bench.now += MAX_BACKOFF
    assert bench.client.is_connected
    assert not read(bench.tier, keys[-1])
    assert not bench.client.is_connected
    bench.recover()
    assert bench.find(keys) == 12
    assert read(bench.tier, keys[0])


@pytest.mark.first_case
@pytest.mark.parametrize("operation", ["get", "put", "exist"])
def test_after_a_crash_of_the_client_another_joins(bench, operation):
    first, second = keys_of(0)[:2]
    write(bench.tier, first)
    break_store(bench.store, f"{operation}=crash")
    if operation == "put":
        assert not write(bench.tier, second)
    elif operation == "get":
        assert not read(bench.tier, first)
    else:
        bench.find([second])
    assert not bench.tier.is_readable
    bench.recover()
    assert bench.find([first]) == 1
    assert read(bench.tier, first)


@pytest.mark.first_case
@pytest.mark.parametrize("fault", ["error", "raise", "hang", "crash"])
@pytest.mark.parametrize(
    ("operation", "last_operation"), [("setup", "unregister_buffer"), ("register_buffer", "close")]
)
def test_a_store_that_cannot_be_joined_or_left_takes_bounded_time(
    patch, monkeypatch, tmp_path, operation, last_operation, fault
):
    monkeypatch.setattr(mooncake_client, "CLOSE_TIMEOUT", 0.1)
    break_store(tmp_path, f"{operation}={fault}")
    with monkeypatch.context() as context:
        if fault == "hang":
            context.setattr(mooncake_client, "SETUP_TIMEOUT", 0.1)
        bench = Bench(tmp_path)
    assert not bench.tier.is_readable
    assert not write(bench.tier, KEYS[0])
    bench.recover()
    assert write(bench.tier, KEYS[0])
    break_store(tmp_path, f"{last_operation}={fault}")
    bench.close()
    assert not bench.client.is_connected
