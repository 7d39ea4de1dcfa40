"""Which blocks go, step by step, against a naive version; where the others lie; how far they move."""

from __future__ import annotations

import numpy as np
import pytest

from naive_eviction import NaiveLayer, naive_diversity
from quire.config import (
    AdaptiveRKVConfig,
    AggregationMode,
    CacheEvictionConfig,
    KVCrushAnchorPointMode,
    KVCrushConfig,
    SchedulerConfig,
    ScorePooling,
)
from quire.kv.eviction.diversity import diversity
from quire.kv.eviction.lengths import EvictionLengths, eviction_lengths
from quire.kv.eviction.places import BlockPlaces, positions_to_move_back
from quire.kv.eviction.scores import MaxPooling
from quire.kv.eviction.selection import BlockSelection

BLOCK = 4
NUM_LAYERS = 3
NUM_HEADS, HEAD_DIM = 2, 8


def config_of(
    mode, *, window=8, budget=0, anchor=KVCrushAnchorPointMode.RANDOM, pooling="forward", **adaptive
):
    return CacheEvictionConfig(
        start_size=BLOCK,
        recent_size=2 * BLOCK,
        max_cache_size=8 * BLOCK,
        aggregation_mode=mode,
        snapkv_window_size=window,
        score_pooling=pooling,
        kvcrush_config=KVCrushConfig(budget=budget, anchor_point_mode=anchor, rng_seed=7) if budget else None,
        adaptive_rkv_config=AdaptiveRKVConfig(**adaptive) if adaptive else None,
    )


