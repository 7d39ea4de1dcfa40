"""Rows of prompts: from whatever chunks, alone or beside others; and plans that the runner refuses."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from step_driver import int_array, make_driver, plan

from quire.execution.persistent_batch import InconsistentPlanError
from quire.execution.profile_run import StepLimits, profile_run
from quire.pooling_params import PoolingParams
from quire.sampling_params import ONE_TOKEN
from quire.step import NewRequestData, ResumedRequestData

LAST, CLS, MEAN = (PoolingParams(pooling_type=kind, normalize=False) for kind in ("last", "cls", "mean"))
BLOCKS_EACH = 20


@pytest.fixture(params=["float32", "bfloat16"])
def model(models, request):
    """A decoder that is pooled."""
    return pooled(models[request.param])


def pooled(decoder):
    model = copy.copy(decoder)
    model.config = dataclasses.replace(decoder.config, pooling=LAST)
    return model


def new(slot, prompt, params, *, num_computed=0):
    blocks = int_array([range(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH)])
    return NewRequestData(
        f"r{slot}", slot, int_array(prompt), [], ONE_TOKEN, (), blocks, num_computed, pooling_params=params
    )


def compute(runner, prompts, params, chunks):
    """Compute requests in steps of the given {slot: tokens}; return their rows by slot."""
    computed, rows = dict.fromkeys(range(len(prompts)), 0), {}
    for chunk in chunks:
        starting = [slot for slot in chunk if not computed[slot]]
        result = runner.execute(
            plan(
                list(chunk),
                list(chunk.values()),
                [computed[slot] for slot in chunk],
                [f"r{slot}" for slot in chunk],
                known=[len(prompts[slot]) for slot in chunk],
                new=[new(slot, prompts[slot], params[slot]) for slot in starting],
            )
        )
        assert (result.sampled_token_ids == -1).all()
        assert not result.errors
        for slot, count in chunk.items():
            computed[slot] += count
        ended = [slot for slot in chunk if computed[slot] == len(prompts[slot])]
        assert list(result.pooled) == [f"r{slot}" for slot in ended]
        rows |= {slot: np.frombuffer(result.pooled[f"r{slot}"], dtype=np.float32) for slot in ended}
    return rows


def test_rows_are_those_of_whole_prompts(model, prompts):
    runner = make_driver(model).runner
    prompts = [prompts[3], prompts[2], prompts[4]]
    sizes = [len(prompt) for prompt in prompts]
    for params in ([MEAN, LAST, CLS], [CLS, MEAN, LAST], [LAST, CLS, MEAN]):
        whole = compute(runner, prompts, params, [{slot: size} for slot, size in enumerate(sizes)])
        chunked = compute(
            runner,
            prompts,
            params,
            [{0: 1, 1: 16}, {2: 30}, {0: sizes[0] - 2, 2: 30, 1: 1}, {2: 1, 0: 1}],
        )
        for slot, prompt in enumerate(prompts):
            assert whole[slot].tobytes() == chunked[slot].tobytes()
            hidden = hidden_of(model, prompt).double()
            expected = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}
            wanted = expected[params[slot].pooling_type].float().numpy()
            np.testing.assert_allclose(whole[slot], wanted, atol=1e-6)


def hidden_of(model, prompt):
    runner = make_driver(model).runner
    found = []
    forward = model.forward
    model.forward = lambda *given, **named: found.append(forward(*given, **named)) or found[-1]
    compute(runner, [prompt], [LAST], [{0: len(prompt)}])
    del model.forward
    return found[0].clone()


def test_normalized_rows_have_length_one(models, prompts):
    runner = make_driver(pooled(models["float32"])).runner
    plain = compute(runner, prompts[2:3], [MEAN], [{0: 17}])[0]
    row = compute(runner, prompts[2:3], [dataclasses.replace(MEAN, normalize=True)], [{0: 17}])[0]
    np.testing.assert_allclose(row, plain / np.linalg.norm(plain.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("chunks", [[{0: 3}], [{0: 1}, {0: 2}]], ids=["whole", "chunks"])
def test_a_mean_does_not_depend_on_the_order_of_its_terms(models, chunks):
    model = pooled(models["float32"])
    for order in itertools.permutations([2.0**26, -(2.0**26), 1.5 * 2**-26]):
        states = torch.tensor(order)[:, None].repeat(1, model.config.hidden_size)
        parts = iter(states.split([chunk[0] for chunk in chunks]))
        model.forward = lambda *given, parts=parts, **named: next(parts)
        [row] = compute(make_driver(model).runner, [[5, 6, 7]], [MEAN], chunks).values()
        assert set(row.tolist()) == {np.float32(2**-25 / 3).item()}


def test_a_preempted_prompt_starts_again(models, prompts):
    runner = make_driver(pooled(models["float32"])).runner
    [expected] = compute(runner, prompts[3:4], [MEAN], [{0: 40}]).values()
    runner.execute(plan([0], [23], [0], ["r0"], known=[40], new=[new(0, prompts[3], MEAN)]))
    blocks = new(1, [], None).block_ids
    again = ResumedRequestData("r0", 1, blocks, 0, 40, 0)
    result = runner.execute(plan([1], [40], [0], ["r0"], preempted=["r0"], resumed=[again]))
    assert result.pooled["r0"] == expected.tobytes()


def test_prompts_in_a_slot_do_not_mix(models, prompts):
    runner = make_driver(pooled(models["float32"])).runner
    [expected] = compute(runner, prompts[2:3], [MEAN], [{0: 17}]).values()
    runner.execute(plan([0], [23], [0], ["r0"], known=[40], new=[new(0, prompts[3], MEAN)], finished=["r0"]))
    [found] = compute(runner, prompts[2:3], [MEAN], [{0: 17}]).values()
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("params", [MEAN, CLS], ids=["mean", "cls"])
def test_what_a_row_depends_on_must_not_be_skipped(models, prompts, params):
    runner = make_driver(pooled(models["float32"])).runner
    skipping = new(0, prompts[3], params, num_computed=8)
    with pytest.raises(InconsistentPlanError, match=r"scheduled from token 8, with 0 pooled"):
        runner.execute(plan([0], [32], [8], ["r0"], new=[skipping]))


def test_a_request_of_the_other_kind_is_refused(models, prompts):
    for model, params, message in (
        (pooled(models["float32"]), None, "pooling_params None, but the model is pooled"),
        (models["float32"], MEAN, "but the model is not pooled"),
    ):
        runner = make_driver(model).runner
        with pytest.raises(InconsistentPlanError, match=message):
            runner.execute(plan([0], [3], [0], ["r0"], new=[new(0, prompts[1], params)]))


def test_states_that_are_not_finite_fail_their_request_alone(models):
    model = pooled(models["float32"])
    forward = model.forward

    def damaged(*given, **named):
        hidden = forward(*given, **named)
        hidden[2] = float("inf")
        return hidden

    model.forward = damaged
    runner = make_driver(model).runner
    requests = [new(0, [5, 6, 7, 8], MEAN), new(1, [5, 6, 7, 8], MEAN)]
    result = runner.execute(plan([0, 1], [4, 4], [0, 0], ["r0", "r1"], new=requests))
    assert list(result.pooled) == ["r1"]
    assert "NaN or infinite" in result.errors["r0"]


def test_made_up_steps_are_pooled(models):
    model = pooled(models["float32"])
    runner = make_driver(model, num_blocks=64).runner
    assert profile_run(runner, model.config.vocab_size, StepLimits(4, 64, 100, 0)) == 0
    assert runner.is_pooled
