"""Asynchronous loads into caches that have a group with a window."""

from __future__ import annotations

import numpy as np
import pytest
from scene import Scene

from faulty_connector import FaultyConnector
from quire.kv.blocks.groups import NULL_BLOCK, WindowBlocks

WINDOW = 8  # tokens, two blocks
LONG = range(49)  # its load has 12 blocks, and needs two of the window's group


def scene_of(num_window_blocks: int = 8, *, window: int = WINDOW, **options) -> Scene:
    fields = {name: options.pop(name) for name in list(options) if name in ("send_steps", "load_steps")}
    connector = FaultyConnector(4, by_group=True, **{"load_steps": 2, **fields})
    windows = (WindowBlocks(window, 1 + num_window_blocks),)
    sizes = {"num_blocks": 48, "max_num_batched_tokens": 8, **options}
    return Scene(connector=connector, windows=windows, **sizes)


def stored(scene: Scene, tokens=LONG) -> None:
    """Have the connector store a prompt, and the prefix cache forget it."""
    scene.add("before", tokens, max_tokens=1)
    scene.finish()
    scene.scheduler.reset_prefix_cache()


def load_of(scene: Scene, name: str):
    return scene.scheduler.accounts.loads.get(name)


def test_a_prompt_far_longer_than_the_pool_of_the_window_is_loaded():
    scene = scene_of()
    stored(scene)
    scene.add("a", LONG)
    scene.step()
    table = load_of(scene, "a").block_ids
    assert table.shape == (2, 12)
    assert np.flatnonzero(table[1] != NULL_BLOCK).tolist() == [10, 11]
    scene.finish()
    assert scene.scheduler.make_stats().num_loaded_tokens == 48
    scene.check_naive()


@pytest.mark.parametrize("num_good", [0, 3, 6])
def test_a_load_of_which_a_block_fails_ends_where_all_groups_serve_it(num_good):
    """That is the local prefix: behind it, the load has only the last blocks of the window."""
    scene = scene_of()
    stored(scene)
    scene.add("local", range(20), max_tokens=1)
    scene.finish()
    found = scene.scheduler.make_stats().num_loaded_tokens
    scene.connector.fail_next_loads(1, num_good_blocks=num_good)
    scene.add("a", LONG)
    scene.step()
    assert load_of(scene, "a").num_local_blocks == 5
    scene.finish()
    stats = scene.scheduler.make_stats()
    assert (stats.num_failed_loads, stats.num_loaded_tokens - found) == (1, 0)
    assert scene.cached["a"] == 20
    scene.check_naive()


def test_what_fits_only_without_a_load_is_computed():
    """Local prefix and load would each have four blocks in the window, and there are seven."""
    scene = scene_of(7, window=16, max_num_batched_tokens=4)
    stored(scene)
    scene.add("local", range(20), max_tokens=1)
    scene.finish()
    found = scene.scheduler.make_stats().num_loaded_tokens
    scene.add("a", LONG)
    scene.step()
    assert load_of(scene, "a") is None
    scene.finish()
    assert scene.scheduler.make_stats().num_loaded_tokens == found
    scene.check_naive()


def test_who_shares_only_a_part_of_a_load_does_not_wait_for_it():
    scene = scene_of(num_window_blocks=24, max_num_seqs=3)
    stored(scene)
    scene.connector.never_answer_next_loads(1)
    scene.add("a", LONG)
    scene.step()
    scene.add("part", [*range(40), 1, 2, 3, 4, 5], max_tokens=1)
    scene.add("all", [*LONG, 7], max_tokens=1)
    scene.step()
    assert load_of(scene, "part") is not None  # a load of its own
    assert load_of(scene, "all") is None
    assert scene.requests["all"].awaited_load == load_of(scene, "a").number
    scene.connector.answer()
    scene.finish()
    assert scene.cached["all"] == 48
    scene.check_naive()


def test_a_reset_while_a_load_is_on_its_way():
    scene = scene_of()
    stored(scene)
    scene.add("a", LONG)
    scene.step()
    scene.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    scene.finish()
    assert scene.scheduler.make_stats().num_loaded_tokens == 0
    scene.check_naive()


def test_a_lender_that_does_not_fit_with_what_it_keeps_starts_again_without():
    scene = scene_of(num_window_blocks=6, send_steps=1)
    scene.add("a", range(9), max_tokens=30)
    scene.finish()
    assert scene.scheduler.make_stats().num_preemptions == 1
    scene.check_naive()
