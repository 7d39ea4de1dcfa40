"""Models whose layers keep a state: the answers of transformers, whatever becomes of the state."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from checked_engine import tokens
from checkpoints import make_checkpoint
from hybrid_engines import BLOCK_SIZE, LENGTHS, MAX_TOKENS, SCHEDULER, Engine, prompts
from operation_tape import capture_steps
from quire.config import EngineConfig, KVTierConfig, KVTransferConfig, SchedulerConfig, SpeculationConfig
from quire.engine.building.assembly import config_for_model
from quire.engine.memory.plan import plan_memory
from quire.engine.memory.state_sizes import StateSizes
from quire.errors import ConfigError
from quire.execution.drafts.proposer import GuardedProposer, Proposer, RowsToContinue
from quire.execution.profile_run import StepLimits, profile_run
from quire.kernels.interface import KernelSet
from quire.kernels.size_classes import SizeClasses, coarse_size_class
from quire.kv.cache.state_layout import StateLayout
from quire.models.checkpoints.config_reading import read_model_config
from quire.recording.replay import replay
from quire.step import NO_TOKEN


class HalfRight(Proposer):
    """Proposes what engines without drafts have answered, and other tokens now and then."""

    def __init__(self, expected: list[list[Any]]) -> None:
        answers = zip(prompts(), tokens(expected), strict=True)
        self._texts = [[*prompt.tolist(), *answer, *[7] * 9] for prompt, answer in answers]
        self._rng = np.random.default_rng(4)

    def propose(self, rows: RowsToContinue, num_drafts: int) -> np.ndarray:
        drafts = np.full((len(rows.slots), num_drafts), NO_TOKEN, dtype=np.int32)
        known = zip(rows.slots.tolist(), rows.num_tokens.tolist(), rows.max_drafts.tolist(), strict=True)
        for row, (slot, count, most) in enumerate(known):
            begun = rows.token_ids[slot, :count].tolist()
            [text] = [text for text in self._texts if text[:count] == begun]
            is_wrong = self._rng.random(most) < 0.3
            drafts[row, :most] = np.where(is_wrong, 11, text[count : count + most])
        return drafts


def with_drafts(path: Path, expected: list[list[Any]], **options: Any) -> Engine:
    speculation = SpeculationConfig(speculative_method="ngram", num_speculative_tokens=5)
    engine = Engine(path, speculation=speculation, **options)
    proposer = GuardedProposer(HalfRight(expected), read_model_config(path).vocab_size)
    engine.core.runner._proposer = proposer
    return engine


FAMILIES = [
    "lfm2",
    *(
        pytest.param(name, marks=pytest.mark.formats)
        for name in ("qwen3_5", "granitemoehybrid", "falcon_h1", "nemotron_h", "kimi_linear", "zamba2")
    ),
]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / request.param
    return make_checkpoint(request.param, directory, max_position_embeddings=512)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[Any]]:
    """The answers of an engine that keeps no state for later, each request alone."""
    engine = Engine(path, enable_prefix_caching=False)
    answers = [engine.answers([prompt])[0] for prompt in prompts()]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for prompt, answer in zip(prompts(), tokens(answers), strict=True):
        generated = model.generate(
            torch.from_numpy(prompt)[None], do_sample=False, max_new_tokens=MAX_TOKENS, eos_token_id=None
        )
        assert answer == generated[0, len(prompt) :].tolist()
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_steps": True},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 32, "max_num_seqs": 3},
        {"num_linear_attention_blocks": 5},
        {"num_linear_attention_blocks": 4},
        {"dynamic_split_fuse": False, "max_num_batched_tokens": 128},
    ],
    ids=["plain", "overlapped", "token by token", "small steps", "preempted", "few", "none", "whole prompts"],
)
def test_answers_have_the_same_bits_whatever_is_restored(path, expected, options):
    engine = Engine(path, **options)
    for _ in range(3):
        assert engine.answers(prompts()) == expected
    assert [engine.answers([prompt])[0] for prompt in prompts()] == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_steps": True},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 32, "max_num_seqs": 3},
        {"num_linear_attention_blocks": 5},
        {"num_linear_attention_blocks": 4},
        {"enable_prefix_caching": False},
    ],
    ids=["plain", "overlapped", "token by token", "small steps", "preempted", "few", "none", "no cache"],
)
def test_drafts_leave_nothing_in_a_state(path, expected, options):
    engine = with_drafts(path, expected, **options)
    for _ in range(4):
        assert engine.answers(prompts()) == expected
    stats = engine.stats
    if options.get("max_num_batched_tokens") != 1:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.interpreter
def test_captured_steps_on_the_kernels_of_a_gpu(path, expected, monkeypatch):
    """Bits are the same with drafts and preemptions, in small steps and with what is restored."""
    short, params = [prompts()[1], prompts()[3][:20]], {"max_tokens": 8}
    engine = Engine(path, kernels="triton", enable_prefix_caching=False)
    alone = [engine.answers([prompt], **params)[0] for prompt in short]
    assert tokens(alone)[0] == tokens(expected)[1][:8]
    replayed = capture_steps(monkeypatch)
    few_sizes = SizeClasses(lambda count: -(-count // 8) * 8, coarse_size_class, coarse_size_class)
    monkeypatch.setattr(KernelSet, "step_sizes", few_sizes)
    options = {"kernels": "triton", "max_num_batched_tokens": 12, "num_kv_blocks": 9, "overlap_steps": True}
    engine = Engine(path, **options)
    assert engine.answers(short, **params) == alone
    assert engine.stats.num_preemptions > 0
    assert len(replayed) > 1
    replayed.clear()
    engine = with_drafts(path, expected, **options)
    for _ in range(4):
        assert engine.answers(short[:1], **params) == alone[:1]
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    assert len(replayed) > 1


def test_a_conversation_is_found_up_to_the_last_block_before_its_last_drafts(path, expected):
    engine = with_drafts(path, expected)
    prompt, [answer] = prompts()[2], tokens(expected[2:3])
    assert engine.answers([prompt]) == expected[2:3]
    before = engine.stats.prefix_hit_tokens
    assert engine.stats.num_accepted_tokens
    engine.core.runner._proposer = None
    longer = np.concatenate((prompt, answer, [11, 12, 13]))
    repeated = engine.answers([longer])
    num_computed = len(prompt) + MAX_TOKENS - 1
    most, fewest = (count // BLOCK_SIZE * BLOCK_SIZE for count in (num_computed, num_computed - 5))
    assert fewest <= engine.stats.prefix_hit_tokens - before <= most
    assert repeated == Engine(path, enable_prefix_caching=False).answers([longer])


def test_preempted_requests_go_on_behind_checkpoints(path, expected):
    engine = Engine(path, num_kv_blocks=28, max_num_seqs=3)
    assert engine.answers(prompts()) == expected
    assert engine.stats.num_preemptions
    assert engine.stats.resumed_hit_tokens


def test_a_prompt_sent_again_is_found_up_to_its_last_full_block(path):
    engine = Engine(path, num_linear_attention_blocks=40)
    engine.answers(prompts())
    before = engine.stats.prefix_hit_tokens
    engine.answers(prompts())
    found = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS]
    assert engine.stats.prefix_hit_tokens - before == sum(found)


def test_a_conversation_is_found_up_to_the_last_full_block_of_the_answer(path):
    engine = Engine(path)
    prompt = prompts()[2]
    answer = engine.answers([prompt])[0]
    longer = np.concatenate((prompt, tokens([answer])[0], [11, 12, 13]))
    before = engine.stats.prefix_hit_tokens
    repeated = engine.answers([longer])
    # The last token of the answer was never computed.
    found = (len(prompt) + MAX_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert engine.stats.prefix_hit_tokens - before == found
    assert repeated == Engine(path, enable_prefix_caching=False).answers([longer])


def test_a_fork_is_found_from_the_second_time_on(path):
    engine = Engine(path, cache_interval_multiplier=256)
    shared, *others = prompts()
    ways = [np.concatenate((shared[:70], other)) for other in others]
    expected = Engine(path, enable_prefix_caching=False)
    found = []
    for way in [shared, *ways]:
        before = engine.stats.prefix_hit_tokens
        assert engine.answers([way]) == expected.answers([way])
        found.append(engine.stats.prefix_hit_tokens - before)
    assert found == [0, 0, 68, 68]


def test_several_answers_to_a_prompt(path):
    sampled = {"temperature": 1.0, "seed": 3, "n": 3}
    alone = [Engine(path).answers([prompt], **sampled) for prompt in prompts()[:2]]
    together = Engine(path).answers(prompts()[:2], **sampled)
    assert together == [*alone[0], *alone[1]]
    assert len({str(answer) for answer in together}) == 6


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}], ids=["plain", "small steps"])
def test_an_engine_continues_what_another_has_begun(path, expected, options):
    lengths = 1, 5, 9, 13
    begun = [[answer[:length]] for answer, length in zip(tokens(expected), lengths, strict=True)]
    rest = [answer[length:] for answer, length in zip(expected, lengths, strict=True)]
    for engine in (Engine(path, **options), with_drafts(path, expected, **options)):
        for _ in range(2):
            assert engine.answers(prompts(), begun=begun) == rest


def test_beams_go_on_from_the_states_of_those_that_they_continue(path):
    engine = Engine(path)
    prompt = prompts()[2]
    for _ in range(2):
        for [output] in engine.outputs([prompt], beam_width=4, n=4, logprobs=8):
            scored = engine.scored(prompt, output.new_token_ids)
            assert output.cumulative_logprob == pytest.approx(scored, abs=1e-4)


def test_an_emptied_prefix_cache_has_no_checkpoints(path, expected):
    engine = Engine(path)
    engine.answers(prompts())
    assert engine.checkpoints.num_kept
    assert engine.core.scheduler.reset_prefix_cache()
    assert not engine.checkpoints.num_kept
    assert engine.answers(prompts()) == expected


def test_a_recorded_run_is_repeated_exactly(path, tmp_path):
    engine = Engine(path, record_path=str(tmp_path / "recording"), num_kv_blocks=28, max_num_seqs=3)
    for _ in range(2):
        engine.answers(prompts())
    engine.core.shutdown()
    report = replay(tmp_path / "recording")
    assert report.difference is None
    assert report.num_steps > 50


def test_the_plan_has_the_bytes_of_all_states(path):
    model = read_model_config(path)
    layout = StateLayout.of(model.state_layers, "float32")
    scheduler = SchedulerConfig(**SCHEDULER)
    config = EngineConfig(model=str(path), dtype="float32", scheduler=scheduler)
    plan = plan_memory(config, model, available_bytes=10**9)
    assert plan.states == StateSizes(layout, num_slots=4, num_checkpoints=16)
    assert plan.state_bytes == 20 * layout.bytes_per_state
    beside = plan.weight_bytes + plan.activation_bytes + plan.kv_bytes
    assert plan.total_bytes == beside + plan.state_bytes

    many = dataclasses.replace(config, scheduler=dataclasses.replace(scheduler, max_num_seqs=10**6))
    fewer = plan_memory(many, model, available_bytes=10**9)
    assert fewer.max_num_seqs == fewer.states.num_slots == 10**9 // 4 // layout.bytes_per_state

    def num_checkpoints(num_fitting: int, **options: Any) -> int:
        changed = dataclasses.replace(scheduler, **options)
        return StateSizes.of(changed, layout, num_fitting * layout.bytes_per_state).num_checkpoints

    assert num_checkpoints(40) == 10
    assert num_checkpoints(-1) == 0
    assert num_checkpoints(40, num_linear_attention_blocks=9) == 5
    assert num_checkpoints(40, enable_prefix_caching=False) == 0


def with_itself_as_draft_model(path: Path, **options: Any) -> Engine:
    speculation = SpeculationConfig(
        speculative_method="draft-model", draft_model=str(path), num_speculative_tokens=4
    )
    return Engine(path, speculation=speculation, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_steps": True},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 32, "max_num_seqs": 3},
        {"num_linear_attention_blocks": 5},
        {"num_linear_attention_blocks": 4},
        {"enable_prefix_caching": False},
    ],
)
def test_a_draft_model_with_states_is_right_whenever_it_is_the_model_itself(path, expected, options):
    """Whatever is restored, its states are those of the model, so it proposes the model's tokens."""
    engine = with_itself_as_draft_model(path, **options)
    for _ in range(3):
        assert engine.answers(prompts()) == expected
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 50


