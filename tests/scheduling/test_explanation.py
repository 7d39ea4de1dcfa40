"""What a request is said to do or to wait for, in every state it can be in."""

from __future__ import annotations

import pytest
from scene import CLASSES, GatedGrammars, Scene

from faulty_connector import FaultyConnector
from quire.scheduling import PauseState


def explanation(scene: Scene, request_id: str = "a") -> str:
    return scene.scheduler.explain(request_id)


def test_running_requests_say_how_far_they_are():
    scene = Scene(max_num_batched_tokens=4)
    scene.add("a", range(9), max_tokens=6)
    scene.step()
    assert explanation(scene) == "running: 4 of 9 prompt tokens computed"
    scene.step()
    scene.step()
    assert explanation(scene) == "running: 1 output tokens, of at most 6"
    scene.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert explanation(scene) == "running, but the engine is paused: 9 of 10 tokens computed"


def test_who_is_not_there_is_not_known():
    scene = Scene()
    assert explanation(scene) == "not known: it has ended, or was never accepted"
    scene.add("a", [1], max_tokens=1)
    scene.finish()
    assert explanation(scene) == "not known: it has ended, or was never accepted"


def test_the_head_of_the_queue_says_what_it_lacks():
    scene = Scene(num_blocks=10, watermark=0.1, enable_prefix_caching=False)
    scene.add("first", range(16), max_tokens=8)
    scene.step()
    scene.add("a", range(20, 40))
    scene.clock.advance(2.5)
    scene.step()
    assert explanation(scene) == ("waiting for 2.5 s: needs 5 blocks, 5 free, 1 kept free (watermark)")


def test_others_say_who_goes_first_and_what_that_one_lacks():
    scene = Scene(max_num_seqs=1)
    scene.add("first", range(4), max_tokens=8)
    scene.step()
    scene.add("second", range(4))
    scene.add("third", range(4))
    scene.add("a", range(4))
    assert explanation(scene) == (
        "waiting for 0.0 s: at present, 2 requests go first; "
        "the next needs 1 of 1 slots (max_num_seqs), 0 free"
    )


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_is_named(state):
    scene = Scene()
    scene.add("a", range(4))
    scene.scheduler.set_pause_state(state)
    assert explanation(scene) == "waiting for 0.0 s: the engine is paused and admits nothing"


def test_a_preempted_request_says_so():
    scene = Scene(num_blocks=6, enable_prefix_caching=False)
    scene.add("first", range(8), max_tokens=12)
    scene.add("a", range(20, 28), max_tokens=12)
    while scene.scheduler.get_request_counts() != (1, 1):
        scene.clock.advance(1)
        scene.step()
    assert explanation(scene) == (
        "waiting, preempted, 6.0 s after it arrived: needs 4 blocks, 2 free, 0 kept free (watermark)"
    )


def test_a_grammar_that_compiles_is_named():
    grammars = GatedGrammars(is_open=False)
    scene = Scene(grammars=grammars)
    scene.add("a", range(4), structured_outputs=CLASSES)
    assert explanation(scene) == "waiting: its grammar is being compiled"
    grammars.gate.set()
    scene.finish(max_steps=100_000)


def test_a_load_says_how_much_and_until_when():
    connector = FaultyConnector(4, load_steps=1)
    scene = Scene(connector=connector, enable_prefix_caching=False, kv_transfer_timeout=20.0)
    scene.add("before", range(9), max_tokens=1)
    scene.finish()
    connector.never_answer_next_loads(1)
    scene.add("a", range(9))
    scene.step()
    scene.clock.advance(5)
    assert explanation(scene) == "waiting: the KV of 8 tokens is on its way into 2 blocks; given up in 15.0 s"
    scene.clock.advance(5)
    scene.add("b", range(30, 32))
    scene.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert ", 2 held by loads from elsewhere, " in explanation(scene, "b")


def test_a_sibling_waits_for_the_first():
    scene = Scene()
    scene.add("leader", range(4))
    scene.add("a", range(4), shares_prompt_with="leader")
    assert explanation(scene) == "waiting: the first of its siblings computes the prompt that they share"


def test_leases_and_pins_say_until_when():
    connector = FaultyConnector(4, send_steps=100, is_peer_alive=False)
    scene = Scene(connector=connector, num_blocks=8, kv_transfer_timeout=30.0)
    scene.add("sent", range(10), max_tokens=1)
    scene.step()
    scene.add("pinned", range(20, 26), max_tokens=1, pin_prefix=60.0)
    scene.step()
    scene.clock.advance(10)
    scene.add("a", range(30, 49))
    assert explanation(scene) == (
        "waiting for 0.0 s: needs 5 blocks, 3 free, 1 held by a pin for up to 50.0 s, 5 held by 2 transfers "
        "for up to 20.0 s, 0 kept free (watermark)"
    )


def test_what_a_hit_would_save_is_not_needed():
    scene = Scene(num_blocks=12)
    scene.add("before", range(9), max_tokens=1)
    scene.finish()
    scene.scheduler.set_pause_state(PauseState.UNPAUSED)
    scene.add("first", range(20, 36), max_tokens=12)
    scene.step()
    scene.add("second", range(40, 60), max_tokens=12)
    scene.step()
    scene.add("a", range(13))
    assert "needs 2 blocks" in explanation(scene)
