"""Steps that are captured and replayed, in Triton's interpreter: the tokens and bits of other steps.

`Recorder` stands for the CUDA graphs of a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorder import Recorder, driver_of
from step_driver import BLOCK_SIZE, StepDriver, model_cache

from call_through import call_through
from checkpoints import make_checkpoint
from quire.config import SparseAttentionConfig
from quire.execution import capture_backoff, step_graphs
from quire.execution.drafts.adaptive_proposer import AdaptiveProposer
from quire.execution.drafts.draft_model_proposer import DraftGraphs, DraftModelProposer
from quire.execution.drafts.ngram_proposer import NgramProposer
from quire.execution.drafts.proposer import RowsToContinue
from quire.execution.step_graphs import StepGraphs, StepLogits
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.interface import KernelSet
from quire.kernels.size_classes import CHUNK_SIZES, SizeClasses, coarse_size_class, size_class
from quire.kv.tiers.connector import TierConnector
from quire.kv.tiers.tier import MemoryTier
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams
from quire.step import NO_TOKEN, GraphStats

pytestmark = pytest.mark.interpreter

GREEDY = SamplingParams(temperature=0.0, logprobs=0)


@dataclasses.dataclass
class WatchedStep:
    num_tokens: int
    num_rows: int  # of logits
    is_replayed: bool


def watch_logits(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> list[WatchedStep]:
    """Return a list to which the steps go that `StepGraphs` computes."""
    logits, steps = StepGraphs.logits, []

    def watched(
        self: StepGraphs, token_ids: Any, batch: AttentionBatch, rows: Any = None, num_largest: Any = None
    ) -> StepLogits:
        before = recorder.num_replays
        computed = logits(self, token_ids, batch, rows, num_largest)
        steps.append(WatchedStep(len(token_ids), len(computed.rows), recorder.num_replays > before))
        return computed

    monkeypatch.setattr(StepGraphs, "logits", watched)
    return steps


def in_eights(count: int) -> int:
    return -(-count // 8) * 8


def load(family: str, path: Path, **options: Any) -> Decoder:
    checkpoint = make_checkpoint(family, path, num_key_value_heads=1, num_hidden_layers=2)
    return load_decoder(
        checkpoint, read_model_config(checkpoint), options=WeightOptions(kernels="triton", **options)
    )


def outputs(driver: StepDriver, lengths: list[int], num_output: int, **options: Any) -> dict[str, Any]:
    """Return the tokens of requests and their log-probabilities, to the last bit.

    `options` are those of `StepDriver.run`.
    """
    for number, length in enumerate(lengths):
        prompt = [5 + (7 * number + 3 * place) % 90 for place in range(length)]
        driver.add(str(number), prompt, GREEDY)
    driver.run(num_output, **options)
    return {name: (request.output, request.logprobs) for name, request in driver.requests.items()}


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("family", "lengths", "options"),
    [
        ("qwen3", [4, 1, 1, 16], {}),
        ("gemma2", [8, 1, 17], {}),  # windows, soft caps
        ("qwen3_moe", [4, 1, 17], {}),
        ("qwen3", [4, 1, 17], {"quantization": "int4", "group_size": 32}),
    ],
    ids=["qwen3", "gemma2", "experts", "int4"],
)
def test_replayed_steps_have_the_bits_of_others(
    family: str,
    lengths: list[int],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decodes, and before the last prompt has been computed, chunks of it beside them, 7 tokens in all.

    Rows and block tables are rounded up, so that some are nobody's.
    """
    monkeypatch.setattr(KernelSet, "step_sizes", SizeClasses(in_eights, size_class, size_class))
    monkeypatch.setattr(
        step_graphs, "CHUNK_SIZES", SizeClasses(in_eights, coarse_size_class, coarse_size_class)
    )
    model = load(family, tmp_path, **options)
    expected = outputs(driver_of(model), lengths, 5, budget=7)
    recorder = Recorder()
    driver = driver_of(model, recorder.capture)
    driver.runner.max_captured_tokens = 7
    watched = watch_logits(recorder, monkeypatch)
    assert outputs(driver, lengths, 5, budget=7) == expected
    replayed = [step for step in watched if step.is_replayed]
    assert any(step.num_rows == step.num_tokens < 4 for step in replayed)
    assert any(step.num_rows < step.num_tokens == 7 for step in replayed)


