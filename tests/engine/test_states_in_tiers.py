"""Tiers keep the states of recurrent layers with the KV: the same bits, whatever of both comes from there."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import make_checkpoint
from hybrid_engines import BLOCK_SIZE, LENGTHS, SCHEDULER, Engine, prompts
from insides import always_load, connector_of, tier_of, wait_until_written
from quire.config import EngineConfig, KVTierConfig, SchedulerConfig
from quire.engine.memory.plan import plan_memory
from quire.errors import ConfigError, KVFileError
from quire.kv.blocks.block_hash import SequenceKeys, root_digest
from quire.kv.blocks.state_pieces import piece_keys
from quire.models.checkpoints.config_reading import read_model_config
from quire.recording.replay import replay

FULL = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS]
"""Tokens in front of the last one of each prompt that fill blocks."""

FAMILIES = [
    "lfm2",
    *(pytest.param(name, marks=pytest.mark.formats) for name in ("qwen3_5", "granitemoehybrid")),
]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / request.param
    return make_checkpoint(request.param, directory, max_position_embeddings=512)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[Any]]:
    engine = Engine(path)
    return [engine.answers([prompt])[0] for prompt in prompts()]


def with_tier(path: Path, directory: Path | None = None, **options: Any) -> Engine:
    kind = {"kv_tier": "memory"} if directory is None else {"kv_tier": "disk", "kv_tier_path": str(directory)}
    fields = {name: options.pop(name) for name in list(options) if name.startswith("kv_tier")}
    tiering = KVTierConfig(**{"kv_tier_size": 0.1, "kv_tier_min_uses": 1, **kind, **fields})
    engine = Engine(path, kv_tiering=tiering, num_linear_attention_blocks=40, **options)
    always_load(connector_of(engine.core))
    return engine


def forget(engine: Engine) -> None:
    """Have an engine forget all but what its tier has."""
    wait_until_written(engine.core)
    assert engine.core.scheduler.reset_prefix_cache()


def state_keys(engine: Engine, prompt: np.ndarray, num_tokens: int) -> list[Any]:
    keys = SequenceKeys(root_digest(), BLOCK_SIZE)
    keys.extend(prompt.astype(np.int32))
    num_pieces = connector_of(engine.core)._num_pieces
    return piece_keys(keys[num_tokens // BLOCK_SIZE - 1], num_pieces)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_steps": True},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 32, "max_num_seqs": 3},
        {"kv_tier_min_uses": 2},
    ],
    ids=["plain", "overlapped", "small steps", "preempted", "second use"],
)
def test_prompts_are_loaded_up_to_their_last_full_block_with_the_same_bits(path, expected, options):
    engine = with_tier(path, **options)
    for _ in range(2):
        assert engine.answers(prompts()) == expected
    forget(engine)
    before = engine.stats
    assert engine.answers(prompts()) == expected
    if "num_kv_blocks" not in options:
        assert engine.stats.num_loaded_tokens - before.num_loaded_tokens == sum(FULL)
    assert engine.stats.num_failed_loads == 0


def test_a_restarted_engine_begins_behind_states_on_disk(path, expected, tmp_path):
    for number, directory in enumerate([tmp_path] * 2):
        engine = with_tier(path, directory, kv_tier_memory_size=0.01 * number)
        assert engine.answers(prompts()) == expected
        assert engine.stats.num_loaded_tokens == number * sum(FULL)
        engine.core.shutdown()


def test_a_longer_prompt_begins_behind_the_deepest_state_that_the_tier_has(path, expected):
    engine = with_tier(path)
    prompt = prompts()[0]
    engine.answers([prompt])
    forget(engine)
    longer = np.concatenate((prompt[:-3], [11, 12, 13, 14, 15, 16]))
    assert engine.answers([longer]) == Engine(path).answers([longer])
    # The last state before the end of the other prompt is where an interval of 4 blocks ends.
    num_common = (len(prompt) - 3) // (4 * BLOCK_SIZE) * 4 * BLOCK_SIZE
    assert engine.stats.num_loaded_tokens == num_common


@pytest.mark.parametrize("options", [{}, {"overlap_steps": True}], ids=str)
def test_where_only_a_state_is_gone_little_more_than_that_is_loaded(path, expected, options):
    engine = with_tier(path, **options)
    engine.answers(prompts())
    for num_kept in (0, 2):
        wait_until_written(engine.core)
        pool, before = engine.checkpoints, engine.stats
        pool.forget_contents()
        for prompt in prompts()[:num_kept]:
            engine.answers([prompt])
        assert engine.answers(prompts()) == expected
        assert engine.stats.num_loaded_tokens - before.num_loaded_tokens == len(LENGTHS) * BLOCK_SIZE
        assert engine.stats.num_failed_loads == 0


def test_prompts_in_a_burst_share_a_load_with_its_state(path, expected):
    engine = with_tier(path)
    prompt = prompts()[0]
    engine.answers([prompt])
    forget(engine)
    assert engine.answers([prompt] * 3) == expected[:1] * 3
    assert engine.stats.num_loaded_tokens == FULL[0]


def test_without_its_state_a_prefix_is_computed(path, expected):
    engine = with_tier(path, cache_interval_multiplier=64)
    prompt, residents = prompts()[0], tier_of(connector_of(engine.core)).residents
    engine.answers([prompt])
    forget(engine)
    lost = state_keys(engine, prompt, FULL[0])[-1]
    residents.drop(lost, residents.place_of(lost))
    assert engine.answers([prompt]) == expected[:1]
    assert engine.stats.num_loaded_tokens == 0
    forget(engine)
    assert engine.answers([prompt]) == expected[:1], "what was missing has been stored again"
    assert engine.stats.num_loaded_tokens == FULL[0]


@pytest.mark.parametrize("fault", ["raises", "damaged", "gone"])
@pytest.mark.parametrize("overlap_steps", [False, True])
def test_a_state_that_cannot_be_read_costs_time_and_no_request(
    path, expected, tmp_path, fault, overlap_steps
):
    engine = with_tier(path, tmp_path, overlap_steps=overlap_steps)
    engine.answers(prompts())
    forget(engine)
    tier, bad = tier_of(connector_of(engine.core)), set()
    for prompt, num_tokens in zip(prompts(), FULL, strict=True):
        bad.add(state_keys(engine, prompt, num_tokens)[-1])
    read = tier.read

    def faulty(key, into):
        if key not in bad:
            return read(key, into)
        if fault == "raises":
            raise OSError(errno.EIO, "Input/output error")
        if fault == "damaged":
            [file] = tmp_path.glob("*.kvtier")
            with file.open("r+b") as opened:
                opened.seek((tier.residents.place_of(key) + 1) * tier.bytes_per_place - 4096)
                opened.write(b"damage" * 600)
            return read(key, into)
        tier.residents.drop(key, tier.residents.place_of(key))
        return False

    tier.read = faulty
    assert engine.answers(prompts()) == expected
    assert engine.stats.num_failed_loads == len(LENGTHS)
    assert engine.stats.num_loaded_tokens < sum(FULL)


def test_a_full_tier_keeps_what_fits_and_answers_stay_the_same(path, expected):
    engine = with_tier(path)
    connector = connector_of(engine.core)
    num_places = connector._num_pieces + 12
    small = with_tier(path, kv_tier_size=num_places * tier_of(connector).bytes_per_block / 1e9)
    for _ in range(2):
        assert small.answers(prompts()) == expected
        forget(small)
        assert len(tier_of(connector_of(small.core)).residents) <= num_places


def test_while_loads_hold_all_checkpoints_requests_are_computed(path, expected):
    engine = with_tier(path)
    engine.answers(prompts())
    forget(engine)
    pool = engine.checkpoints
    held = [pool.take() for _ in range(pool.num_checkpoints - 1)]
    engine.core.scheduler.accounts.holdings.loading_checkpoints = lambda: held
    pool.check = lambda pending: None
    assert engine.answers(prompts()) == expected
    assert 0 < engine.stats.num_loaded_tokens < sum(FULL)


def test_a_state_that_is_overwritten_before_its_request_starts_is_computed_again(path, expected):
    engine = with_tier(path)
    prompt = prompts()[0]
    engine.answers([prompt])
    forget(engine)
    accounts = engine.core.scheduler.accounts
    take = accounts.states.take_loaded

    def take_and_overwrite(load):
        take(load)
        accounts.states.pool.forget_contents()

    accounts.states.take_loaded = take_and_overwrite
    assert engine.answers([prompt]) == expected[:1]
    assert engine.stats.num_loaded_tokens == FULL[0]


def test_several_answers_beams_and_resumed_requests_beside_a_tier(path, expected):
    sampled = {"temperature": 1.0, "seed": 3, "n": 3, "logprobs": 0}
    alone, tiered = Engine(path), with_tier(path)
    for params in (sampled, {"beam_width": 4, "n": 4, "logprobs": 8}):
        answers = alone.outputs(prompts()[:2], **params)
        for _ in range(2):
            again = tiered.outputs(prompts()[:2], **params)
            assert [[one.new_token_ids for one in each] for each in again] == [
                [one.new_token_ids for one in each] for each in answers
            ]
            forget(tiered)
    assert tiered.stats.num_loaded_tokens
    begun = [[[token for token, _ in answer[:5]]] for answer in expected]
    assert tiered.answers(prompts(), begun=begun) == [answer[5:] for answer in expected]


def test_a_recorded_run_with_a_tier_is_repeated_exactly(path, tmp_path):
    engine = with_tier(path, record_path=str(tmp_path / "recording"))
    for _ in range(2):
        engine.answers(prompts())
        forget(engine)
    assert engine.stats.num_loaded_tokens
    engine.core.shutdown()
    assert replay(tmp_path / "recording").difference is None


def test_the_plan_has_the_bytes_of_states_in_pieces(path):
    model, scheduler = read_model_config(path), SchedulerConfig(**SCHEDULER)
    config = EngineConfig(model=str(path), dtype="float32", scheduler=scheduler)
    tiered = dataclasses.replace(config, kv_tiering=KVTierConfig(kv_tier="memory"))
    alone, plan = (plan_memory(one, model, available_bytes=10**9) for one in (config, tiered))
    states = plan.states
    assert states.layout.bytes_per_piece == plan.kv_bytes_per_block == alone.kv_bytes_per_block
    more = states.layout.bytes_per_state - alone.states.layout.bytes_per_state
    assert 0 <= more < plan.kv_bytes_per_block
    assert plan.total_bytes - alone.total_bytes == states.num_states * more


@pytest.mark.parametrize(
    "options",
    [{"enable_prefix_caching": False}, {"dynamic_split_fuse": False}, {"num_linear_attention_blocks": 4}],
    ids=str,
)
def test_a_tier_for_states_that_are_not_kept_is_refused(path, options):
    tiering = KVTierConfig(kv_tier="memory", kv_tier_size=0.1)
    scheduler = {"max_num_batched_tokens": 128, **options}
    with pytest.raises(ConfigError, match="kv_tier is 'memory', but no states of recurrent layers are kept"):
        Engine(path, kv_tiering=tiering, **scheduler)


def test_a_prompt_is_saved_to_a_file_and_restored_with_its_state(path, expected, tmp_path):
    engine, file = with_tier(path), tmp_path / "prompt.kv"
    prompt = prompts()[0]
    num_blocks = len(prompt) // BLOCK_SIZE
    for length in (len(prompt), num_blocks * BLOCK_SIZE):
        num_tokens = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        tokens = prompt[:length].tolist()
        assert not engine.core.save_kv(file, tokens, "").result(60)[1]
        engine.answers([prompt[:length]])
        wait_until_written(engine.core)
        assert engine.core.save_kv(file, tokens, "").result(60) == (num_tokens, True)
        other = with_tier(path)
        assert other.core.restore_kv(file, "").result(60) == tokens[:num_tokens]
        assert other.answers([prompt]) == expected[:1]
        assert other.stats.num_loaded_tokens == num_tokens


def test_a_file_whose_state_is_damaged_or_does_not_fit_is_refused(path, tmp_path):
    engine, file = with_tier(path), tmp_path / "prompt.kv"
    engine.answers(prompts()[:1])
    wait_until_written(engine.core)
    assert engine.core.save_kv(file, prompts()[0].tolist(), "").result(60)[1]
    tier = tier_of(connector_of(engine.core))
    small = with_tier(path, kv_tier_size=(FULL[0] // BLOCK_SIZE) * tier.bytes_per_block / 1e9)
    with pytest.raises(KVFileError, match="only 88 of 88 tokens, without their state, fit"):
        small.core.restore_kv(file, "").result(60)
    content = file.read_bytes()
    file.write_bytes(content[:-4096] + bytes(4096))
    with pytest.raises(KVFileError, match=r"the state in .* is damaged"):
        with_tier(path).core.restore_kv(file, "").result(60)
    with pytest.raises(KVFileError, match="4 tokens fill no block of 4 with a state behind it"):
        engine.core.save_kv(file, [5] * BLOCK_SIZE, "").result(60)
