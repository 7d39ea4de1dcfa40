"""Choosing tokens from the logits of captured steps: the tokens that are chosen otherwise."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorder import Recorder, driver_of

from call_through import call_through
from checkpoints import make_checkpoint
from quire.execution import capture_backoff
from quire.execution.sampling import captured_choice
from quire.execution.sampling.captured_choice import (
    NUM_CAPTURED_EDITS,
    CapturedChoice,
    ChoiceNumbers,
    ChoiceTensors,
)
from quire.execution.sampling.constraints import RowMasks
from quire.kernels.interface import Capture, KernelSet
from quire.kernels.sampling.token_choice import NUM_DRAW_NUMBERS, NUM_EDIT_NUMBERS
from quire.kernels.size_classes import SizeClasses, size_class
from quire.kernels.triton.kernel_set import TritonKernels
from quire.models.checkpoints.config_reading import read_model_config
from quire.models.checkpoints.loading import WeightOptions, load_decoder
from quire.models.decoder import Decoder
from quire.sampling_params import SamplingParams

REQUESTS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=1.5, top_p=0.9, seed=3),
    "nucleus": SamplingParams(temperature=1.2, top_k=7, min_p=0.01, seed=5),
    "reported": SamplingParams(temperature=0.8, seed=9, logprobs=2),
    "penalized": SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.5, logprobs=1),
    "penalized and drawn": SamplingParams(temperature=1.1, seed=4, frequency_penalty=1.5),
    "masked": SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(3, 90, 2)), logprobs=1),
    "penalized and masked": SamplingParams(
        temperature=1.3, seed=6, repetition_penalty=1.4, allowed_token_ids=tuple(range(4, 90, 3))
    ),
    "biased": SamplingParams(temperature=0.0, logit_bias={7: 2.0, 300: 4.0}),
    "banned": SamplingParams(
        temperature=0.7,
        seed=8,
        min_tokens=3,
        logit_bias={7: 2.0, 9: -1.0},
        bad_words_token_ids=(
            *((token,) for token in range(100, 370)),
            *itertools.product(range(99), [9, 11]),
        ),
    ),
}
GROUPS = [
    ["greedy", "drawn", "nucleus", "reported"],
    ["nucleus", "drawn"],
    ["greedy"],
    ["penalized", "greedy", "penalized"],
    ["greedy", "penalized and drawn", "drawn", "penalized"],
    ["penalized", "masked"],
    ["masked", "greedy"],
    ["masked", "drawn"],
    ["penalized and masked", "masked", "drawn", "penalized"],
    ["biased", "masked"],
    ["banned", "drawn", "biased"],
    ["banned", "penalized"],
]
MAX_NUM_SEQS = 4


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    path = make_checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    return load_decoder(path, read_model_config(path), options=WeightOptions(kernels="triton"))


def replayed_choices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, bool, bool, int]]:
    """Return a list to which the rows and kinds of choices go that are replayed."""
    replayed = []

    def watched(replay_of: Any, self: CapturedChoice, logits: torch.Tensor, tensors: Any) -> Any:
        replay = replay_of(self, logits, tensors)
        if replay is not None:
            replayed.append((len(logits), *tensors.kind))
        return replay

    call_through(monkeypatch, CapturedChoice, "_replay_of", watched)
    return replayed


@pytest.mark.interpreter
def test_requests_that_come_and_go_have_the_tokens_of_others(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows for 4, some of which are nobody's, and in other slots each time."""
    monkeypatch.setattr(KernelSet, "step_sizes", SizeClasses(lambda _: MAX_NUM_SEQS, size_class, size_class))
    replayed = replayed_choices(monkeypatch)
    found: list[dict[str, Any]] = []
    for capture in (None, Recorder().capture):
        driver, outputs = driver_of(model, capture, MAX_NUM_SEQS), {}
        for group in GROUPS:
            for number, name in enumerate(group):
                driver.add(f"{number}: {name} of {group}", range(5 + number, 7 + 2 * number), REQUESTS[name])
            driver.run(4)
            outputs.update(driver.requests)
            driver.requests.clear()
        found.append({name: (request.output, request.logprobs) for name, request in outputs.items()})
    assert found[0] == found[1]
    assert len({tuple(output) for output, _ in found[0].values()}) > 10
    kinds = itertools.product([False, True], repeat=3)
    assert set(replayed) >= {(MAX_NUM_SEQS, *kind, 0) for kind in kinds}
    assert {kind[-1] for kind in replayed} == {0, *NUM_CAPTURED_EDITS}