def test_a_draft_model_with_states_is_right_in_samples_of_one_prompt(path):
    engine = with_itself_as_draft_model(path)
    alone = Engine(path).answers(prompts()[3:], seed=3, n=3, temperature=1e-6)
    assert engine.answers(prompts()[3:], seed=3, n=3, temperature=1e-6) == alone
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 20


def test_made_up_steps_are_drafted_by_a_model_with_states(path):
    engine = with_itself_as_draft_model(path)
    runner = engine.core.runner
    profile_run(runner, read_model_config(path).vocab_size, StepLimits(4, 48, 256, 2, 4, 8))
    assert runner._proposer._proposer is not None, "a call has failed"


def test_the_plan_has_the_bytes_of_a_draft_models_states(path):
    model = read_model_config(path)
    layout = StateLayout.of(model.state_layers, "float32")
    config = EngineConfig(model=str(path), dtype="float32", scheduler=SchedulerConfig(**SCHEDULER))
    plan = plan_memory(config, model, draft_model=model, available_bytes=10**9)
    assert plan.state_bytes == (2 * 20 + 4) * layout.bytes_per_state


def test_a_draft_model_with_states_is_refused_beside_a_model_without(path, tmp_path):
    target = make_checkpoint("llama", tmp_path / "target", max_position_embeddings=512)
    speculation = SpeculationConfig(speculative_method="draft-model", draft_model=str(path))
    with pytest.raises(ConfigError, match=r"draft_model is .* has recurrent layers, but .*target' has none"):
        Engine(target, speculation=speculation)


