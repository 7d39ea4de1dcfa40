"""Caps of pins: counts against a naive model, and what a scheduler pins beyond them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scene import Scene

from held import num_held
from quire.scheduling.accounts.kv_holdings import PinnedBlocks

PINS = st.tuples(st.sampled_from("abc"), st.sets(st.integers(0, 12), min_size=1, max_size=6).map(sorted))


@settings(max_examples=200)
@given(st.integers(0, 14), st.integers(0, 14), st.lists(PINS | st.integers(0, 9), max_size=30))
def test_counts_are_those_of_a_model_that_keeps_all_pins(most, most_of_tenant, calls):
    pinned, pins = PinnedBlocks(most, most_of_tenant), {}
    held = num_held(pinned)
    for number, call in enumerate(calls):
        if isinstance(call, int):
            if pins:
                pin_id = sorted(pins)[call % len(pins)]
                pinned.remove(pin_id, pins.pop(pin_id)[1])
            continue
        tenant, block_ids = call
        everyones = set(block_ids).union(*(held for _, held in pins.values()))
        own = set(block_ids).union(*(held for owner, held in pins.values() if owner == tenant))
        fits = len(everyones) <= most and len(own) <= most_of_tenant
        assert pinned.has_room(tenant, block_ids) == fits
        if fits:
            pins[f"pin-{number}"] = call
            pinned.add(f"pin-{number}", tenant, block_ids)
    for pin_id, (_, block_ids) in pins.items():
        pinned.remove(pin_id, block_ids)
    assert num_held(pinned) == held


def pin(scene, request_id, first, tenant):
    scene.add(request_id, range(first, first + 9), max_tokens=1, pin_prefix=1000.0, tenant=tenant)
    scene.finish_but_pins()
    return scene.scheduler.make_stats().num_leased_blocks


def test_pins_of_one_tenant_and_of_all_are_bounded():
    scene = Scene(num_blocks=16, max_pinned_share=0.4, max_pinned_share_per_tenant=0.3)
    assert pin(scene, "first", 0, "a") == 2
    assert pin(scene, "second", 10, "a") == 4
    assert pin(scene, "beyond its share", 20, "a") == 4
    assert pin(scene, "another's", 30, "b") == 6
    assert pin(scene, "beyond all", 40, "c") == 6
    scene.clock.advance(1001.0)
    assert pin(scene, "later", 20, "a") == 2


@pytest.mark.parametrize(("most", "ends_after"), [(50.0, 50.0), (5000.0, 1000.0), (0.0, 0.0)])
def test_a_pin_lasts_no_longer_than_the_limit(most, ends_after):
    scene = Scene(max_pin_time=most)
    pin(scene, "pinned", 0, "a")
    if ends_after:
        scene.clock.advance(ends_after - 1)
        scene.step()
        assert scene.scheduler.make_stats().num_leased_blocks == 2
    scene.clock.advance(1.5)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 0