class Choices:
    """Chooses the sum of a row, or with draws, that and its numbers; keeps what it is told of slots."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.last = torch.zeros(MAX_NUM_SEQS + 1, dtype=torch.int64)

    def choose(self, logits: torch.Tensor, tensors: ChoiceTensors) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_calls += 1
        token_ids = logits.sum(dim=1).long()
        if tensors.draws is not None:
            assert tensors.draws.shape == (NUM_DRAW_NUMBERS, len(logits))
            token_ids = token_ids + tensors.draws.sum(dim=0).long()
        self.last.index_copy_(0, tensors.slots, token_ids)
        return token_ids, logits.amax(dim=1)


def captured_choice_of(
    choices: Choices, capture: Capture, kernels: TritonKernels | None = None
) -> CapturedChoice:
    kernels = kernels or TritonKernels()
    return CapturedChoice(choices.choose, capture, kernels, max_num_seqs=MAX_NUM_SEQS, num_words=1)


def rows_of(*numbers: float) -> torch.Tensor:
    """Return logits of 3 tokens."""
    return torch.tensor([[number, 0.0, 1.0] for number in numbers])


def choose(captured: CapturedChoice, logits: torch.Tensor, slots: list[int], draws: Any = None) -> list[int]:
    token_ids, maxima = captured.choose(logits, ChoiceNumbers(np.array(slots), draws))
    expected = logits.amax(dim=1)[: len(slots)]
    assert torch.equal(maxima, expected)
    chosen: list[int] = token_ids.tolist()
    return chosen


def test_what_is_replayed_reads_new_numbers() -> None:
    recorder, choices = Recorder(), Choices()
    captured = captured_choice_of(choices, recorder.capture)
    logits = rows_of(10, 20, 0)
    for step in range(4):
        logits[:, 0] += 1
        slots = [2, 1] if step < 3 else [0]
        assert choose(captured, logits, slots) == [12 + step, 22 + step][: len(slots)]
        assert choices.last[slots].tolist() == [12 + step, 22 + step][: len(slots)]
        draws = np.full((NUM_DRAW_NUMBERS, len(slots)), float(step))
        assert choose(captured, logits, slots, draws) == [12 + 6 * step, 22 + 6 * step][: len(slots)]
    assert choices.last[3] == 0, "the slot of no row"
    # Each kind is computed, then captured and replayed.
    assert (recorder.num_captures, recorder.num_replays, choices.num_calls) == (2, 6, 4)


def test_logits_at_other_addresses_have_recordings_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_choice, "MAX_CHOICES", 2)
    recorder = Recorder()
    captured = captured_choice_of(Choices(), recorder.capture)
    steps = [rows_of(number, number) for number in (1, 2, 3)]
    for _ in range(3):
        for number, logits in enumerate(steps[:2]):
            assert choose(captured, logits, [0, 1]) == [2 + number, 2 + number]
    assert recorder.num_captures == 2
    assert choose(captured, steps[2], [0, 1]) == [4, 4]  # the first one's goes
    assert choose(captured, steps[1], [0, 1]) == [3, 3]
    assert recorder.num_captures == 3
    assert choose(captured, steps[0], [0, 1]) == [2, 2]
    assert recorder.num_captures == 4


def test_nothing_is_captured_before_kernels_have_been_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, kernels = Recorder(), TritonKernels()
    captured = captured_choice_of(Choices(), recorder.capture, kernels)
    logits = rows_of(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(TritonKernels, "compiles_only", True)
        for _ in range(3):
            choose(captured, logits, [0, 1])
    choose(captured, logits, [0, 1])
    assert recorder.num_captures == 0
    choose(captured, logits, [0, 1])
    assert recorder.num_captures == 1


def test_what_cannot_be_captured_is_computed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again after a while; what can be captured still is."""
    monkeypatch.setattr(capture_backoff, "MIN_STEPS", 3)
    recorder, choices, attempts = Recorder(), Choices(), []

    def capture(compute: Callable[[], None]) -> Callable[[], None]:
        attempts.append(compute)
        if len(attempts) in (1, 3):
            raise RuntimeError("operation not permitted when stream is capturing")
        return recorder.capture(compute)

    captured = captured_choice_of(choices, capture)
    logits, draws = rows_of(3, 7), np.ones((NUM_DRAW_NUMBERS, 2))
    for _ in range(4):
        assert choose(captured, logits, [0, 1]) == [4, 8]
    assert len(attempts) == 1
    assert caplog.text.count("cannot be captured") == 1
    for _ in range(3):
        assert choose(captured, logits, [0, 1], draws) == [9, 13]
    assert (len(attempts), recorder.num_replays) == (2, 2)
    num_attempts = []
    for _ in range(9):
        assert choose(captured, logits, [0, 1]) == [4, 8]
        num_attempts.append(len(attempts))
    assert num_attempts == [3, 3, 3, 3, 3, 3, 4, 4, 4], "the second pause is twice as long"
    assert recorder.num_replays == 5


def test_slots_are_copied_only_where_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[list[int]] = []
    copy = captured_choice.copy_to_device

    def noted(source: torch.Tensor, target: torch.Tensor) -> None:
        copied.append(source.tolist())
        copy(source, target)

    monkeypatch.setattr(captured_choice, "copy_to_device", noted)
    choices = Choices()
    captured = captured_choice_of(choices, Recorder().capture)
    for slots in ([2, 1], [2, 1], [1], [1], [2, 1]):
        choose(captured, rows_of(5, 6, 7), slots)
        assert choices.last[slots].tolist() == [6, 7][: len(slots)]
    nobody = MAX_NUM_SEQS
    assert copied == [[[2, 1, nobody]], [[1, nobody, nobody]], [[2, 1, nobody]]]


def test_what_there_is_no_room_for_is_not_captured() -> None:
    captured = captured_choice_of(Choices(), Recorder().capture)
    numbers = ChoiceNumbers(np.zeros(1, dtype=np.int64))
    assert captured.has_room(rows_of(*range(MAX_NUM_SEQS)), numbers)
    assert not captured.has_room(rows_of(*range(MAX_NUM_SEQS + 1)), numbers)
    for num_edits in (NUM_CAPTURED_EDITS[-1], NUM_CAPTURED_EDITS[-1] + 1):
        edits = np.zeros((NUM_EDIT_NUMBERS, num_edits))
        has_room = captured.has_room(rows_of(1), dataclasses.replace(numbers, edits=edits))
        assert has_room == (num_edits == NUM_CAPTURED_EDITS[-1])
    for num_masks in (MAX_NUM_SEQS, MAX_NUM_SEQS + 1):
        masks = RowMasks(np.zeros((num_masks, 1), dtype=np.int32), np.zeros(1, dtype=np.int64))
        has_room = captured.has_room(rows_of(1), dataclasses.replace(numbers, masks=masks))
        assert has_room == (num_masks == MAX_NUM_SEQS)