class Comparison:
    """One sequence of random weights and keys, by both versions; tokens are numbered from 0."""

    def __init__(self, config, seed, *, ties=False, share_of_zeros=0.0) -> None:
        self.config = config
        self.random = np.random.default_rng(seed)
        self.ties, self.share_of_zeros = ties, share_of_zeros
        self.lengths = EvictionLengths(config, BLOCK)
        self.selection = BlockSelection(config, self.lengths, NUM_LAYERS)
        anchors = np.random.Generator(np.random.PCG64(7))
        self.naive = [NaiveLayer(config, BLOCK, anchors) for _ in range(NUM_LAYERS)]
        self.held = np.zeros((NUM_LAYERS, 0), dtype=np.int64)  # tokens of each layer, in order
        self.keys = self.random.normal(size=(NUM_LAYERS, NUM_HEADS, 400, HEAD_DIM)).astype(np.float32)
        self.num_known = 0
        self.num_evictions = 0

    def step(self, num_new: int, window: int | None = 1) -> None:
        new = np.arange(self.num_known, self.num_known + num_new)
        self.num_known += num_new
        self.held = np.concatenate((self.held, np.tile(new, (NUM_LAYERS, 1))), axis=1)
        weights = self.random.random(self.held.shape, dtype=np.float32)
        if self.ties:
            weights = np.floor(weights * 3).astype(np.float32)
        weights *= self.random.random(self.held.shape) >= self.share_of_zeros
        self.selection.register(weights, num_new if window is None else window)
        for layer, naive in enumerate(self.naive):
            of_token = dict(zip(self.held[layer].tolist(), weights[layer].tolist(), strict=True))
            naive.see(new.tolist(), of_token.get, window)
        self.evict()

    def evict(self) -> None:
        num_held = self.held.shape[1]
        count = int(self.lengths.num_blocks_to_evict(np.array([num_held]))[0])
        expected = [naive.evict(self.keys[layer]) for layer, naive in enumerate(self.naive)]
        assert all(len(tokens) == count * BLOCK for tokens in expected)
        if not count:
            return
        evicted = self.selection.choose(num_held, self.diversity)
        blocks = self.held[:, : num_held // BLOCK * BLOCK].reshape(NUM_LAYERS, -1, BLOCK)
        for layer, tokens in enumerate(expected):
            assert set(blocks[layer, evicted[layer]].ravel().tolist()) == tokens
            assert (np.diff(evicted[layer]) > 0).all()
        self.selection.remove(evicted, num_held)
        self.held = np.array([naive.held for naive in self.naive])
        self.num_evictions += 1

    def diversity(self, layer, blocks, rest):
        tokens = self.held[layer].reshape(-1)[blocks[:, None] * BLOCK + np.arange(BLOCK)].ravel()
        return diversity(self.keys[layer][:, tokens], BLOCK, rest)


def run(config, *, prompt, steps=40, seed=0, **weights):
    comparison = Comparison(config, seed, **weights)
    window = config.snapkv_window_size
    comparison.step(prompt, min(window, prompt) if window else None)
    for _ in range(steps):
        comparison.step(1)
    return comparison


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("mode", AggregationMode)
@pytest.mark.parametrize("prompt", [3, 36, 75])
@pytest.mark.parametrize("window", [0, 8, 40])
def test_every_mode_evicts_what_the_naive_version_evicts(mode, prompt, window):
    comparison = run(config_of(mode, window=window), prompt=prompt)
    assert comparison.num_evictions >= 2


@pytest.mark.parametrize("mode", AggregationMode)
@pytest.mark.parametrize("prompt", [3, 75])
def test_centered_scores_evict_what_the_naive_version_evicts(mode, prompt):
    assert run(config_of(mode, pooling="centered"), prompt=prompt).num_evictions >= 2


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("anchor", KVCrushAnchorPointMode)
@pytest.mark.parametrize(
    ("budget", "mode", "prompt"), [(1, "norm_sum", 20), (2, "sum", 75), (5, "norm_sum", 75)]
)
def test_kvcrush_retains_what_the_naive_version_retains(anchor, budget, mode, prompt):
    comparison = run(config_of(mode, budget=budget, anchor=anchor), prompt=prompt)
    overflows = prompt > 40 or budget == 1
    most = 8 * BLOCK + BLOCK - 1 + (budget * BLOCK if overflows else 0)
    assert most - BLOCK < comparison.held.shape[1] <= most


@pytest.mark.parametrize("mode", ["sum", "norm_sum"])
@pytest.mark.parametrize("anchor", KVCrushAnchorPointMode)
def test_of_equal_scores_the_first_block_goes(mode, anchor):
    run(config_of(mode, budget=2, anchor=anchor), prompt=70, steps=20, ties=True)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(("mass", "window_size"), [(0.05, 3), (0.4, 1), (0.4, 30), (1.0, 3)])
def test_adaptive_rkv_shares_the_places_between_mass_and_diversity(mass, window_size):
    config = config_of("adaptive_rkv", attention_mass=mass, window_size=window_size, budget=2)
    assert run(config, prompt=60, seed=3).num_evictions > 5


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("mass", [0.3, 1.0])
@pytest.mark.parametrize("share_of_zeros", [0.97, 1.0])
def test_adaptive_rkv_keeps_no_block_for_a_mass_of_zero(mass, share_of_zeros):
    """Where nothing is attended to, all places go to the most diverse blocks."""
    config = config_of("adaptive_rkv", attention_mass=mass, window_size=2)
    assert run(config, prompt=60, share_of_zeros=share_of_zeros).num_evictions > 5


def evicted_of_prompt(config, weights, chunks):
    """The tokens that the naive version evicts of a prompt whose chunks are each registered by themselves."""
    naive = NaiveLayer(config, BLOCK, None)
    window = config.snapkv_window_size
    first_scoring = max(len(weights) - window, 0) if window else 0
    start = 0
    for end in chunks:
        queries = range(max(start, first_scoring), end)
        if queries:
            sums = weights[queries, :end].sum(axis=0).tolist()
            naive.see(list(range(start, end)), sums.__getitem__, len(queries) if window else None)
        else:
            naive.held += range(start, end)
        start = end
    keys = np.random.default_rng(1).normal(size=(NUM_HEADS, len(weights), HEAD_DIM))
    return naive.evict(keys)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("mode", AggregationMode)
@pytest.mark.parametrize("window", [0, 8])
def test_registering_each_chunk_is_the_same_if_one_has_all_queries_that_score(mode, window):
    """OpenVINO GenAI registers each chunk of a prompt; Quire adds them up, see docs/cache-eviction.md."""
    config, num_differing = config_of(mode, window=window, attention_mass=0.5), 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        prompt = int(random.integers(44, 76))
        weights = np.tril(random.random((prompt, prompt)) ** 8)
        cuts = np.sort(
            random.choice(np.arange(1, prompt), int(random.integers(1, 4)), replace=False)
        ).tolist()
        whole, in_chunks = (evicted_of_prompt(config, weights, ends) for ends in ([prompt], [*cuts, prompt]))
        assert whole
        if window and prompt - cuts[-1] >= window:
            assert whole == in_chunks
        else:
            num_differing += whole != in_chunks
    assert num_differing


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("num_rest", [1, 20, 75])
def test_diversity_is_that_of_the_whole_matrix_of_similarities(num_rest):
    keys = np.random.default_rng(5).normal(size=(3, 600, 6)).astype(np.float32)
    blocks = np.arange(600).reshape(-1, 4)[:75]
    rest = np.arange(2, 75, 1 + 75 // num_rest)
    expected = naive_diversity(keys, blocks.tolist())[rest][:, blocks[rest].ravel()].mean(axis=1)
    np.testing.assert_allclose(diversity(keys[:, :300], 4, rest), expected, atol=1e-4 / len(rest))


@pytest.mark.parametrize(
    ("width", "before"), [(1, 0), (2, 0), (3, 0), (7, 0), (12, 0), (2, 1), (7, 3), (7, 6)]
)
@pytest.mark.parametrize("length", [1, 5, 7, 30])
def test_max_pooling_looks_ahead_and_back(width, before, length):
    values = np.random.default_rng(width).normal(size=(2, length))
    expected = [
        [max(row[max(i - before, 0) : i - before + width]) for i in range(length)] for row in values.tolist()
    ]
    np.testing.assert_array_equal(MaxPooling(width, before).of(values), expected)


def test_the_end_of_an_attended_passage_stays_with_it_only_if_pooling_is_centered():
    """The weight is on the last token of a block, and what it belongs to goes on in the next."""
    kept = {}
    for pooling in ScorePooling:
        config = config_of("sum", pooling=pooling)
        selection = BlockSelection(config, EvictionLengths(config, BLOCK), 1)
        weights = np.full((1, 12 * BLOCK), 0.01, dtype=np.float32)
        weights[0, 7 * BLOCK - 1 :] = 0.0
        weights[0, 7 * BLOCK - 1] = 1.0
        selection.register(weights, 1)
        evicted = selection.choose(12 * BLOCK, lambda *_: pytest.fail("no diversity is asked for"))
        kept[pooling] = set(range(1, 10)) - set(evicted[0].tolist())
    assert {5, 6} <= kept["forward"]
    assert {6, 7} <= kept["centered"]
    assert 7 not in kept["forward"]
    assert len(kept["centered"]) == len(kept["forward"]) == 5


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
@pytest.mark.parametrize("prompt", [1, 20, 35, 36, 50, 75])
def test_lengths_agree_with_evicting_token_by_token(budget, prompt):
    lengths = EvictionLengths(config_of("sum", budget=budget), BLOCK)

    def evicted(held):
        return int(lengths.num_blocks_to_evict(np.array([held]))[0]) * BLOCK

    held, most = prompt, prompt
    held -= evicted(held)
    assert evicted(held) == 0
    for _ in range(80):
        announced = int(lengths.tokens_until_eviction(np.array([held]))[0])
        num_steps = 0
        while not num_steps or not evicted(held):
            held, num_steps = held + 1, num_steps + 1
            most = max(most, held)
        assert num_steps == announced
        held -= evicted(held)
    assert most == int(lengths.max_held(np.array([prompt]), np.array([9999]))[0])
    assert int(lengths.max_held(np.array([prompt]), np.array([prompt]))[0]) == prompt


def test_without_eviction_there_are_no_lengths():
    assert eviction_lengths(SchedulerConfig()) is None
    lengths = eviction_lengths(SchedulerConfig(use_cache_eviction=True))
    assert (lengths.num_start_blocks, lengths.num_recent_blocks, lengths.num_evictable_blocks) == (2, 8, 32)


@pytest.mark.parametrize("seed", range(5))
def test_each_layer_keeps_its_blocks_in_order_though_they_lie_elsewhere(seed):
    random = np.random.default_rng(seed)
    num_start, num_layers = 2, 4
    places = BlockPlaces(num_layers, num_start)
    table = [[] for _ in range(num_layers)]  # what is at each place, by layer
    order = [[] for _ in range(num_layers)]  # what is to be there, in order
    serial = 0
    for _ in range(12):
        for _ in range(int(random.integers(1, 6))):
            for layer in range(num_layers):
                table[layer].append(serial)
                order[layer].append(serial)
            serial += 1
        num_blocks = len(table[0])
        assert [[table[i][place] for place in row] for i, row in enumerate(places.of(num_blocks))] == order
        choices = range(num_start, num_blocks)
        if not choices:
            continue
        count = int(random.integers(1, len(choices) + 1))
        evicted = np.array([np.sort(random.choice(choices, count, replace=False)) for _ in range(num_layers)])
        moves = places.evict(evicted, num_blocks)
        assert not set(zip(moves.layers, moves.sources, strict=True)) & set(
            zip(moves.layers, moves.targets, strict=True)
        )
        for layer, source, target in zip(moves.layers, moves.sources, moves.targets, strict=True):
            table[layer][target] = table[layer][source]
        for layer in range(num_layers):
            del table[layer][num_start : num_start + count]
            order[layer] = [block for i, block in enumerate(order[layer]) if i not in evicted[layer]]
            assert sorted(table[layer]) == sorted(order[layer])
        are_in_order = all(table[layer] == order[layer] for layer in range(num_layers))
        assert places.are_in_order == are_in_order


def test_blocks_move_back_by_what_went_before_them():
    evicted = np.array([[1, 3], [4, 5]])
    moved = positions_to_move_back(evicted, 7, block_size=8)
    assert moved.tolist() == [[0, 8, 16, 16, 16], [0, 0, 0, 0, 16]]
