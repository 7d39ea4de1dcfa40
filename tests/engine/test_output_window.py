"""What an engine may have sent that its front has not processed: bounded, and never a deadlock."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.process import output_window
from quire.engine.process.output_window import Acknowledgements, OutputWindow, size_of

LARGEST = 300  # bytes of a message
WINDOW, AT_ONCE, OVERHEAD = 2000, 500, 10


@given(st.lists(st.tuples(st.sampled_from(["step", "read", "process"]), st.integers(0, LARGEST))))
@settings(max_examples=200, deadline=None)
def test_window_against_a_model_that_knows_every_message(actions):
    """Whatever the order of steps, readings and processing, the engine stops in time and always goes on."""
    patched = {"WINDOW": WINDOW, "ACKNOWLEDGED_AT_ONCE": AT_ONCE, "MESSAGE_OVERHEAD": OVERHEAD}
    before = {name: getattr(output_window, name) for name in patched}
    try:
        for name, value in patched.items():
            setattr(output_window, name, value)
        run(actions)
    finally:
        for name, value in before.items():
            setattr(output_window, name, value)


def run(actions):
    window, acknowledgements = OutputWindow(), Acknowledgements()
    sent, read = deque(), deque()  # messages on their way; received and not processed
    unacknowledged = 0

    def process_all():
        nonlocal unacknowledged
        unacknowledged += sum(map(size_of, read))
        read.clear()
        if num_bytes := acknowledgements.take_processed():
            assert num_bytes <= unacknowledged, "only what was processed"
            unacknowledged -= num_bytes
            window.note_processed(num_bytes)

    for action, size in actions:
        if action == "step" and window.has_room:
            sent.append(bytes(size))
            window.note_sent(sent[-1])
        elif action == "read" and sent and not read:
            read.append(sent.popleft())
            acknowledgements.note_received(read[-1])
        elif action == "process":
            process_all()
        in_flight = sum(map(size_of, sent)) + sum(map(size_of, read))
        assert window.num_unprocessed == in_flight + unacknowledged
        assert in_flight < WINDOW + LARGEST + OVERHEAD
        if not window.has_room:
            assert in_flight + AT_ONCE > WINDOW, "it waits for nothing but what the front has yet to process"
    process_all()
    while sent:
        read.append(sent.popleft())
        acknowledgements.note_received(read[-1])
        process_all()
    assert window.has_room, "a front that has caught up lets the engine go on"