def test_a_draft_model_with_states_is_refused_where_states_are_moved(path):
    with pytest.raises(ConfigError, match=r"has recurrent layers, and KVTierConfig.kv_tier is 'memory'"):
        with_itself_as_draft_model(path, kv_tiering=KVTierConfig(kv_tier="memory"))


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft-model"])
def test_answers_have_the_same_bits_with_drafts_of_each_kind(path, expected, tmp_path, method):
    draft_model = make_checkpoint("llama", tmp_path / "draft", max_position_embeddings=512)
    options = {"draft_model": str(draft_model)} if method == "draft-model" else {}
    engine = Engine(path, speculation=SpeculationConfig(speculative_method=method, ngram_min=1, **options))
    for _ in range(2):
        assert engine.answers(prompts()) == expected
    assert engine.stats.num_draft_tokens


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_cache_eviction": True}, "use_cache_eviction is True"),
        ({"kv_connector": "memory_connector.MemoryConnector"}, "kv_connector is 'memory_connector"),
        ({"num_linear_attention_blocks": 3}, "num_linear_attention_blocks is 3, but each of the 4"),
    ],
)
def test_what_does_not_go_with_states_is_refused_by_name(path, options, named):
    with pytest.raises(ConfigError, match=named):
        Engine(path, **options)


