"""KV from elsewhere and for others: loads that come, fail and stay away, and blocks lent to a peer."""

from __future__ import annotations

import numpy as np
import pytest
from fake_runner import naive_generation
from scene import Scene

from counted_lines import num_lines
from faulty_connector import FaultyConnector
from quire.errors import DuplicateRequestError, InvalidRequestError
from quire.status import FinishReason, RequestStatus
from quire.step import ModelRunnerOutput

PROMPT = list(range(17))  # four full blocks and the token that is always computed


class Witness(FaultyConnector):
    """Notes what the scheduler tells a connector."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.ended: list[tuple[str, RequestStatus, list[int], int]] = []
        self.allocated: list[tuple[str, int, int]] = []
        self.undecided = 0
        self.freed: list[str] = []
        self.refused: set[str] = set()

    def request_arrived(self, request):
        if request.request_id in self.refused:
            raise InvalidRequestError("remote_port is 0", param="kv_transfer_params")

    def lease_ended(self, request_id):
        self.freed.append(request_id)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if self.undecided:
            self.undecided -= 1
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.allocated.append((request.request_id, len(block_ids), num_external_tokens))
        super().update_state_after_alloc(request, block_ids, num_external_tokens)

    def request_finished(self, request, block_ids):
        self.ended.append((request.request_id, request.status, request.output_token_ids, len(block_ids)))
        return super().request_finished(request, block_ids)


def scene_with_stored_prompt(*, scene_settings=None, **options) -> Scene:
    """A scene whose connector has the KV of `PROMPT`, and whose own cache has nothing."""
    connector = Witness(4, **options)
    settings = {"enable_prefix_caching": False, "num_blocks": 12, **(scene_settings or {})}
    scene = Scene(connector=connector, **settings)
    scene.add("before", PROMPT, max_tokens=1)
    scene.finish()
    connector.ended.clear()
    return scene


# -- loads -------------------------------------------------------------------------------------------------


def test_a_synchronous_load_takes_part_in_the_step_that_begins_it():
    scene = scene_with_stored_prompt()
    scene.add("a", PROMPT)
    assert scene.step() == {"a": 1}
    assert scene.connector.allocated[-1] == ("a", 5, 16)
    scene.finish()
    scene.check_naive()
    assert scene.cached["a"] == 16
    assert scene.scheduler.make_stats().num_loaded_tokens == 16


def test_a_request_waits_for_an_asynchronous_load_without_a_slot():
    scene = scene_with_stored_prompt(load_steps=2, scene_settings={"max_num_seqs": 1})
    request = scene.add("a", PROMPT)
    scene.add("b", range(30, 33), max_tokens=2)
    assert scene.step() == {"b": 3}
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert scene.scheduler.get_request_counts() == (1, 1)
    assert scene.step() == {"b": 1}
    assert scene.step() == {"a": 1}
    scene.finish()
    scene.check_naive()
    assert scene.cached["a"] == 16


def test_a_connector_sees_a_requests_transfer_parameters_to_its_end():
    scene = scene_with_stored_prompt(send_steps=1)
    seen = {}
    finish = scene.connector.request_finished

    def request_finished(request, block_ids):
        seen[request.request_id] = request.kv_transfer_params
        return finish(request, block_ids)

    scene.connector.request_finished = request_finished
    scene.add("a", PROMPT, kv_transfer_params={"remote": "b"})
    scene.finish()
    assert seen == {"a": {"remote": "b"}}
    assert scene.ends["a"].kv_transfer_params["request_id"] == "a", "the client gets the connector's answer"


@pytest.mark.parametrize("params", [{"socket": object()}, {"port": 2**64}, [1], 5])
def test_transfer_parameters_that_cannot_be_sent_are_dropped_and_the_blocks_held(params, caplog):
    scene = Scene(connector=Witness(4, send_steps=1))
    finish = scene.connector.request_finished
    scene.connector.request_finished = lambda *arguments: (finish(*arguments)[0], params)
    scene.add("a", PROMPT)
    scene.finish()
    assert scene.ends["a"].kv_transfer_params is None
    assert "the kv_transfer_params of request 'a' cannot be sent" in caplog.text


@pytest.mark.parametrize("admission", ["reserve", "past-future"])
def test_a_load_begins_only_if_the_rest_of_its_prompt_will_fit_beside_the_others(admission):
    settings = {"admission": admission, "num_blocks": 10}
    scene = scene_with_stored_prompt(load_steps=2, scene_settings=settings)
    scene.connector.allocated.clear()
    for name, start in (("a", 30), ("b", 60)):
        scene.add(name, PROMPT + list(range(start, start + 11)), max_tokens=1)
    scene.finish()
    scene.check_naive()
    assert [name for name, _, count in scene.connector.allocated if count] == ["a", "b"], "each loads once"
    assert scene.scheduler.make_stats().num_loaded_tokens == 32


def test_what_does_not_fit_beside_a_load_waits_until_that_has_timed_out():
    scene = scene_with_stored_prompt(load_steps=2, scene_settings={"num_blocks": 8})
    scene.connector.never_answer_next_loads(1)
    scene.add("a", PROMPT)
    scene.add("b", range(30, 49))
    assert scene.step() == {}
    scene.clock.advance(scene.config.kv_transfer_timeout + 1)
    scene.finish()
    scene.check_naive()


def test_planning_costs_the_same_however_many_loads_are_on_their_way():
    costs = []
    for num_loads in (10, 200):
        settings = {"num_blocks": 2000, "max_num_queued_reqs": 1000}
        scene = scene_with_stored_prompt(load_steps=1000, scene_settings=settings)
        for number in range(num_loads):
            scene.add(f"load {number}", PROMPT)
        scene.step()
        assert scene.scheduler.make_stats().num_awaiting == num_loads
        scene.add("other", [1, 2, 3], max_tokens=50)
        costs.append(num_lines(scene.scheduler.schedule))
    assert costs[1] < 1.1 * costs[0]


@pytest.mark.parametrize("load_steps", [0, 1])
def test_loaded_tokens_are_no_hits_of_the_own_cache(load_steps):
    scene = scene_with_stored_prompt(load_steps=load_steps, scene_settings={"enable_prefix_caching": True})
    scene.scheduler.reset_prefix_cache()
    scene.add("half", PROMPT[:9], max_tokens=1)
    scene.finish()
    before = scene.scheduler.make_stats()
    scene.add("a", PROMPT)
    scene.finish()
    after = scene.scheduler.make_stats()
    assert after.prefix_queried_tokens - before.prefix_queried_tokens == 17
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == 8
    assert after.num_loaded_tokens - before.num_loaded_tokens == 8
    assert scene.cached["a"] == 16, "the client is told of both"


def test_only_what_the_own_cache_does_not_have_is_loaded():
    scene = scene_with_stored_prompt(scene_settings={"enable_prefix_caching": True})
    scene.scheduler.reset_prefix_cache()
    scene.add("half", PROMPT[:9], max_tokens=1)
    scene.finish()
    scene.connector.allocated.clear()
    scene.add("a", PROMPT)
    scene.step()
    assert scene.connector.allocated == [("a", 5, 8)]
    scene.finish()
    scene.check_naive()


def test_the_last_token_is_computed_even_if_all_could_be_loaded():
    scene = scene_with_stored_prompt()
    scene.connector.get_num_new_matched_tokens = lambda request, num_computed_tokens: (16, False)
    scene.connector.update_state_after_alloc = lambda request, block_ids, num_external_tokens: None
    scene.add("a", PROMPT[:16], max_tokens=1)
    plan = scene.plan()
    assert plan.num_computed_tokens.tolist() == [15]


@pytest.mark.parametrize("num_good", [0, 1, 3])
@pytest.mark.parametrize("load_steps", [0, 1])
def test_what_could_not_be_loaded_is_computed(load_steps, num_good):
    scene = scene_with_stored_prompt(load_steps=load_steps)
    scene.connector.fail_next_loads(1, num_good_blocks=num_good)
    scene.add("a", PROMPT)
    scene.finish()
    scene.check_naive()
    stats = scene.scheduler.make_stats()
    assert stats.num_failed_loads == 1
    assert stats.num_loaded_tokens == (4 * num_good if load_steps else 16)
    assert scene.connector.ended == [("a", RequestStatus.FINISHED_LENGTH_CAPPED, scene.outputs["a"], 5)]


@pytest.mark.parametrize("load_steps", [0, 1])
def test_a_failed_load_ends_its_request_if_so_configured(load_steps):
    scene = scene_with_stored_prompt(load_steps=load_steps, scene_settings={"kv_load_failure": "fail"})
    scene.connector.fail_next_loads(1)
    scene.add("a", PROMPT)
    scene.add("b", range(30, 33))
    scene.finish()
    assert scene.reasons["a"] is FinishReason.ERROR
    assert "KV of this request could not be loaded" in scene.errors["a"]
    assert "kv_load_failure" in scene.errors["a"]
    scene.check_naive("b")


def test_a_failed_load_leaves_nothing_wrong_in_the_prefix_cache():
    scene = scene_with_stored_prompt(scene_settings={"enable_prefix_caching": True})
    scene.scheduler.reset_prefix_cache()
    scene.connector.fail_next_loads(1)
    scene.add("a", PROMPT)
    scene.step()
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scene.connector.store.clear()
    scene.add("b", PROMPT)
    assert scene.step() == {"b": 17}
    scene.finish()
    scene.check_naive("b")


def test_a_load_that_stays_away_is_given_up_after_kv_transfer_timeout():
    scene = scene_with_stored_prompt(load_steps=1, scene_settings={"kv_transfer_timeout": 10.0})
    scene.connector.never_answer_next_loads(1)
    scene.add("a", PROMPT)
    scene.step()
    scene.clock.advance(9.9)
    assert scene.step() == {}
    scene.clock.advance(0.2)
    assert scene.step() == {"a": 17}
    scene.connector.answer()
    scene.finish()
    scene.check_naive()


def test_a_load_that_stays_away_ends_its_request_if_so_configured():
    settings = {"kv_transfer_timeout": 10.0, "kv_load_failure": "fail"}
    scene = scene_with_stored_prompt(load_steps=1, scene_settings=settings)
    scene.connector.never_answer_next_loads(1)
    scene.add("a", PROMPT)
    scene.step()
    scene.clock.advance(11)
    scene.finish()
    assert "did not arrive within kv_transfer_timeout" in scene.errors["a"]


def test_blocks_of_a_load_that_was_called_off_are_fenced_until_the_runner_knows():
    scene = scene_with_stored_prompt(load_steps=3)
    scene.add("a", PROMPT)
    scene.step()
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scene.scheduler.get_kv_cache_usage() == pytest.approx(4 / 12)
    scene.step()
    assert scene.scheduler.get_kv_cache_usage() == 0
    scene.add("b", range(20, 55), max_tokens=4)
    scene.finish()
    scene.check_naive("b")


@pytest.mark.parametrize("how", ["never applied", "failed in the runner"])
def test_a_load_is_called_off_again_if_the_step_that_said_so_did_not_reach_the_runner(how):
    scene = scene_with_stored_prompt(load_steps=1)
    scene.connector.never_answer_next_loads(1)
    scene.add("a", PROMPT)
    scene.step()
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    plan = scene.plan()
    if how == "failed in the runner":
        scene.scheduler.update_from_output(plan, _nothing_computed())
    scene.add("b", range(20, 37))
    assert scene.scheduler.get_kv_cache_usage() > 0
    scene.step()
    scene.connector.answer()
    scene.finish()
    scene.check_naive("b")


@pytest.mark.parametrize("kv_load_failure", ["recompute", "fail"])
@pytest.mark.parametrize("is_told", [False, True], ids=["not told", "told"])
@pytest.mark.parametrize("how", ["never applied", "failed in the runner"])
def test_a_load_is_given_up_that_was_asked_for_in_a_step_that_failed(how, is_told, kv_load_failure):
    """Nobody waits until it has timed out, whether or not the runner was told of it."""
    scene = scene_with_stored_prompt(load_steps=2, scene_settings={"kv_load_failure": kv_load_failure})
    scene.add("a", PROMPT)
    scene.add("b", range(20, 24), max_tokens=6)
    plan = scene.plan()
    if is_told:
        scene.compute(plan)
    if how == "failed in the runner":
        scene.apply(plan, _nothing_computed())
    scene.finish(max_steps=20)
    if kv_load_failure == "fail":
        assert "was asked for in a step that failed" in scene.errors["a"]
        scene.check_naive("b")
    else:
        scene.check_naive("a", "b")


def _nothing_computed():
    return ModelRunnerOutput([], np.empty((0, 1), np.int32), is_applied=False)


@pytest.mark.parametrize("ends_by", ["reset", "abort"])
def test_the_end_of_a_load_that_was_called_off_is_not_the_end_of_the_next(ends_by):
    scene = scene_with_stored_prompt(load_steps=2, scene_settings={"overlap_steps": True})
    scene.add("a", PROMPT)
    scene.step()
    arrives = scene.plan()
    computed = scene.compute(arrives)
    assert computed.kv_connector_output.finished_receiving == {"a"}
    if ends_by == "reset":
        assert scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
        scene.add("a", PROMPT)
    begins_again = scene.plan()
    scene.apply(arrives, computed)
    scene.apply(begins_again)
    scene.finish()
    scene.check_naive("a")


def test_a_connector_that_does_not_know_yet_is_asked_again_and_others_go_first():
    scene = scene_with_stored_prompt()
    scene.connector.undecided = 1
    scene.add("a", PROMPT)
    scene.add("b", range(30, 33))
    assert scene.step() == {"b": 3}
    assert scene.step() == {"b": 1, "a": 1}
    scene.finish()
    scene.check_naive()


def test_a_request_whose_load_has_arrived_can_be_aborted():
    scene = scene_with_stored_prompt(load_steps=2, scene_settings={"max_num_seqs": 1})
    request = scene.add("a", PROMPT)
    scene.step()
    scene.add("b", range(30, 33), max_tokens=6)
    scene.step()
    scene.step()
    assert request.status is RequestStatus.WAITING, "it has arrived, and there is no slot"
    assert scene.scheduler.get_kv_cache_usage() == pytest.approx((4 + 1) / 12)
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scene.scheduler.get_kv_cache_usage() == pytest.approx(1 / 12)
    scene.finish()
    scene.check_naive("b")


# -- blocks for others -------------------------------------------------------------------------------------


def sending_scene(send_steps=3, **options) -> Scene:
    scene = Scene(
        connector=Witness(4, send_steps=send_steps, **options), kv_transfer_timeout=10.0, num_blocks=8
    )
    scene.add("a", range(10), max_tokens=1)
    scene.step()
    return scene


def test_blocks_are_held_until_the_peer_has_read_them():
    scene = sending_scene()
    params = scene.ends["a"].kv_transfer_params
    assert params["request_id"] == "a"
    assert len(params["block_ids"]) == 3
    assert scene.scheduler.make_stats().num_leased_blocks == 3
    assert not scene.scheduler.has_unfinished_requests()
    assert scene.scheduler.has_requests(), "somebody has to watch them"
    assert scene.connector.freed == []
    for _ in range(3):
        scene.step()
    assert scene.connector.freed == ["a"]
    assert not scene.scheduler.has_requests()
    scene.check_nothing_is_held()


def test_a_pin_that_ends_is_no_matter_of_the_connector():
    scene = sending_scene(is_peer_alive=False)
    scene.add("pinned", range(20, 26), max_tokens=1, pin_prefix=5.0)
    scene.step()
    scene.clock.advance(11)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 0
    assert sorted(scene.connector.freed) == ["a", "pinned"]


def test_what_the_connector_refuses_is_never_queued():
    scene = scene_with_stored_prompt()
    scene.connector.refused = {"a"}
    with pytest.raises(InvalidRequestError, match="remote_port"):
        scene.add("a", PROMPT)
    assert scene.scheduler.get_request_counts() == (0, 0)
    assert scene.connector.ended == []
    scene.connector.refused = set()
    scene.add("a", PROMPT)
    scene.finish()
    scene.check_naive()


def test_a_connector_hears_of_the_end_of_a_request_that_cannot_be_queued(monkeypatch):
    scene = scene_with_stored_prompt()

    def fails(request):
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(scene.scheduler.accounts.waiting, "enter", fails)
        with pytest.raises(MemoryError):
            scene.add("a", PROMPT)
    [(request_id, _, _, num_blocks)] = scene.connector.ended
    assert (request_id, num_blocks) == ("a", 0)
    scene.add("b", PROMPT)
    scene.finish()
    scene.check_naive()


def test_a_heartbeat_renews_a_lease():
    scene = sending_scene(send_steps=1000)
    scene.step()
    for _ in range(5):
        scene.clock.advance(9)
        scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 3
    scene.connector.leases_renewed = frozenset
    scene.clock.advance(9)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 3
    scene.clock.advance(2)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 0


def test_news_after_the_lease_has_ended_changes_nothing():
    scene = sending_scene(is_peer_alive=False)
    scene.clock.advance(11)
    scene.step()
    assert scene.scheduler.make_stats().num_leased_blocks == 0
    assert scene.connector.freed == ["a"]
    scene.connector.is_peer_alive = True
    for _ in range(5):
        scene.step()
    scene.check_nothing_is_held()


def test_an_id_is_not_given_away_while_a_peer_reads_under_it():
    scene = sending_scene()
    with pytest.raises(DuplicateRequestError, match=r"'a' is in use by a request .* whose KV is still held"):
        scene.add("a", range(5))
    for _ in range(3):
        scene.step()
    scene.add("a", range(5), max_tokens=1)
    scene.step()
    assert scene.outputs["a"] == naive_generation(list(range(5)), 1, set())


def test_an_aborted_request_sends_nothing():
    scene = Scene(connector=Witness(4, send_steps=3))
    scene.add("a", range(10))
    scene.step()
    scene.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scene.finish()
    assert [ended[:2] for ended in scene.connector.ended] == [("a", RequestStatus.FINISHED_ABORTED)]


def test_without_a_connector_there_is_nothing_to_find():
    scene = Scene()
    scene.add("a", range(10), kv_transfer_params={"peer": "somewhere"})
    scene.finish()
    assert scene.ends["a"].kv_transfer_params is None


def test_the_hypotheses_of_a_beam_search_say_where_its_kv_is():
    scene = Scene(connector=Witness(4, send_steps=1), num_blocks=30)
    names = ("b", "b1")
    scene.add("b", range(9), beam_width=2, n=2, logprobs=2, max_tokens=3, beam_sequence_ids=names)
    scene.finish()
    assert [scene.ends[name].kv_transfer_params["request_id"] for name in names] == ["b", "b"]
    assert len(scene.connector.ended) == 1


# -- ends --------------------------------------------------------------------------------------------------


def test_a_connector_sees_the_tokens_of_a_request_that_has_ended():
    scene = Scene(connector=Witness(4))
    scene.add("a", range(10), max_tokens=5)
    scene.finish()
    expected = naive_generation(list(range(10)), 5, set())
    assert scene.connector.ended == [("a", RequestStatus.FINISHED_LENGTH_CAPPED, expected, 4)]


def test_reset_with_the_connector_forgets_what_it_has_stored_and_calls_loads_off():
    scene = scene_with_stored_prompt(load_steps=2)
    scene.add("a", PROMPT)
    scene.step()
    assert not scene.scheduler.reset_prefix_cache()
    assert scene.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert scene.step() == {"a": 17}
    scene.finish()
    scene.check_naive()


def test_a_connector_that_cannot_be_reset_says_so():
    scene = scene_with_stored_prompt()
    scene.connector.reset = lambda: False
    assert scene.scheduler.reset_prefix_cache()
    assert not scene.scheduler.reset_prefix_cache(reset_connector=True)


@pytest.mark.parametrize("load_steps", [0, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_load_may_end_within_a_block(load_steps, overlap):
    settings = {"overlap_steps": overlap}
    prompt = list(range(15))  # three full blocks, two tokens, and the one that is always computed
    connector = Witness(4, load_steps=load_steps, keeps_tails=True)
    scene = Scene(connector=connector, enable_prefix_caching=False, num_blocks=12, **settings)
    scene.add("before", prompt, max_tokens=4)
    scene.finish()
    scene.add("a", prompt, max_tokens=6)
    scene.finish()
    scene.check_naive()
    assert connector.allocated[-1] == ("a", 4, 14)
    if load_steps:
        assert scene.scheduler.make_stats().num_loaded_tokens == 14


def test_a_load_that_fails_in_a_block_that_it_ends_within_costs_that_block():
    prompt = list(range(15))
    scene = Scene(connector=Witness(4, load_steps=2, keeps_tails=True), enable_prefix_caching=False)
    scene.add("before", prompt, max_tokens=1)
    scene.finish()
    scene.connector.fail_next_loads(1, num_good_blocks=3)
    scene.add("a", prompt)
    scheduled = [scene.step() for _ in range(4)]
    assert {"a": 3} in scheduled
    scene.finish()
    scene.check_naive()
