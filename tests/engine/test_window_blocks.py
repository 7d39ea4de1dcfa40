"""Layers with windows give back the KV of tokens before them: the same answers, from fewer blocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import make_checkpoint
from insides import always_load, connector_of, tier_of, wait_until_written
from quire.config import EngineConfig, KVTierConfig, SchedulerConfig, SpeculationConfig
from quire.engine.core import EngineCore
from quire.engine.memory import plan as memory_plan
from quire.engine.messages import EngineCoreRequest
from quire.execution.drafts import adaptive_proposer
from quire.kv.tiers.block_copier import num_staged_blocks
from quire.models.checkpoints.config_reading import read_model_config
from quire.sampling_params import SamplingParams

BLOCK_SIZE = 4
LENGTHS = 150, 7, 90, 33
MAX_TOKENS = 24
SCHEDULER = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "block_size": BLOCK_SIZE, "num_kv_blocks": 240}


class Engine:
    """An engine in this process, whose blocks are checked after each step."""

    def __init__(
        self,
        path: Path,
        speculation: SpeculationConfig | None = None,
        kv_tier: str = "",
        **scheduler: Any,
    ) -> None:
        config = EngineConfig(
            model=str(path),
            dtype="float32",
            kv_tiering=KVTierConfig(kv_tier=kv_tier, kv_tier_size=0.1, kv_tier_min_uses=1),
            speculation=speculation or SpeculationConfig(),
            scheduler=SchedulerConfig(**{**SCHEDULER, **scheduler}),
        )
        self.core = EngineCore(config, path)
        self._num_requests = 0
        self.most_left = 0  # entries of block tables that name no block

    @property
    def stats(self) -> Any:
        return self.core.scheduler.make_stats()

    def answers(self, prompts: list[np.ndarray], **params: Any) -> list[list[int]]:
        """Return the tokens of each prompt's answer; the prompts run together."""
        fields = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **params}
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            name = str(self._num_requests)
            self._num_requests += 1
            answers[name] = []
            self.core.add(
                EngineCoreRequest([name], [self._num_requests], prompt.tolist(), SamplingParams(**fields))
            )
        kv = self.core.scheduler.accounts.kv
        while self.core.has_unfinished_requests():
            for output in self.core.step()[0]:
                answers[output.request_id] += output.new_token_ids
            self.core.scheduler.check_invariants()
            tables = [kv.table(slot) for slot in range(len(kv.num_blocks))]
            self.most_left = max(self.most_left, *(int((table[1:] == 0).sum()) for table in tables))
        return list(answers.values())


OTHERS = [pytest.param(family, marks=pytest.mark.formats) for family in ("mistral", "gemma4")]


@pytest.fixture(scope="module", params=["gemma3", *OTHERS])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with windows in some layers, or in all; with layers that share their KV."""
    directory = tmp_path_factory.mktemp("models") / request.param
    return make_checkpoint(request.param, directory, max_position_embeddings=512)


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(5, 90, length) for length in LENGTHS]


def continued(prompts: list[np.ndarray]) -> list[np.ndarray]:
    return [np.concatenate((prompt, [11, 12, 13, 14, 15])) for prompt in prompts]


def full(path: Path) -> Engine:
    """Return an engine all of whose layers keep all tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "keeps_all_tokens", lambda _config: True)
        engine = Engine(path)
    assert len(engine.core.scheduler.accounts.kv.pools) == 1
    return engine


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[list[int]]]:
    """The answers, and those of the continued prompts, where all layers keep all tokens."""
    engine = full(path)
    return [engine.answers(prompts()), engine.answers(continued(prompts()))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_steps": True},
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 48, "max_num_seqs": 3},
        {"max_num_batched_tokens": 7},
        {"speculation": SpeculationConfig(speculative_method="ngram", ngram_min=1)},
    ],
    ids=["plain", "overlapped", "no prefix cache", "preempted", "small steps", "drafts"],
)
def test_the_answers_are_those_of_layers_that_keep_all_tokens(path, monkeypatch, expected, options):
    # Drafts whatever steps take: how many are worth their time is asked elsewhere.
    monkeypatch.setattr(adaptive_proposer, "AdaptiveProposer", lambda proposer, *_, **__: proposer)
    engine = Engine(path, **options)
    assert [engine.answers(prompts()), engine.answers(continued(prompts()))] == expected
    assert engine.most_left > max(LENGTHS) // BLOCK_SIZE // 2
    if options.get("enable_prefix_caching", True) and "num_kv_blocks" not in options:
        assert engine.stats.prefix_hit_tokens > 60  # windows have blocks for some of the prompts
    if "num_kv_blocks" in options:
        assert engine.stats.num_preemptions
    if "speculation" in options:
        assert engine.stats.num_draft_tokens