@pytest.mark.processes
def test_ranks_give_the_tokens_of_one_with_bits_of_their_own(path, expected):
    """Whatever is restored, on the states of both ranks: prefixes, the preempted, siblings and drafts."""

    def forked(engine: Engine) -> list[Any]:
        siblings = engine.answers(prompts()[3:], temperature=1.0, seed=3, n=3)
        beams = engine.outputs(prompts()[2:3], beam_width=3, n=3, logprobs=6)
        return [*siblings, *((output.new_token_ids, output.cumulative_logprob) for [output] in beams)]

    ranks = {"tensor_parallel_size": 2, "num_threads": 1}
    engine = Engine(path, enable_prefix_caching=False, **ranks)
    alone = [engine.answers([prompt])[0] for prompt in prompts()]
    expected_of_forks = forked(engine)
    engine.core.shutdown()
    assert tokens(alone) == tokens(expected)
    engine = with_drafts(path, expected, num_kv_blocks=28, max_num_seqs=3, overlap_steps=True, **ranks)
    for _ in range(3):
        assert engine.answers(prompts()) == alone
    stats = engine.stats
    assert stats.num_preemptions
    assert stats.resumed_hit_tokens + stats.prefix_hit_tokens
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    engine.core.runner._proposer = None
    assert forked(engine) == expected_of_forks
    engine.core.shutdown()


def test_states_of_ranks_are_not_moved(path):
    config = EngineConfig(
        model=str(path), tensor_parallel_size=2, kv_transfer=KVTransferConfig(kv_transfer_port=29500)
    )
    with pytest.raises(
        ConfigError, match=r"kv_transfer_port is 29500, but .* tensor_parallel_size 2 are not"
    ):
        config_for_model(config, read_model_config(path))


def test_states_on_a_gpu_are_not_moved(path):
    tier = KVTierConfig(kv_tier="memory")
    config = EngineConfig(model=str(path), device="cuda", kv_tiering=tier)
    with pytest.raises(ConfigError, match="beside whose states"):
        config_for_model(config, read_model_config(path))
