"""One peer's threads and links by themselves: no fault of one call costs another one anything."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from insides import lookups_of, readers_of
from late_device import LateDevice
from quire.datadist.status import LLMStatusCode, failure
from quire.datadist.wire.protocol import LoanReport
from quire.kv.blocks.block_hash import SequenceKeys, root_digest
from quire.kv.cache.page_layout import PageLayout
from quire.kv.connectors.step_times import StepMark, host_mark
from quire.kv.peers import links, pull_readers
from quire.kv.peers import peer as peer_module
from quire.kv.peers.block_layouts import BlockLayouts
from quire.kv.peers.links import PeerLinks
from quire.kv.peers.peer import KnownPeers, Peer, PrefixLookup
from quire.kv.peers.pulls import LoanLoad, PeerPull, PrefixLoad
from quire.kv.peers.transfer_params import BorrowingParams
from thread_shortage import no_threads_to_spare

SOON = 20.0
LAYOUTS = BlockLayouts(PageLayout(4, (), 8), lambda size: PageLayout(size, (), 8))


class FakeLink:
    """A link whose peer has every loan; `pulled` and `told` are what it was asked."""

    transport = "fake"
    epoch = 0
    block_size = 4

    def __init__(self) -> None:
        self.stands = True
        self.pulled: list[str] = []
        self.told: list[tuple[list[str], list[str]]] = []
        self.was_told = threading.Event()

    def pull_parts(self, request, memory, blocks, deadline) -> None:
        self.pulled.append(request.loan)

    def update_loans(self, waiting, released, deadline) -> LoanReport:
        self.told.append((waiting, released))
        self.was_told.set()
        return LoanReport(ended=[], ready=[])

    def find_prefix(self, digests, deadline) -> int:
        return len(digests) // 16

    def drop(self) -> None:
        self.stands = False


class Opener:
    """Opens the same link each time, after it has raised `errors`."""

    def __init__(self, *errors: Exception) -> None:
        self.link = FakeLink()
        self.errors = list(errors)
        self.num_calls = 0

    def __call__(self, deadline: float) -> FakeLink:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        self.link.stands = True
        return self.link


class Pull(PeerPull):
    """A pull whose end can be waited for."""

    def __init__(self, name: str, after: StepMark | None = None) -> None:
        self.ending = threading.Event()
        params = BorrowingParams("127.0.0.1", 1, transfer_id=name)
        load = LoanLoad(name, params, 1, b"", np.array([[3]]))
        super().__init__(load, time.monotonic() + SOON, after or host_mark())

    def end(self, *, has_failed: bool) -> None:
        super().end(has_failed=has_failed)
        self.ending.set()


@pytest.fixture
def make_peer():
    peers: list[Peer] = []
    earlier_threads = set(threading.enumerate())

    def make(open_link, lease_timeout: float = 30.0, port: int = 1) -> Peer:
        peers.append(Peer(("127.0.0.1", port), open_link, None, LAYOUTS, lease_timeout=lease_timeout))
        return peers[-1]

    yield make
    for one in peers:
        one.close()
        one.join(time.monotonic() + SOON)
    threads = set(threading.enumerate()) - earlier_threads
    assert not [thread for thread in threads if thread.name.startswith("kv-peer")]


class ConditionWithGap(threading.Condition):
    """A condition that calls something once, after it has been left by a reader that has waited in vain."""

    def __init__(self, in_gap) -> None:
        super().__init__()
        self._in_gap = in_gap
        self._has_waited = False

    def wait_for(self, *arguments):
        result = super().wait_for(*arguments)
        self._has_waited = not result
        return result

    def __exit__(self, *arguments) -> None:
        super().__exit__(*arguments)
        if self._has_waited and self._in_gap is not None:
            in_gap, self._in_gap = self._in_gap, None
            in_gap()


def test_a_pull_that_comes_when_the_last_reader_ends_is_read(make_peer, monkeypatch):
    monkeypatch.setattr(pull_readers, "IDLE_TIMEOUT", 0.001)
    peer, first, late = make_peer(Opener()), Pull("first"), Pull("late")
    readers_of(peer)[1]._changed = ConditionWithGap(lambda: peer.pull(late))
    peer.pull(first)
    assert late.ending.wait(SOON)
    assert not late.has_failed


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), OSError("gone"), failure(LLMStatusCode.LLM_FAILED, "")]
)
def test_heartbeats_go_on_after_any_failure(make_peer, monkeypatch, error):
    monkeypatch.setattr(peer_module, "RENEW_INTERVAL", 0.001)
    monkeypatch.setattr(links, "DOWN_SECONDS", 0.0)
    opener = Opener(error)
    make_peer(opener).keep("t", "r", is_offered=True)
    assert opener.link.was_told.wait(SOON)


def test_a_reader_goes_on_after_any_failure(make_peer, monkeypatch):
    monkeypatch.setattr(links, "DOWN_SECONDS", 0.0)
    opener = Opener(ValueError("a bug"), OSError("gone"))
    peer = make_peer(opener)
    pulls = [Pull(name) for name in "abc"]
    for pull in pulls:
        peer.pull(pull)
        assert pull.ending.wait(SOON)
    assert [pull.has_failed for pull in pulls] == [True, True, False]


def test_without_threads_pulls_fail_at_once(make_peer):
    opener = Opener()
    peer = make_peer(opener)
    with no_threads_to_spare():
        peer.keep("t", "r", is_offered=True)
        pull = Pull("t")
        peer.pull(pull)
        assert pull.has_ended
        assert pull.has_failed
    peer.give_back("t", "r")
    assert peer.is_idle
    after = Pull("after")
    peer.pull(after)
    assert after.ending.wait(SOON)
    assert not after.has_failed
    peer.keep("u", "r", is_offered=True)
    assert opener.link.was_told.wait(SOON)


def test_what_is_ready_is_read_while_all_readers_wait_for_what_is_not(make_peer):
    opener = Opener()
    is_ready = {f"late{number}": threading.Event() for number in range(pull_readers.MAX_READERS + 1)}

    def pull_parts(request, *_) -> None:
        assert request.loan not in is_ready or is_ready[request.loan].wait(SOON)
        opener.link.pulled.append(request.loan)

    opener.link.pull_parts = pull_parts
    peer, pulls = make_peer(opener), [Pull(name) for name in (*is_ready, "ready")]
    opener.link.update_loans = lambda waiting, *_: LoanReport([], sorted(set(waiting) - is_ready.keys()))
    for pull in pulls:
        peer.keep(pull.load.transfer_id, pull.load.request_id, is_offered=False)
        peer.pull(pull)
    assert pulls[-1].ending.wait(SOON)
    assert opener.link.pulled == ["ready"]
    for event in is_ready.values():
        event.set()
    assert all(pull.ending.wait(SOON) for pull in pulls)
    assert not any(pull.has_failed for pull in pulls)


def test_a_loan_that_could_not_be_given_back_is_given_back_again(make_peer, monkeypatch):
    monkeypatch.setattr(links, "DOWN_SECONDS", 0.0)
    monkeypatch.setattr(peer_module, "RENEW_INTERVAL", 0.001)
    opener = Opener(*[OSError("unreachable")] * 3)
    peer = make_peer(opener)
    for name in ("unneeded", "wanted"):
        peer.keep(name, "r", is_offered=True)
        peer.give_back(name, "r")
    peer.keep("wanted", "s", is_offered=True)
    wait_for(lambda: (["wanted"], ["unneeded"]) in opener.link.told)
    wait_for(lambda: (["wanted"], []) in opener.link.told)
    assert [released for _, released in opener.link.told if released] == [["unneeded"]]


def test_a_peer_that_is_gone_is_told_of_a_loan_no_longer_than_it_would_keep_it(make_peer, monkeypatch):
    monkeypatch.setattr(links, "DOWN_SECONDS", 0.0)
    for name in ("RENEW_INTERVAL", "IDLE_TIMEOUT", "LINK_TIMEOUT"):
        monkeypatch.setattr(peer_module, name, 0.01)

    def never(deadline: float) -> FakeLink:
        raise OSError("unreachable")

    peer = make_peer(never, lease_timeout=0.01)
    peer.keep("t", "r", is_offered=True)
    peer.give_back("t", "r")
    wait_for(lambda: peer.is_idle)


def test_heartbeats_come_before_a_short_lease_ends(make_peer):
    opener = Opener()
    make_peer(opener, lease_timeout=0.1).keep("t", "r", is_offered=True)
    wait_for(lambda: len(opener.link.told) > 2)


def test_nobody_links_for_a_pull_that_is_cancelled(make_peer):
    opener, pull = Opener(), Pull("t")
    pull.cancel()
    make_peer(opener).pull(pull)
    assert pull.ending.wait(SOON)
    assert not opener.num_calls


def test_cancelling_a_pull_does_not_drop_the_link_under_the_next():
    link, pull = FakeLink(), Pull("t")
    is_reading, is_dropped = threading.Event(), threading.Event()

    def pull_parts(*_) -> None:
        is_reading.set()
        assert is_dropped.wait(SOON)
        raise ConnectionError("the link was dropped")

    link.pull_parts = pull_parts
    ended: list[bool] = []

    def read() -> None:
        with pytest.raises(ConnectionError):
            pull.run(link, None, LAYOUTS)
        ended.append(True)

    reading = threading.Thread(target=read)

    def drop() -> None:
        is_dropped.set()
        reading.join(0.05)
        assert not ended, "the reader may take the next pull, over a link that is about to be dropped"

    link.drop = drop
    reading.start()
    assert is_reading.wait(SOON)
    pull.cancel()
    reading.join(SOON)
    assert ended


def test_all_of_many_loans_are_kept_alive(make_peer, monkeypatch):
    monkeypatch.setattr(peer_module, "MAX_LOAN_NAMES", 2)
    monkeypatch.setattr(peer_module, "RENEW_INTERVAL", 0.001)
    opener = Opener()
    peer = make_peer(opener)
    names = [f"t{number}" for number in range(5)]
    for name in names:
        peer.keep(name, "r", is_offered=True)
    while {name for waiting, _ in opener.link.told for name in waiting} != set(names):
        opener.link.was_told.clear()
        assert opener.link.was_told.wait(SOON)
    assert all(len(waiting) <= 2 for waiting, _ in opener.link.told)


def lookup(num_blocks: int = 3, patience: float = SOON) -> PrefixLookup:
    keys = SequenceKeys(root_digest(), 4)
    keys.extend(np.arange(num_blocks * 4, dtype=np.int32))
    return PrefixLookup(keys, range(1, num_blocks), time.monotonic() + patience)


def wait_for(condition) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_peer_that_has_most_of_a_prompt_is_the_best(make_peer):
    openers = [Opener(), Opener(), Opener(OSError("gone"))]
    openers[1].link.find_prefix = lambda digests, deadline: 1
    asked = lookup()
    for port, opener in enumerate(openers, 1):
        make_peer(opener, port=port).look_up(asked)
    wait_for(lambda: asked.is_over)
    assert time.monotonic() < asked.deadline
    assert asked.best == (("127.0.0.1", 1), 2)


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), OSError("gone"), failure(LLMStatusCode.LLM_FAILED, "")]
)
def test_a_lookup_is_answered_after_any_failure(make_peer, monkeypatch, error):
    monkeypatch.setattr(links, "DOWN_SECONDS", 0.0)
    opener, asked, after = Opener(), lookup(), lookup()

    def fails(digests, deadline):
        opener.link.find_prefix = lambda digests, deadline: 2
        raise error

    opener.link.find_prefix = fails
    peer = make_peer(opener)
    peer.look_up(asked)
    wait_for(lambda: asked.is_over)
    assert asked.best is None
    peer.look_up(after)
    wait_for(lambda: after.is_over)
    assert after.best == (("127.0.0.1", 1), 2)


def test_digests_of_other_blocks_are_not_asked_about(make_peer):
    opener, asked = Opener(), lookup()
    opener.link.block_size = 2
    make_peer(opener).look_up(asked)
    wait_for(lambda: asked.is_over)
    assert asked.best is None


def test_a_peer_that_is_late_is_not_asked_again_before_it_has_answered(make_peer):
    opener, asking, answers = Opener(), threading.Event(), threading.Event()

    def finds_late(digests, deadline) -> int:
        asking.set()
        assert answers.wait(SOON)
        return 2

    opener.link.find_prefix = finds_late
    peer, asked = make_peer(opener), lookup()
    peer.look_up(asked)
    assert asking.wait(SOON)
    asked.deadline = time.monotonic()
    assert asked.is_over
    assert asked.best is None
    meanwhile = lookup()
    peer.look_up(meanwhile)
    assert meanwhile.is_over
    answers.set()
    wait_for(lambda: not lookups_of(peer))
    peer.look_up(again := lookup())
    wait_for(lambda: again.is_over)
    assert again.best == (("127.0.0.1", 1), 2)


def cached_pull() -> PeerPull:
    load = PrefixLoad("r", ("127.0.0.1", 1), bytes(16), np.array([[3]]))
    return PeerPull(load, time.monotonic() + SOON, host_mark())


def test_a_peer_is_not_doubted_for_want_of_threads_here(make_peer):
    peer, pull = make_peer(Opener()), cached_pull()
    with no_threads_to_spare():
        peer.pull(pull)
    assert pull.has_failed
    assert not peer.links.is_doubtful


def test_a_peer_that_does_not_deliver_what_it_has_found_is_asked_more_and_more_rarely(make_peer, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=lambda: now[0]))
    opener, faults, has_ended = Opener(), [], threading.Event()

    def pull_parts(*_) -> None:
        for fault in faults:
            raise fault

    opener.link.pull_parts = pull_parts
    peer = make_peer(opener)
    readers, _ = readers_of(peer)
    on_end, readers._on_end = readers._on_end, lambda pull: (on_end(pull), has_ended.set())

    def is_asked() -> bool:
        peer.look_up(asked := lookup())
        wait_for(lambda: asked.is_over)
        return asked.best is not None

    def doubt_after(error: Exception | None, *, is_cancelled: bool = False) -> float:
        """Return for how many seconds it is not asked after a pull."""
        faults[:] = filter(None, [error])
        pull = cached_pull()
        if is_cancelled:
            pull.cancel()
        has_ended.clear()
        peer.pull(pull)
        assert has_ended.wait(SOON)
        began = now[0]
        while not is_asked():
            now[0] += 1.0
        return now[0] - began

    late = failure(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, "late")
    assert [doubt_after(late) for _ in range(7)] == [2, 4, 8, 16, 32, 60, 60]
    assert doubt_after(failure(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "given up")) == 0
    assert doubt_after(late, is_cancelled=True) == 0
    assert doubt_after(None) == 0
    assert [doubt_after(ValueError("a bug")), doubt_after(late)] == [2, 4]


def test_what_a_lookup_has_found_can_be_seen_while_its_digests_are_computed():
    seen: list[object] = []

    class Keys:
        def digests(self, start: int, end: int):
            looking = threading.Thread(target=lambda: seen.append(asked.best), daemon=True)
            looking.start()
            looking.join(1.0)
            assert not looking.is_alive()
            return [bytes(16)] * (end - start)

    asked = PrefixLookup(Keys(), range(2), time.monotonic() + SOON)
    assert asked.digests() == bytes(32)
    assert seen == [None]


def test_heartbeats_go_on_however_many_lookups_come(make_peer):
    opener = Opener()
    peer = make_peer(opener)

    def finds_and_is_asked_more(digests, deadline) -> int:
        if not opener.link.was_told.is_set():
            peer.look_up(lookup())
        return 2

    opener.link.find_prefix = finds_and_is_asked_more
    peer.look_up(lookup())
    peer.keep("t", "r", is_offered=True)
    assert opener.link.was_told.wait(SOON)


class GuardedLookups(deque):
    """Lookups that may be taken away only under a lock."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__()
        self._lock = lock

    def popleft(self) -> PrefixLookup:
        assert self._lock.locked()
        return super().popleft()