def test_samples_of_one_prompt_and_beams(path):
    for params in ({"beam_width": 3, "logprobs": 0}, {"temperature": 1.0, "seed": 3}):
        assert Engine(path).answers(prompts(), **params) == full(path).answers(prompts(), **params), params


def test_conversations_in_turn_find_their_prefixes_again(path):
    engine = Engine(path, num_kv_blocks=400, max_num_seqs=2)
    conversations = prompts()[:1] + prompts()[2:3]
    for turn in range(4):
        before = engine.stats.prefix_hit_tokens
        answers = [answer for one in conversations for answer in engine.answers([one])]
        found = engine.stats.prefix_hit_tokens - before
        assert not turn or found >= sum(len(one) for one in conversations) - 2 * (BLOCK_SIZE + 30)
        conversations = [
            np.concatenate((one, answer, [7, 8, 9]))
            for one, answer in zip(conversations, answers, strict=True)
        ]


# -- beside a KV tier --------------------------------------------------------------------------------------


class Tiered(Engine):
    """An engine with a tier in memory, which loads whatever that has."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, kv_tier="memory", **options)
        always_load(connector_of(self.core))

    def answers(self, prompts: list[np.ndarray], **params: Any) -> list[list[int]]:
        found = super().answers(prompts, **params)
        wait_until_written(self.core)
        return found

    def forget(self) -> None:
        """Empty the prefix cache, but not the tier."""
        assert self.core.scheduler.reset_prefix_cache()


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_steps": True}, {"num_kv_blocks": 48, "max_num_seqs": 3}],
    ids=["plain", "overlapped", "preempted"],
)
def test_what_a_tier_has_is_loaded_as_far_as_windows_need_it(path, expected, options):
    engine = Tiered(path, **options)
    first, second = expected
    assert engine.answers(prompts()) == first
    assert len(engine.core.scheduler.accounts.kv.pools) == 2
    for turn in range(2):
        engine.forget()
        before = engine.stats.num_loaded_tokens
        assert engine.answers(continued(prompts())) == second
        loaded = engine.stats.num_loaded_tokens - before
        assert loaded > sum(LENGTHS) - 40, turn
    assert not engine.stats.num_failed_loads
    assert engine.most_left > max(LENGTHS) // BLOCK_SIZE // 2


def test_a_loaded_prefix_of_any_length_is_found_again(path):
    """The window ends at every place of a block."""
    engine = Tiered(path)
    for length in (*range(37, 42), 150):
        prompt = np.random.default_rng(length).integers(5, 90, length)
        [right] = engine.answers([prompt], max_tokens=6)
        engine.forget()
        before, num_found = engine.stats, (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert engine.answers([prompt], max_tokens=6) == [right]
        loaded = engine.stats
        assert loaded.num_loaded_tokens - before.num_loaded_tokens == num_found
        assert engine.answers([prompt], max_tokens=6) == [right]
        assert engine.stats.prefix_hit_tokens - loaded.prefix_hit_tokens == num_found
        assert engine.stats.num_loaded_tokens == loaded.num_loaded_tokens


def test_reads_that_fail_change_no_token(path, monkeypatch, expected):
    engine = Tiered(path)
    first, second = expected
    assert engine.answers(prompts()) == first
    tier, random = tier_of(connector_of(engine.core)), np.random.default_rng(3)
    read = tier.read
    monkeypatch.setattr(tier, "read", lambda key, into: random.random() < 0.9 and read(key, into))
    for _ in range(2):
        engine.forget()
        assert engine.answers(continued(prompts())) == second
    assert engine.stats.num_failed_loads
    assert engine.stats.num_loaded_tokens


def test_the_plan_has_the_buffer_of_a_device_for_blocks_of_all_groups(path):
    config = EngineConfig(
        model=str(path), kv_tiering=KVTierConfig(kv_tier="memory"), scheduler=SchedulerConfig(**SCHEDULER)
    )
    plan = dataclasses.replace(memory_plan.plan_memory(config, read_model_config(path)), stages_kv=True)
    num_bytes = sum(cache.bytes_per_block for cache in plan.kv_caches)
    assert len(plan.kv_caches) == 2
    assert plan.staged_bytes == num_staged_blocks(num_bytes) * num_bytes


def test_blocks_that_a_window_has_left_are_stored_when_they_are_computed_again(path):
    engine = Tiered(path)
    [prompt] = prompts()[:1]
    [right] = engine.answers([prompt])
    connector = connector_of(engine.core)
    assert connector.reset()
    assert engine.answers([prompt]) == [right]  # from the prefix cache, where the start has no window
    assert not len(tier_of(connector).residents)
    assert not connector.stats().num_failed_writes
    engine.forget()
    assert engine.answers([prompt]) == [right]
    assert len(tier_of(connector).residents) == len(prompt) // BLOCK_SIZE