def test_beside_sparse_attention_steps_are_captured_that_leave_out_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = SparseAttentionConfig(
        mode="trishape",
        num_last_dense_tokens_in_prefill=4,
        num_retained_start_tokens_in_cache=4,
        num_retained_recent_tokens_in_cache=4,
    )
    padded = AttentionBatch.padded

    def whole(self: AttentionBatch, *sizes: Any) -> AttentionBatch:
        assert self.skipped_keys is None
        return padded(self, *sizes)

    monkeypatch.setattr(AttentionBatch, "padded", whole)
    model, recorder = load("qwen3", tmp_path), Recorder()
    lengths, found = [3, 38], []  # a decode beside each chunk
    dense = outputs(driver_of(model), lengths, 5, budget=7)
    for capture in (None, recorder.capture):
        driver = driver_of(model, capture, sparse_attention=sparse)
        driver.runner.max_captured_tokens = 7
        watched = watch_logits(recorder, monkeypatch)
        found.append(outputs(driver, lengths, 5, budget=7))
    assert found[0] == found[1]
    assert found[0]["1"] != dense["1"], "keys have been left out"
    assert recorder.num_replays > 0
    assert all(step.num_rows == step.num_tokens for step in watched if step.is_replayed)


def launches(driver: StepDriver, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list of whether each step only launches, to which steps are added as they come."""
    execute, steps = driver.runner.execute, []

    def watched(output: Any, grammar: Any) -> Any:
        steps.append(driver.runner.only_launches(output))
        return execute(output, grammar)

    monkeypatch.setattr(driver.runner, "execute", watched)
    return steps


def test_steps_only_launch_if_each_request_decodes_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of(load("qwen3", tmp_path), Recorder().capture)
    steps = launches(driver, monkeypatch)
    driver.add("a", [5, 6, 7], GREEDY)
    driver.add("b", [8, 9, 10, 11], SamplingParams(seed=1))
    for num_tokens in ({"a": 3}, {"a": 1}, {"a": 1, "b": 2}, {"b": 2}, {"a": 1, "b": 1}):
        driver.step(num_tokens)
    assert steps == [False, True, False, False, True]
    driver.preempt("a")
    driver.step({"a": driver.requests["a"].remaining})  # resumed
    driver.add("c", [12], SamplingParams(temperature=0.0, bad_words_token_ids=((5, 6),)))
    driver.step({"c": 1})  # new
    driver.step({"c": 1, "a": 1})
    assert steps[5:] == [False, False, True]


def test_steps_do_not_only_launch_beside_drafts_transfers_or_without_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, capture = load("qwen3", tmp_path), Recorder().capture
    connector = TierConnector(BLOCK_SIZE, lambda num_bytes: MemoryTier(1 << 20, num_bytes, min_uses=1))
    for parts in (
        {},
        {"capture": capture, "proposer": NgramProposer(1, 3)},
        {"capture": capture, "connector": connector},
    ):
        driver = driver_of(model, **parts)
        steps = launches(driver, monkeypatch)
        driver.add("a", [5, 6, 7], GREEDY)
        driver.step({"a": 3})
        driver.step({"a": 1})
        assert steps == [False, False]


@pytest.mark.parametrize(("most", "num_captured"), [(6, 2), (7, 3)])
def test_steps_with_chunks_are_captured_if_they_have_few_tokens_and_some_logits(
    most: int, num_captured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps: 1 + 6 tokens four times, 7 of the prompt alone, and decodes, whose choice is captured."""
    recorder = Recorder()
    driver = driver_of(load("qwen3", tmp_path), recorder.capture)
    driver.runner.max_captured_tokens = most
    watched = watch_logits(recorder, monkeypatch)
    driver.add("0", [5], GREEDY)
    driver.add("1", range(5, 55), GREEDY)
    driver.run(4, budget=7)
    assert recorder.num_captures == num_captured
    assert sum(step.num_tokens == 7 for step in watched) == (4 if most == 7 else 0)


def test_steps_that_report_prompt_logprobs_are_not_captured(tmp_path: Path) -> None:
    """Request 1 decodes, and then chunks of the other's prompt are computed, 1 + 6 tokens at a time."""
    model, recorder = load("qwen3", tmp_path), Recorder()
    found = []
    for capture in (None, recorder.capture):
        driver = driver_of(model, capture)
        driver.runner.max_captured_tokens = 7
        driver.add("0", [5], GREEDY)
        driver.add("1", range(5, 29), dataclasses.replace(GREEDY, prompt_logprobs=1))
        driver.run(5, budget=7)
        found.append(driver.requests["1"].prompt_logprobs)
    assert found[0] == found[1]
    assert len(found[1]) == 24 - 1


def test_steps_with_drafts_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSet, "step_sizes", SizeClasses(in_eights, size_class, size_class))
    model = load("qwen3", tmp_path)
    expected = outputs(driver_of(model), [4, 9], 12)

    def draft(name: str, request: Any) -> list[int]:
        """Draft two tokens, the second of which is wrong every other time."""
        done = len(request.output)
        drafts = [token ^ (place == done + 1 and done % 2) for place, token in enumerate(expected[name][0])]
        return drafts[done : done + 2] if done else []

    recorder = Recorder()
    watched = watch_logits(recorder, monkeypatch)
    found = outputs(driver_of(model, recorder.capture), [4, 9], 12, draft=draft)
    for name, (tokens, logprobs) in expected.items():
        assert (found[name][0][:12], found[name][1][:12]) == (tokens, logprobs)
    assert len(watched) < 11, "drafts were right, and all steps but the first are of this kind"
    assert any(step.is_replayed and step.num_tokens > 2 for step in watched)