def test_a_lookup_is_not_taken_away_while_its_deadline_is_looked_at(make_peer):
    peer, asked = make_peer(Opener()), lookup()
    peer._lookups = GuardedLookups(peer._lock)
    peer.look_up(asked)
    wait_for(lambda: asked.is_over)
    wait_for(lambda: not lookups_of(peer))


def test_a_pull_that_is_too_late_says_nothing_about_the_peer():
    links = PeerLinks(Opener(TimeoutError("too late"), TimeoutError("no answer"), OSError("refused")))
    with pytest.raises(TimeoutError):
        links.open(time.monotonic() + 0.001)
    assert not links.is_down
    with pytest.raises(TimeoutError):
        links.open(time.monotonic() + SOON)
    assert links.is_down


def test_a_peer_counts_as_linked_until_its_last_link_is_down(make_peer, monkeypatch):
    for module in (peer_module, pull_readers):
        monkeypatch.setattr(module, "IDLE_TIMEOUT", 0.2)
    monkeypatch.setattr(peer_module, "RENEW_INTERVAL", 0.001)
    opener = Opener()
    peers = KnownPeers(lambda address: make_peer(opener))
    peer, pull = peers.get(("127.0.0.1", 1)), Pull("t")
    assert not peers.transports()
    peer.look_up(lookup())
    wait_for(lambda: not lookups_of(peer))
    peer.pull(pull)
    assert pull.ending.wait(SOON)
    assert peers.transports() == ["fake"]
    wait_for(lambda: peer.is_idle)
    wait_for(lambda: not peers.transports())


