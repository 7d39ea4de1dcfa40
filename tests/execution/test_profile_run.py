"""What an engine on a GPU computes before its first request: steps as large as any, on a few blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from step_driver import BLOCK_SIZE, StepDriver, model_cache
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from call_through import call_through
from checkpoints import make_checkpoint
from host_choice import HostChoice
from operation_tape import OperationTape
from quire.config import CacheEvictionConfig
from quire.execution import profile_run as profiling
from quire.execution.drafts.draft_model_proposer import DraftGraphs, DraftModelProposer
from quire.execution.eviction.cache_evictor import CacheEvictor
from quire.execution.model_runner import ModelRunner
from quire.execution.profile_run import (
    TIMES,
    StepLimits,
    _compute_all,
    _DummySteps,
    _largest_launch_bound_step,
    _Row,
    _Times,
    profile_run,
)
from quire.execution.step_graphs import StepGraphs
from quire.kernels.attention.batch import AttentionBatch
from quire.kernels.triton.kernel import compile_only
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.decoder import Decoder, LayerHook
from quire.models.layers.attention import Attention
from quire.sampling_params import SamplingParams
from quire.step import SchedulerOutput

VOCAB_SIZE = 384
EVICTION = CacheEvictionConfig(start_size=4, recent_size=8, max_cache_size=32)


class Watched:
    """The steps of a profile run: tokens, rows of logits, and the longest context, of each forward pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[int, int, int]] = []
        self.num_logits: list[int] = []
        self.captured: list[Callable[[], None]] = []
        forward, logits = Decoder.forward, Decoder.logits

        def watch_forward(model: Decoder, ids: Any, cache: Any, batch: AttentionBatch, **options: Any) -> Any:
            self.steps.append((len(ids), len(batch.num_tokens), batch.last_position + 1))
            hidden = forward(model, ids, cache, batch, **options)
            assert torch.isfinite(hidden).all()
            return hidden

        def watch_logits(model: Decoder, hidden: torch.Tensor, *largest: Any) -> torch.Tensor:
            self.num_logits.append(len(hidden))
            return logits(model, hidden, *largest)

        monkeypatch.setattr(Decoder, "forward", watch_forward)
        monkeypatch.setattr(Decoder, "logits", watch_logits)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.captured.append(compute)
        return compute