def test_a_step_that_cannot_be_captured_is_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And captured later on."""
    recorder, attempts = Recorder(), []

    def refuse(compute: Callable[[], None]) -> Callable[[], None]:
        attempts.append(compute)
        if len(attempts) > 1:
            return recorder.capture(compute)
        raise RuntimeError("operation not permitted when stream is capturing")

    model = load("qwen3", tmp_path)
    expected = outputs(driver_of(model), [3, 5], 8)
    driver = driver_of(model, refuse)
    assert outputs(driver, [3, 5], 8) == expected
    assert len(attempts) == 1
    assert driver.runner.graph_stats == GraphStats(num_launched=8, num_failures=1)
    assert "cannot be captured" in caplog.text
    attempts.clear()
    monkeypatch.setattr(capture_backoff, "MIN_STEPS", 2)
    driver = driver_of(model, refuse)
    assert outputs(driver, [3, 5], 8) == expected
    assert len(attempts) == 3, "the choice of tokens is captured, too"
    assert recorder.num_replays > 2
    stats = driver.runner.graph_stats
    assert (stats.num_graphs, stats.num_failures) == (1, 1)
    assert stats.num_replayed + stats.num_launched == 8


def test_nothing_is_left_of_a_step_that_has_failed_before_its_arrays_were_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step of the same size is another request's, at other places."""
    model = load("qwen3", tmp_path)
    found = []
    driver = driver_of(model, Recorder().capture)
    driver.add("first", range(40, 53), GREEDY)
    driver.step({"first": 13})

    def fail(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", fail)
        with pytest.raises(torch.OutOfMemoryError):
            driver.step({"first": 1})
    driver.finish("first")
    for one in (driver_of(model), driver):
        one.add("second", range(5, 10), GREEDY)
        for count in (5, 1, 1, 1):
            one.step({"second": count})
        found.append((one.requests["second"].output, one.requests["second"].logprobs))
    assert found[0] == found[1]


@pytest.mark.parametrize("works_by_layer", [False, True])
def test_steps_are_replayed_beside_a_connector_that_moves_whole_blocks(
    works_by_layer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierConnector, "works_by_layer", works_by_layer)
    connector = TierConnector(BLOCK_SIZE, lambda num_bytes: MemoryTier(1 << 20, num_bytes, min_uses=1))
    recorder = Recorder()
    outputs(driver_of(load("qwen3", tmp_path), recorder.capture, connector=connector), [3], 4)
    assert recorder.num_replays == (0 if works_by_layer else 1)


@pytest.mark.parametrize("follows_tokens", [False, True])
def test_steps_are_replayed_beside_a_proposer(
    follows_tokens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[tuple[list[int], bool]] = []

    def follow(
        _proposer: NgramProposer, token_ids: torch.Tensor, _batch: AttentionBatch, *, is_captured: bool
    ) -> None:
        followed.append((token_ids.tolist(), is_captured))

    monkeypatch.setattr(NgramProposer, "follows_tokens", follows_tokens)
    monkeypatch.setattr(NgramProposer, "follow", follow)
    recorder = Recorder()
    proposer = AdaptiveProposer(NgramProposer(1, 3), 4)
    driver = driver_of(load("qwen3", tmp_path), recorder.capture, proposer=proposer)
    ((tokens, _),) = outputs(driver, [3], 4).values()
    assert recorder.num_replays == 1
    expected = [([5, 8, 11], False), *(([token], True) for token in tokens[:3])]
    assert followed == (expected if follows_tokens else [])


@torch.inference_mode()
def test_a_draft_model_is_replayed(tmp_path: Path) -> None:
    """It follows steps of two requests, and drafts several tokens of each, one after the other."""
    model = load("qwen3", tmp_path)
    model.reserve(64)
    recorder = Recorder()
    caches = [model_cache(model, num_blocks=20) for _ in range(2)]
    graphs = DraftGraphs(model, caches[0], recorder.capture, max_num_batched_tokens=64)
    proposers = [DraftModelProposer(model, caches[0], graphs), DraftModelProposer(model, caches[1])]
    tables = np.arange(20).reshape(2, 10)
    token_ids = np.arange(5, 85, dtype=np.int32).reshape(2, 40)
    computed = np.zeros(2, dtype=np.int64)
    for number, counts in enumerate([[3, 9], *[[3, 2], [1, 4]] * 2]):
        batch = AttentionBatch.build(computed, counts, tables, BLOCK_SIZE)
        ids = [
            row[start : start + count] for row, start, count in zip(token_ids, computed, counts, strict=True)
        ]
        computed = computed + counts
        rows = RowsToContinue(
            token_ids, np.arange(2), computed + 1, tables, np.array([10, 10]), np.array([3, 2 + number % 2])
        )
        found = []
        for proposer in proposers:
            followed = torch.from_numpy(np.concatenate(ids).astype(np.int64))
            proposer.follow(followed, batch, is_captured=number > 0)
            found.append(proposer.propose(rows, 3).tolist())
        assert found[0] == found[1]
        assert (found[0][1][2] == NO_TOKEN) == (number % 2 == 0)
        assert torch.equal(*(cache.tensor for cache in caches))
    assert recorder.num_replays > recorder.num_captures > 2
    assert proposers[0].max_array_bytes > 0


def test_recordings_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 1)
    kept: list[int] = []
    counted: list[int] = []

    def watched(graph_of: Any, self: StepGraphs, made: Any) -> Any:
        graph = graph_of(self, made)
        kept.append(len(self._graphs))
        counted.append(self.stats.num_graphs)
        assert counted[-1] == sum(one.replay is not None for one in self._graphs.values())
        return graph

    call_through(monkeypatch, StepGraphs, "_graph_of", watched)
    model = load("qwen3", tmp_path)
    recorder = Recorder()
    plain, driver = driver_of(model), driver_of(model, recorder.capture)
    assert outputs(driver, [1, 2], 8) == outputs(plain, [1, 2], 8)
    assert set(kept) == {1}
    assert plain.runner.graph_stats is None
    assert set(counted) == {0, 1}
    assert counted[-1] == 0, "a step of another size has taken the place of the capture"


def test_blocks_that_the_cache_lacks_are_refused_before_a_replay(tmp_path: Path) -> None:
    model = load("qwen3", tmp_path)
    recorder = Recorder()
    driver = driver_of(model, recorder.capture)
    outputs(driver, [2], 4)
    graphs = driver.runner._graphs
    assert graphs is not None
    batch = AttentionBatch.build([5], [1], [[0, 10_000]], BLOCK_SIZE)
    with pytest.raises(IndexError, match="10000"):
        graphs.logits(torch.zeros(1, dtype=torch.int64).numpy(), batch)


@pytest.mark.representative
def test_sizes_are_at_most_a_quarter_more() -> None:
    sizes = [size_class(count) for count in (0, 1, 2, 3, 5, 8, 9, 17, 33, 100)]
    assert sizes == [0, 1, 2, 3, 5, 8, 10, 20, 40, 112]


@pytest.mark.representative
def test_sizes_of_chunks_are_few() -> None:
    assert [coarse_size_class(count) for count in (0, 1, 16, 17, 65)] == [0, 16, 16, 64, 256]
    assert [CHUNK_SIZES.parts(count) for count in (0, 1, 256, 257)] == [0, 256, 256, 1024]