def test_a_peer_that_is_gone_does_not_count_as_linked(make_peer):
    opener, asked = Opener(), lookup()
    peers = KnownPeers(lambda address: make_peer(opener))
    peer = peers.get(("127.0.0.1", 1))
    peer.look_up(lookup())
    wait_for(lambda: not lookups_of(peer))
    assert peers.transports() == ["fake"]
    opener.link.stands = False
    opener.errors.append(OSError("refused"))
    peer.look_up(asked)
    wait_for(lambda: asked.is_over)
    assert not peers.transports()


def test_a_pull_begins_behind_the_steps_that_may_use_its_blocks(make_peer):
    device, opener = LateDevice(), Opener()
    computed = []
    device.steps.ask(lambda: computed.append(list(opener.link.pulled)))
    pull = Pull("late", device.mark())
    make_peer(opener).pull(pull)
    assert pull.ending.wait(SOON)
    assert not pull.has_failed
    assert computed == [[]]
    assert opener.link.pulled == ["late"]


def test_a_pull_that_is_cancelled_while_a_device_computes_reads_nothing(make_peer):
    device, opener = LateDevice(), Opener()
    pull, is_waiting, may_go_on = Pull("cancelled", device.mark()), threading.Event(), threading.Event()

    def on_wait() -> None:
        is_waiting.set()
        assert may_go_on.wait(SOON)

    device.on_wait = on_wait
    make_peer(opener).pull(pull)
    assert is_waiting.wait(SOON)
    pull.cancel()
    may_go_on.set()
    assert pull.ending.wait(SOON)
    assert not opener.link.pulled


def test_a_device_that_fails_costs_a_pull_and_not_its_reader(make_peer):
    device, opener = LateDevice(), Opener()
    device.failing["wait"] = 1
    peer = make_peer(opener)
    pulls = [Pull("lost", device.mark()), Pull("next", device.mark())]
    for pull in pulls:
        peer.pull(pull)
        assert pull.ending.wait(SOON)
    assert [pull.has_failed for pull in pulls] == [True, False]
    assert opener.link.pulled == ["next"]
