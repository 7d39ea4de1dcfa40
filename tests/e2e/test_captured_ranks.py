"""Two ranks that capture steps and replay them: the bits of others, and the same captures on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from call_through import call_through
from checkpoints import make_checkpoint
from quire import LLM, EngineConfig, SamplingParams
from quire.engine import core
from quire.engine.building import measurement as memory_measurement
from quire.engine.building.runner import LoadedModels
from quire.engine.memory.plan import MemoryPlan
from quire.errors import EngineDeadError
from quire.execution.model_runner import ModelRunner
from quire.kernels.triton.device import is_interpreted
from taped_ranks import MAX_GRAPHS, RESERVED, TapedRanks

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not is_interpreted, reason="on a GPU, tests/gpu has this"),
    pytest.mark.usefixtures("preloaded_engines"),
]
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12]]
LENGTHS = (10, 4, 7)  # of what follows: three rows, then two, then one
SETTINGS: dict[str, Any] = {
    "kernels": "triton",
    "tensor_parallel_size": 2,
    "num_kv_blocks": 16,
    "max_num_seqs": 3,
    "block_size": 16,
    "overlap_steps": True,
}
BEGINNING = [f"reserves {RESERVED}", "captures 0"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("qwen3")
    return str(make_checkpoint("qwen3", path, dtype="float32", num_hidden_layers=1))


def results(
    checkpoint: str, *, prompts: Any = PROMPTS, lengths: tuple[int, ...] = LENGTHS, **options: Any
) -> list[Any]:
    """Return tokens, some greedy and some drawn, and the bits of their log-probabilities."""
    params = [
        SamplingParams(max_tokens=length, temperature=0.8 * (number % 2), seed=3, ignore_eos=True, logprobs=1)
        for number, length in enumerate(lengths)
    ]
    with LLM(checkpoint, **SETTINGS, **options) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [(output.token_ids, output.cumulative_logprob.hex()) for output in outputs]


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[Any]:
    return results(checkpoint)


def test_replayed_steps_have_the_bits_of_others(
    checkpoint: str, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = TapedRanks(monkeypatch, tmp_path)
    assert results(checkpoint) == expected
    first, second = ranks.events
    assert first == second
    assert first[:2] == BEGINNING
    num_captures = sum(event.startswith("captures") for event in first)
    assert MAX_GRAPHS < num_captures < sum(event.startswith("replays") for event in first)


def test_replayed_steps_work_on_the_states_of_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recurrent = str(make_checkpoint("lfm2", tmp_path / "model", dtype="float32"))
    expected = results(recurrent)
    ranks = TapedRanks(monkeypatch, tmp_path)
    assert results(recurrent) == expected
    first, second = ranks.events
    assert first == second
    assert any(event.startswith("replays") for event in first)


def test_chunks_of_prompts_are_replayed_beside_decodes(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 8 tokens, of which those that decode have logits, and the chunk has none."""
    prompts = [[10], [11, 12], [5 + number % 90 for number in range(32)]]
    options = {"prompts": prompts, "lengths": (6, 6, 1), "max_num_batched_tokens": 8}
    expected = results(checkpoint, **options)
    captured: list[int] = []
    ranks = TapedRanks(monkeypatch, tmp_path)

    def watched(replay: Any, runner: ModelRunner, output: Any, *given: Any) -> Any:
        captured.append(output.total_num_scheduled_tokens)
        return replay(runner, output, *given)

    monkeypatch.setattr(ModelRunner, "_is_small", lambda _self, _output, sampling: len(sampling.tokens) > 0)
    call_through(monkeypatch, ModelRunner, "_replay", watched)
    assert results(checkpoint, **options) == expected
    first, second = ranks.events
    assert first == second
    assert captured.count(8) > 3
    assert first[2:].count("replays 0") > 1  # of such steps: nothing decodes afterwards


def test_steps_are_captured_anew_after_those_that_measure_memory(
    checkpoint: str, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = TapedRanks(monkeypatch, tmp_path)
    build_runner = core.build_runner
    measured: list[list[list[str]]] = []

    def measure_and_build(config: EngineConfig, models: LoadedModels, plan: MemoryPlan, **parts: Any) -> Any:
        memory_measurement._profile_steps(config, plan, models, Mock(peak=0))
        measured.append(ranks.events)
        return build_runner(config, models, plan, **parts)

    monkeypatch.setattr(core, "build_runner", measure_and_build)
    options = {"max_num_batched_tokens": 8, "max_model_len": 32}
    assert results(checkpoint, **options) == expected
    first, second = ranks.events
    assert first == second
    [[before, _]] = measured
    assert before[:2] == first[len(before) :][:2] == BEGINNING
    assert "replays 0" in before


@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_that_one_rank_cannot_capture_is_captured_on_none(
    failing: int,
    checkpoint: str,
    expected: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    failures = ("refuses", "") if failing == 0 else ("", "refuses")
    ranks = TapedRanks(monkeypatch, tmp_path, failures)
    assert results(checkpoint) == expected
    assert ranks.events == [BEGINNING, BEGINNING]
    logs = caplog.text, capfd.readouterr().err
    assert logs[failing].count("a step cannot be captured as a graph") == 1
    assert logs[1 - failing].count("another rank cannot capture a step as a graph") == 1


def test_a_rank_that_does_not_end_its_recording_ends_the_engine(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TapedRanks(monkeypatch, tmp_path, ("", "hangs"))
    told = "tensor_parallel_timeout, 2 seconds|rank 1, .*, has given no sign of life for 2 seconds"
    with pytest.raises(EngineDeadError, match=told):  # the second if the rank is held up besides
        results(checkpoint, tensor_parallel_timeout=2.0)
