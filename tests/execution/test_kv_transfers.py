"""The worker side of a connector is called at the right times with the right things."""

import numpy as np
import pytest
import torch
from step_driver import int_array, make_driver, plan

from late_tokens import LateCopy, choose_on_device
from quire.execution.device_step import DeviceStep
from quire.kv.connectors.interface import KVConnector
from quire.sampling_params import SamplingParams
from quire.step import KVConnectorOutput, ModelRunnerOutput, NewRequestData

GREEDY = SamplingParams(temperature=0.0)
NUM_LAYERS = 2


def scheduler_side(self, *_):
    raise AssertionError("the runner calls the worker side only")


class RecordingConnector(KVConnector):
    """Writes every call down; loads `to_load`, {block: its content}, layer by layer as it is waited for."""

    get_num_new_matched_tokens = update_state_after_alloc = cancel_load = build_connector_meta = (
        scheduler_side
    )
    request_finished = leases_renewed = reset = scheduler_side

    def __init__(self):
        self.calls = []
        self.kv_caches = None
        self.to_load = {}
        self.saved = {}
        self.finished = frozenset(), frozenset()
        self.failed = frozenset()

    def register_kv_caches(self, kv_caches):
        assert self.kv_caches is None
        self.kv_caches = kv_caches

    def start_load_kv(self, metadata):
        self.calls.append(("start", metadata))

    def wait_for_layer_load(self, layer):
        self.calls.append(("wait", layer))
        for block, content in self.to_load.items():
            self.kv_caches.tensor[block, layer] = content[layer]

    def save_kv_layer(self, layer, keys, values):
        self.calls.append(("save", layer))
        self.saved[layer] = torch.stack((keys, values), dim=1)

    def wait_for_save(self, failed_ids):
        self.calls.append(("wait for save", failed_ids))

    def begin_save(self, failed_ids):
        self.calls.append(("begin save", failed_ids))

    def get_finished(self, finished_ids):
        self.calls.append(("finished", list(finished_ids)))
        return self.finished

    def get_block_ids_with_load_errors(self):
        self.calls.append(("errors",))
        return self.failed


@pytest.fixture
def connector():
    return RecordingConnector()


def test_a_step_calls_the_connector_in_order(models, prompts, connector):
    driver = make_driver(models["float32"], connector=connector)
    assert connector.kv_caches is driver.kv_cache
    driver.add("r", prompts[2], GREEDY)
    connector.finished = frozenset({"x"}), frozenset({"y"})
    connector.failed = frozenset({7})
    result = driver.step({"r": 17})
    layers = [(name, layer) for layer in range(NUM_LAYERS) for name in ("wait", "save")]
    assert connector.calls == [
        ("start", None), *layers, ("wait for save", frozenset()), ("finished", []), ("errors",)
    ]  # fmt: skip
    assert result.kv_connector_output == KVConnectorOutput(frozenset({"x"}), frozenset({"y"}), frozenset({7}))


def test_a_connector_that_works_on_whole_blocks_is_told_of_no_layer(models, prompts, connector):
    connector.works_by_layer = False
    driver = make_driver(models["float32"], connector=connector)
    driver.add("r", prompts[2], GREEDY)
    driver.step({"r": 17})
    assert connector.calls == [
        ("start", None), ("wait for save", frozenset()), ("finished", []), ("errors",)
    ]  # fmt: skip


def test_a_connector_by_group_gets_the_caches_of_all_groups(models, connector):
    connector.by_group = True
    driver = make_driver(models["float32"], connector=connector)
    assert connector.kv_caches == (driver.kv_cache,)


def test_a_step_without_tokens_moves_kv_all_the_same(models, connector):
    driver = make_driver(models["float32"], connector=connector)
    result = driver.runner.execute(plan(finished=["gone"], metadata="plan of the step"))
    assert connector.calls == [
        ("start", "plan of the step"), ("wait for save", frozenset()), ("finished", ["gone"]), ("errors",)
    ]  # fmt: skip
    assert result.kv_connector_output == KVConnectorOutput()


@pytest.fixture
def model_on_device(models, monkeypatch):
    choose_on_device(monkeypatch)
    monkeypatch.setattr(LateCopy, "has_arrived", property(lambda self: self._is_waited_for))
    return models["float32"]