def test_nothing_is_captured_whose_kernels_were_never_launched(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton loads a kernel when it is launched for the first time, which CUDA forbids in a capture."""
    is_compiling, launched, num_captured = [False], [], [0]

    @contextlib.contextmanager
    def compiling() -> Iterator[None]:
        is_compiling[0] = True
        yield
        is_compiling[0] = False

    def watched(compute: Any, self: StepGraphs, model: Any, graph: Any, batch: AttentionBatch) -> None:
        if not is_compiling[0]:
            launched.append(graph)
        compute(self, model, graph, batch)

    def checked(captured: Any, self: StepGraphs, model: Any, graph: Any, batch: AttentionBatch) -> Any:
        assert not is_compiling[0]
        assert any(one is graph for one in launched)
        num_captured[0] += 1
        return captured(self, model, graph, batch)

    monkeypatch.setattr(Decoder, "compile_only", lambda self: compiling())
    monkeypatch.setattr(type(model.kernels), "compiles_only", property(lambda self: is_compiling[0]))
    call_through(monkeypatch, StepGraphs, "_compute", watched)
    call_through(monkeypatch, StepGraphs, "_captured", checked)
    limits = StepLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=40, draft_length=0)
    profile_run(runner_of(model, limits, capture=lambda compute: compute), VOCAB_SIZE, limits)
    assert num_captured[0] > 1


@pytest.fixture
def model(models: Any, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    model: Decoder = models["float32"]
    monkeypatch.setattr(type(model.kernels), "sampling", HostChoice())
    return model


def runner_of(model: Decoder, limits: StepLimits, **parts: Any) -> ModelRunner:
    cache = model_cache(model, num_blocks=3)
    return ModelRunner(
        model,
        [cache],
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=BLOCK_SIZE,
        **parts,
    )


def test_steps_are_as_large_as_any(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    limits = StepLimits(max_num_seqs=4, max_num_batched_tokens=96, max_model_len=61, draft_length=0)
    runner = runner_of(model, limits, capture=watched.capture)
    timed: list[int] = []

    def say_64(*_: Any) -> int:
        timed.append(len(watched.steps))
        return 64

    monkeypatch.setattr(profiling, "_largest_launch_bound_step", say_64)
    assert profile_run(runner, VOCAB_SIZE, limits) == runner.max_captured_tokens == 64
    sizes, reported, largest = watched.steps[:9], watched.steps[9], watched.steps[10]
    rest = watched.steps[11 : timed[0]]
    assert sizes[:6] == [(length, 1, length) for length in (1, 2, 4, 8, 16, 32)]
    assert sizes[6:] == [(64, 2, 61), (1, 1, 1), (2, 2, 1)]
    assert reported == (61, 1, 61)
    assert largest == (96, 4, 61)
    assert watched.num_logits[7:12] == [1, 2, 60, 1, 4]  # 60 behind the tokens of a prompt
    chunks, decodes = rest[:3], rest[3:]
    assert chunks == [(24, 1, 61), (6, 1, 61), (9, 4, 61)]
    assert decodes == [(4, 4, 61)] * 3 * TIMES
    assert watched.steps[timed[0] :] == [(64, 4, 61)] * TIMES
    assert set(watched.num_logits[15:]) == {4}  # behind the chunks of one request
    assert runner.num_requests == 4
    assert len(watched.captured) == 3  # a decode step, the choice of its tokens, and a step with chunks


def test_steps_that_are_timed_are_not_replayed(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    limits = StepLimits(max_num_seqs=4, max_num_batched_tokens=150, max_model_len=61, draft_length=0)
    runner = runner_of(model, limits, capture=watched.capture)
    monkeypatch.setattr(profiling, "SHARE_OF_HOST", 0.0)
    most = _largest_launch_bound_step(_DummySteps(runner, VOCAB_SIZE), limits)
    assert most == 128
    assert watched.steps == [(64, 4, 61)] * (1 + TIMES) + [(128, 4, 61)] * (1 + TIMES)
    assert not watched.captured


def test_a_step_that_is_computed_again_takes_no_new_requests(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long the host takes to ask for it is what it takes while requests run."""
    watched = Watched(monkeypatch)
    plans: list[SchedulerOutput] = []
    execute = ModelRunner.execute

    def watch(runner: ModelRunner, output: SchedulerOutput, *args: Any) -> Any:
        plans.append(output)
        return execute(runner, output, *args)

    monkeypatch.setattr(ModelRunner, "execute", watch)
    limits = StepLimits(max_num_seqs=4, max_num_batched_tokens=96, max_model_len=61, draft_length=0)
    steps = _DummySteps(runner_of(model, limits), VOCAB_SIZE)
    rows = [_Row(60, 1), _Row(0, 30), _Row(0, 1)]
    for _ in range(2):
        assert len(steps.compute(rows, SamplingParams(temperature=0.0), times=3)) == 3
    assert [len(plan.scheduled_new_reqs) for plan in plans] == [3, 0, 0] * 2
    assert [len(plan.finished_req_ids) for plan in plans] == [0, 0, 0, 3, 0, 0]
    assert watched.steps == [(32, 3, 61)] * 6


def test_steps_that_are_not_captured_are_not_timed(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    limits = StepLimits(max_num_seqs=4, max_num_batched_tokens=96, max_model_len=61, draft_length=0)
    runner = runner_of(model, limits, capture=watched.capture, eviction=EVICTION)
    assert profile_run(runner, VOCAB_SIZE, limits) == 0
    assert watched.steps[-1] == (4, 4, 61)
    assert not watched.captured


@pytest.mark.parametrize(
    ("limits", "slow_from", "expected"),
    [
        (StepLimits(8, 2048, 500, 0), 1, 0),
        (StepLimits(8, 2048, 500, 0), 65, 64),
        (StepLimits(8, 2048, 500, 0), 1000, 512),
        (StepLimits(8, 2048, 500, 0), 10**6, 2048),
        (StepLimits(8, 63, 500, 0), 10**6, 0),
        (StepLimits(2, 2048, 500, 0), 10**6, 512),  # no more fit into two requests
        (StepLimits(1, 2048, 130, 0), 10**6, 128),
    ],
)
def test_steps_are_captured_that_the_device_computes_before_the_host_has_asked_for_them(
    limits: StepLimits, slow_from: int, expected: int
) -> None:
    """One measurement in three is of a busy host, or of a busy device."""

    class TimedSteps:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def compute(self, rows: list[Any], params: SamplingParams, *, times: int) -> list[_Times]:
            assert params.is_greedy, "how long drawing takes depends on made-up logits"
            assert times > 1, "the first one loads kernels"
            return [self._time(rows) for _ in range(times)]

        def _time(self, rows: list[Any]) -> _Times:
            self.rows.append(rows)
            until_asked = 0.02 if len(self.rows) % 3 == 0 else 0.01
            num_tokens = sum(row.num_tokens for row in rows)
            assert num_tokens > len(rows), "a decode step, which is captured"
            until_computed = 0.012 if num_tokens >= slow_from else until_asked + 0.0001
            return _Times(until_asked, until_computed + (len(self.rows) % 3 == 1))

    steps = TimedSteps()
    assert _largest_launch_bound_step(cast(_DummySteps, steps), limits) == expected
    for rows in steps.rows:
        assert len(rows) <= limits.max_num_seqs
        assert all(row.num_computed + row.num_tokens <= limits.max_model_len for row in rows)


@pytest.mark.parametrize(
    ("limits", "largest"),
    [
        (StepLimits(1, 1, 1, 0), (1, 1, 1)),
        (StepLimits(8, 5, 100, 0), (5, 5, 1)),
        (StepLimits(2, 1000, 50, 0), (100, 2, 50)),
        (StepLimits(3, 20, 9, 3), (20, 3, 9)),
        (StepLimits(3, 3, 9, 3), (3, 1, 3)),
    ],
)
def test_limits_that_bind(
    model: Decoder, limits: StepLimits, largest: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    profile_run(runner_of(model, limits), VOCAB_SIZE, limits)
    assert largest in watched.steps
    assert max(tokens for tokens, *_ in watched.steps) == max(largest[0], limits.max_num_seqs > 1)
    of_prompt = limits.max_model_len - 1
    assert max(watched.num_logits) <= max(limits.max_num_seqs * (1 + limits.draft_length), of_prompt)


def test_drafts_are_verified_and_proposed(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    limits = StepLimits(max_num_seqs=3, max_num_batched_tokens=40, max_model_len=32, draft_length=2)
    proposer = DraftModelProposer(model, model_cache(model, num_blocks=3))
    profile_run(runner_of(model, limits, proposer=proposer), VOCAB_SIZE, limits)
    assert (40, 3, 32) in watched.steps
    assert 9 in watched.num_logits
    assert watched.num_logits.count(3) >= 2  # proposals


def test_drafts_are_captured_though_the_most_requests_have_none(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    limits = StepLimits(12, 40, 32, draft_length=0, longest_draft=3, max_drafts=7)
    cache = model_cache(model, num_blocks=3)
    graphs = DraftGraphs(model, cache, watched.capture, 40)
    proposer = DraftModelProposer(model, cache, graphs)
    runner = runner_of(model, limits, proposer=proposer, capture=watched.capture)
    profile_run(runner, VOCAB_SIZE, limits)
    assert watched.steps.count((8, 2, 4)) >= 2 * TIMES  # two requests with three drafts: both models
    assert sum(step[:2] == (2, 2) for step in watched.steps) >= TIMES  # drafts of both
    assert len(watched.captured) > 3


def test_requests_after_it_are_what_they_would_be(model: Decoder) -> None:
    outputs = []
    for _ in range(2):
        cache = model_cache(model)
        runner = ModelRunner(model, [cache], max_num_seqs=4, max_model_len=128, block_size=BLOCK_SIZE)
        driver = StepDriver(runner, cache, max_num_seqs=4)
        driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0))
        driver.run(6)
        outputs.append(driver.requests["a"].output)
        limits = StepLimits(4, 64, 128, 0)
        profile_run(runner_of(model, limits), VOCAB_SIZE, limits)
    assert outputs[0] == outputs[1]


class Littered(TorchDispatchMode):
    """While it is entered, memory that torch allocates holds numbers that are no token, place or logit."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.num_filled = 0
        self._number = number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            self.num_filled += 1
            result.fill_(self._number if result.is_floating_point() else torch.iinfo(result.dtype).max // 7)
        return result


def test_small_steps_of_each_length_are_scored_if_keys_are_evicted(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    after_attention = CacheEvictor.after_attention

    def watch(evictor: CacheEvictor, layer: int) -> None:
        after_attention(evictor, layer)
        scores = evictor._step_scores
        if scores is not None and layer == 0:
            scored.append(int(scores.num_keys.max()))

    monkeypatch.setattr(CacheEvictor, "after_attention", watch)
    monkeypatch.setattr(profiling, "MAX_SCORED_TOKENS", 64)
    limits = StepLimits(max_num_seqs=4, max_num_batched_tokens=96, max_model_len=60, draft_length=0)
    profile_run(runner_of(model, limits, eviction=EVICTION), VOCAB_SIZE, limits)
    assert scored == [1, 2, 4, 8, 16, 32, 60]  # the longest of two requests; more are not scored


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("litter", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3", {}), ("gemma2", {}), ("qwen3_moe", {}), ("qwen3", {"quantization": "int4", "group_size": 32})],
    ids=["qwen3", "gemma2", "experts", "int4"],
)
@pytest.mark.parametrize("eviction", [None, EVICTION], ids=["keeps", "evicts"])
def test_kernels_are_compiled_before_whatever_is_in_memory(
    family: str,
    options: dict[str, Any],
    eviction: Any,
    litter: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No number that a kernel would have written is an index, nor ends the run."""
    path = make_checkpoint(family, tmp_path, num_key_value_heads=1, num_hidden_layers=1)
    model = load_decoder(path, read_model_config(path), options=WeightOptions(kernels="triton", **options))
    limits = StepLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=20, draft_length=0)
    if eviction is not None and any(spec.window for spec in model.config.kv_specs):
        pytest.skip("windows count positions")
    runner = runner_of(model, limits, eviction=eviction, capture=lambda compute: compute)
    launches: list[Any] = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **options: launches.append(args))

    with compile_only(2), Littered(litter) as memory:
        _compute_all(_DummySteps(runner, VOCAB_SIZE), limits, 1)
    assert memory.num_filled > 20
    assert not launches


@pytest.mark.parametrize(
    ("family", "is_mixed", "different"),
    [("qwen3", False, [0]), ("gemma2", False, [0, 1]), ("olmo2", False, [0, 3]), ("qwen3", True, [0, 2])],
)
def test_layers_of_one_kind_are_compiled_once(
    family: str, is_mixed: bool, different: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of Gemma 2 have a window and none by turns, and in OLMo 2 a norm follows the last one only.

    Who is told of layers is told of all.
    """
    path = make_checkpoint(family, tmp_path, num_hidden_layers=4)
    model = load_decoder(path, read_model_config(path), options=WeightOptions(kernels="triton"))
    if is_mixed:
        _, feed_forward = model.layers[2]
        weight = torch.zeros(feed_forward.down.out_features, feed_forward.down.in_features)
        feed_forward.down = model.kernels.linear([weight], dtype=torch.float16)
    cache = model_cache(model, num_blocks=3)
    batch = AttentionBatch.build(np.zeros(1), np.ones(1), np.zeros((1, 1)), BLOCK_SIZE)
    computed: list[int] = []
    attentions = [attention for attention, _ in model.layers]
    forward = Attention.forward

    def watched(self: Attention, *args: Any) -> torch.Tensor:
        computed.append(attentions.index(self))
        return forward(self, *args)

    monkeypatch.setattr(Attention, "forward", watched)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **options: None)
    hook = mock.create_autospec(LayerHook, instance=True)
    for context, is_told, expected in (
        (compile_only(2), None, different),
        (compile_only(2), hook, [0, 1, 2, 3]),
        (contextlib.nullcontext(), None, [0, 1, 2, 3]),
    ):
        with context:
            model.forward(torch.zeros(1, dtype=torch.int64), cache.views, batch, hook=is_told)
        assert computed == expected
        computed.clear()


@pytest.mark.parametrize("litter", [float("nan"), -1e30])
def test_nothing_is_proposed_after_whatever_is_in_memory(
    litter: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kernel would have chosen is no token that a draft model continues."""
    path = make_checkpoint("qwen3", tmp_path, num_key_value_heads=1, num_hidden_layers=1)
    model = load_decoder(path, read_model_config(path), options=WeightOptions(kernels="triton"))
    limits = StepLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=20, draft_length=2)
    cache = model_cache(model, num_blocks=3)
    proposer = DraftModelProposer(model, cache, DraftGraphs(model, cache, lambda compute: compute, 8))
    runner = runner_of(model, limits, proposer=proposer, capture=lambda compute: compute)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **options: None)
    proposed: list[Any] = []
    propose = DraftModelProposer.propose

    def watched(*args: Any) -> Any:
        proposed.append(propose(*args))
        return proposed[-1]

    monkeypatch.setattr(DraftModelProposer, "propose", watched)
    with compile_only(2), Littered(litter):
        _compute_all(_DummySteps(runner, VOCAB_SIZE), limits, 1)
    assert proposed


@pytest.mark.interpreter
def test_kernels_in_triton_take_its_steps(tmp_path: Path) -> None:
    """In the interpreter, with grammars, biases and log-probabilities, and decode steps on a tape."""
    path = make_checkpoint("qwen3", tmp_path, num_key_value_heads=1, num_hidden_layers=1)
    model = load_decoder(path, read_model_config(path), options=WeightOptions(kernels="triton"))
    tapes: list[OperationTape] = []

    def capture(compute: Callable[[], None]) -> Callable[[], None]:
        with OperationTape() as tape:
            compute()
        tapes.append(tape)
        return tape.replay

    limits = StepLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=20, draft_length=0)
    runner = runner_of(model, limits, capture=capture)
    profile_run(runner, VOCAB_SIZE, limits)
    assert tapes
    tables = 2 * 5 * 4  # of the longest context
    assert runner.max_array_bytes > 64 * tables