def start(driver, name, tokens, num_tokens, computed=0, **changes):
    """Ask for a step of one request of `tokens`, in the slot and the blocks of its name."""
    slot = int(name)
    blocks = np.arange(slot * 10, slot * 10 + 10, dtype=np.int32)[None]
    new = [NewRequestData(name, slot, int_array(tokens), [], GREEDY, (), blocks, 0)] * (not computed)
    return driver.runner.execute(
        plan([slot], [num_tokens], [computed], [name], known=[len(tokens)], new=new, **changes)
    )


def fill(driver, value):
    with torch.inference_mode():
        driver.kv_cache.tensor.fill_(value)


def test_no_step_is_in_flight_beside_a_connector_that_has_to_be_told_who_failed(
    model_on_device, prompts, connector
):
    driver = make_driver(model_on_device, connector=connector)
    assert isinstance(start(driver, "0", prompts[2], 17), ModelRunnerOutput)
    assert ("wait for save", frozenset()) in connector.calls


def test_a_connector_that_saves_before_tokens_is_told_later_who_failed(model_on_device, prompts, connector):
    connector.saves_before_tokens = True
    connector.finished = frozenset(), frozenset({"y"})
    driver = make_driver(model_on_device, connector=connector)
    steps = [start(driver, "0", prompts[2], 17), start(driver, "1", prompts[3], 20)]
    assert isinstance(steps[0], DeviceStep)
    assert steps[0].kv_connector_output == KVConnectorOutput(finished_receiving=frozenset({"y"}))
    assert steps[1].kv_connector_output is not None, "a chunk of a prompt samples nothing, and is done"
    told = [call[1] for call in connector.calls if call[0] == "begin save"]
    assert len(told) == 2, "it may have read what the step before has written"
    assert [failed_ids() for failed_ids in told] == [frozenset(), frozenset()]
    assert steps[0].result().kv_connector_output is steps[0].kv_connector_output
    start(driver, "1", prompts[3], 10, computed=20)
    assert connector.calls[-3] == ("wait for save", frozenset())


def test_logits_without_numbers_void_the_steps_behind_them(model_on_device, prompts, connector):
    connector.saves_before_tokens = True
    driver = make_driver(model_on_device, connector=connector)
    start(driver, "0", prompts[2], 1)
    fill(driver, float("nan"))
    failing = start(driver, "0", prompts[2], 16, computed=1)
    fill(driver, 0.0)
    behind = start(driver, "0", [*prompts[2], 0], 1, computed=17)
    told = [call[1] for call in connector.calls if call[0] == "begin save"]
    assert told[-1]() == {"0"}
    assert [list(step.result().errors) for step in (failing, behind)] == [["0"], []]


def test_what_is_loaded_is_read_and_what_is_written_is_saved(models, prompts, connector):
    """KV of one engine, saved layer by layer, continues its request in another."""
    model = models["float32"]
    source = make_driver(model, connector=connector)
    source.add("r", prompts[2], GREEDY)
    source.step({"r": 16})
    blocks = source.requests["r"].blocks
    saved = {layer: connector.saved[layer][blocks].clone() for layer in range(NUM_LAYERS)}
    for layer, content in saved.items():
        assert torch.equal(content, source.kv_cache.tensor[blocks, layer])
    source.run(5)

    loading = RecordingConnector()
    target = make_driver(model, connector=loading)
    target.add("r", prompts[2], GREEDY)
    request = target.requests["r"]
    target.step({"r": 16})
    with torch.inference_mode():
        target.kv_cache.tensor.fill_(float("nan"))
    loading.to_load = {
        block: torch.stack([saved[layer][index] for layer in range(NUM_LAYERS)])
        for index, block in enumerate(request.blocks)
    }
    target.step({"r": 1})
    loading.to_load = {}
    target.run(5)
    assert request.output == source.requests["r"].output


def test_without_a_connector_nothing_is_reported(models, prompts):
    driver = make_driver(models["float32"])
    driver.add("r", prompts[0], GREEDY)
    assert driver.step({"r": 1}).kv_connector_output is None
