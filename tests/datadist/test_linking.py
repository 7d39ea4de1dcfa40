"""Links: how they are made, refused, lost and taken down."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import sides
from conformance import row
from failing import fails_with
from forwarder import Forwarder
from pairs import over_tcp
from remote_objects import remote_process
from sides import byte_desc, cluster_info, pattern, read_cache, write_new_cache

from quire.datadist import CacheKey, LLMClusterInfo, LLMException, LLMStatusCode

SUCCESS = LLMStatusCode.LLM_SUCCESS
ALREADY = LLMStatusCode.LLM_ALREADY_LINK
FAILED = LLMStatusCode.LLM_LINK_FAILED
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK
NOTIFY_FAILED = LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
INVALID = LLMStatusCode.LLM_PARAM_INVALID
TOO_MANY = LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
REPEAT = LLMStatusCode.LLM_REPEAT_REQUEST

SHORT = 100  # milliseconds: a time limit that a test waits for
SLACK = 50.0  # seconds that a busy machine may need beyond a time limit


def dead_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def silent_listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def assert_pulls(pair, req_id: int = 1) -> None:
    """Bind a key on the PROMPT and pull it."""
    desc = byte_desc(1)
    source = pair.call(write_new_cache, pair.pm, desc, [CacheKey(1, req_id)], seed=req_id)
    target = pair.dm.allocate_cache(desc)
    pair.dm.pull_cache(CacheKey(pair.peer.remote_cluster_id, req_id), target)
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, req_id))
    pair.pm.deallocate_cache(source)
    pair.dm.deallocate_cache(target)


def assert_not_linked(pair) -> None:
    target = pair.dm.allocate_cache(byte_desc(1))
    with fails_with(NOT_YET):
        pair.dm.pull_cache(CacheKey(1, 999), target)
    pair.dm.deallocate_cache(target)


@row("E17", "linking what is linked is no failure overall")
def test_link_twice(pair):
    assert pair.decoder.link_clusters([pair.peer], sides.PATIENT) == (SUCCESS, [ALREADY])
    assert_pulls(pair)


@row("E18")
def test_the_same_cluster_twice_in_one_call(make_pair):
    pair = make_pair(linked=False)
    assert pair.decoder.link_clusters([pair.peer, pair.peer], sides.PATIENT) == (REPEAT, [SUCCESS, REPEAT])
    assert_pulls(pair)


@row("E19")
@pytest.mark.parametrize("position", [0, 1])
def test_a_dead_address_beside_a_good_one(make_pair, position):
    pair = make_pair(linked=False)
    peers, codes = [pair.peer], [SUCCESS]
    peers.insert(position, cluster_info(7, dead_port()))
    codes.insert(position, FAILED)
    assert pair.decoder.link_clusters(tuple(peers), sides.PATIENT) == (FAILED, codes)
    assert_pulls(pair)
    # Nothing was left behind.
    assert pair.decoder.unlink_clusters([peers[position]], sides.PATIENT) == (NOT_YET, [NOT_YET])


@row("E20")
def test_more_clusters_than_one_call_takes(make_pair):
    pair = make_pair(linked=False)
    peers = [pair.peer, *(cluster_info(number, 1) for number in range(10, 26))]
    assert pair.decoder.link_clusters(peers, sides.PATIENT) == (TOO_MANY, [TOO_MANY] * 17)
    assert_not_linked(pair)
    pair.link()
    assert pair.decoder.unlink_clusters(peers, sides.PATIENT) == (TOO_MANY, [TOO_MANY] * 17)
    assert_pulls(pair)


@row("a forced unlink takes any number of clusters")
def test_a_forced_unlink_of_many(pair):
    peers = [*(cluster_info(number, 1) for number in range(10, 40)), pair.peer]
    assert pair.decoder.unlink_clusters(peers, force=True) == (NOT_YET, [NOT_YET] * 30 + [SUCCESS])
    assert_not_linked(pair)


@row("E21")
def test_no_clusters_and_no_time(prompt, decoder):
    peer = cluster_info(1, prompt.listen_port)
    for side in (prompt, decoder):
        for call in (side.link_clusters, side.unlink_clusters):
            for arguments in (([],), ((), 100), ([peer], 0), ([peer], -5)):
                with pytest.raises(ValueError, match=r"\w"):
                    call(*arguments)


@row("E22")
def test_a_prompt_does_not_link(prompt):
    peers = [cluster_info(5, 26000), cluster_info(6, 26000)]
    assert prompt.link_clusters(peers, sides.PATIENT) == (INVALID, [INVALID, INVALID])


@row("E23")
def test_a_wrong_cluster_id(make_pair):
    pair = make_pair(linked=False)
    wrong = cluster_info(77, pair.prompt.listen_port)
    assert pair.decoder.link_clusters([wrong], sides.PATIENT) == (FAILED, [FAILED])
    assert pair.decoder.unlink_clusters([wrong], sides.PATIENT) == (NOT_YET, [NOT_YET])
    pair.link()
    assert_pulls(pair)


@row("a side may have the cluster id of its peer")
def test_equal_cluster_ids(make_pair):
    pair = make_pair(prompt_id=0, decoder_id=0)
    source = pair.call(write_new_cache, pair.pm, byte_desc(1), [CacheKey(0, 1)], seed=3)
    target = pair.dm.allocate_cache(byte_desc(1))
    pair.dm.pull_cache(CacheKey(0, 1), target)
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(source.cache_desc, 3))


@row("LLMClusterInfo", "several addresses in one LLMClusterInfo are refused")
def test_an_entry_that_names_no_peer_or_several(make_pair):
    pair = make_pair(linked=False)
    nameless, nowhere = LLMClusterInfo(), LLMClusterInfo()
    nameless.append_remote_ip_info("127.0.0.1", pair.prompt.listen_port)
    nowhere.remote_cluster_id = 5
    several = cluster_info(6, pair.prompt.listen_port)
    several.append_remote_ip_info("127.0.0.1", pair.prompt.listen_port)
    result = pair.decoder.link_clusters([pair.peer, nameless, nowhere, several], sides.PATIENT)
    assert result == (INVALID, [SUCCESS, INVALID, INVALID, INVALID])
    assert_pulls(pair)


@row("E24")
@pytest.mark.parametrize("is_accepting", [True, False])
def test_a_listener_that_says_nothing(decoder, is_accepting):
    with silent_listener() as listener:
        silent = cluster_info(1, listener.getsockname()[1])
        accepted = []
        accepting = threading.Thread(target=lambda: accepted.append(listener.accept()))
        if is_accepting:
            accepting.start()
        start = time.monotonic()
        assert decoder.link_clusters([silent, cluster_info(7, dead_port())], SHORT)[1][0] == TIMEOUT
        assert time.monotonic() - start < SHORT / 1000 + SLACK
        if is_accepting:
            accepting.join()
            accepted[0][0].close()
    assert decoder.unlink_clusters([silent], sides.PATIENT) == (NOT_YET, [NOT_YET])


@row("E24")
@pytest.mark.parametrize("num_bytes", [0, 1, 4, 20])
def test_a_prompt_that_falls_silent_in_the_handshake(make_pair, num_bytes):
    pair = make_pair(linked=False, forwarded=True)
    pair.forwarder.hold_after(num_bytes)
    start = time.monotonic()
    assert pair.decoder.link_clusters([pair.peer], SHORT) == (TIMEOUT, [TIMEOUT])
    assert time.monotonic() - start < SHORT / 1000 + SLACK
    pair.forwarder.release()
    pair.link()
    assert_pulls(pair)


@row("E19")
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"\xff" * 4096, b"\0" * 4096], ids=len)
def test_a_listener_that_talks_nonsense(decoder, answer):
    with silent_listener() as listener:

        def talk() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # the decoder has hung up
                connection.sendall(answer)

        talking = threading.Thread(target=talk)
        talking.start()
        strange = cluster_info(1, listener.getsockname()[1])
        assert decoder.link_clusters([strange], sides.PATIENT) == (FAILED, [FAILED])
        talking.join()


@row("E19")
def test_strangers_do_not_keep_a_decoder_from_linking(make_pair):
    pair = make_pair(linked=False)
    with contextlib.ExitStack() as stack:
        for number in range(8):
            stranger = socket.create_connection(("127.0.0.1", pair.prompt.listen_port))
            stack.enter_context(stranger)
            if number % 2:  # the others say nothing
                stranger.sendall(bytes([number * 31]) * 1000)
        pair.link()
        assert_pulls(pair)


@row("E25")
def test_unlink_what_is_not_linked(make_pair):
    pair = make_pair(linked=False)
    assert pair.decoder.unlink_clusters([pair.peer], sides.PATIENT) == (NOT_YET, [NOT_YET])
    assert pair.prompt.unlink_clusters([pair.itself], sides.PATIENT) == (NOT_YET, [NOT_YET])
    pair.link()
    strange = cluster_info(99, 1)
    assert pair.decoder.unlink_clusters([strange, pair.peer], sides.PATIENT) == (NOT_YET, [NOT_YET, SUCCESS])
    assert_not_linked(pair)


@row("E25")
def test_unlink_takes_down_both_ends_and_leaves_caches_and_keys(pair):
    desc, key = byte_desc(1), CacheKey(1, 5)
    pair.call(write_new_cache, pair.pm, desc, [key], seed=5)
    target = write_new_cache(pair.dm, desc, seed=6)
    nameless = LLMClusterInfo()
    nameless.remote_cluster_id = 1
    assert pair.decoder.unlink_clusters([nameless], sides.PATIENT) == (SUCCESS, [SUCCESS])
    assert pair.prompt.unlink_clusters([pair.itself], sides.PATIENT) == (NOT_YET, [NOT_YET])
    assert_not_linked(pair)
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 6))
    pair.link()
    pair.dm.pull_cache(key, target)
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 5))


@row("E26")
def test_unlink_after_the_prompt_died(make_pair):
    pair = make_pair(forwarded=True)
    if pair.process:
        pair.process.kill()
    else:
        pair.forwarder.cut()
    assert pair.unlink() == NOTIFY_FAILED
    assert pair.unlink() == NOT_YET
    assert_not_linked(pair)


@row("E26")
def test_unlink_from_a_prompt_that_says_nothing(make_pair):
    pair = make_pair(forwarded=True)
    pair.forwarder.hold()
    start = time.monotonic()
    assert pair.unlink(timeout=SHORT) == NOTIFY_FAILED
    assert time.monotonic() - start < SHORT / 1000 + SLACK
    assert pair.unlink() == NOT_YET
    pair.forwarder.release()
    pair.link()
    assert_pulls(pair)


@row("E27")
def test_a_forced_unlink_of_the_decoder(pair):
    assert pair.unlink(force=True) == SUCCESS
    assert_not_linked(pair)
    assert pair.unlink() == NOT_YET
    _, (code,) = pair.prompt.unlink_clusters([pair.itself], force=True)
    assert code in {SUCCESS, NOT_YET}  # it may have seen the connection close
    pair.link()
    assert_pulls(pair)


@row("E27")
def test_a_forced_unlink_while_the_prompt_says_nothing(make_pair):
    pair = make_pair(forwarded=True)
    pair.forwarder.hold()
    assert pair.unlink(force=True) == SUCCESS
    assert_not_linked(pair)
    assert pair.prompt.unlink_clusters([pair.itself], force=True) == (SUCCESS, [SUCCESS])
    pair.forwarder.release()
    pair.link()
    assert_pulls(pair)


@row("E27", "a pull after the PROMPT dropped the link")
@pytest.mark.parametrize("force", [True, False])
def test_the_prompt_drops_its_end(pair, force):
    assert pair.prompt.unlink_clusters([pair.itself], force=force) == (SUCCESS, [SUCCESS])
    assert pair.prompt.unlink_clusters([pair.itself], force=force) == (NOT_YET, [NOT_YET])
    assert_not_linked(pair)
    assert_not_linked(pair)
    assert pair.unlink(force=True) == SUCCESS
    pair.link()
    assert_pulls(pair)


@row("E28")
def test_a_decoder_that_died_can_link_again(prompt):
    peer = cluster_info(1, prompt.listen_port)
    for _ in range(3):
        with remote_process() as process:
            decoder = process.call(sides.start_decoder, 2)
            assert decoder.link_clusters([peer], sides.PATIENT) == (SUCCESS, [SUCCESS])
            process.kill()
    again = sides.start_decoder(2)
    try:
        assert again.link_clusters([peer], sides.PATIENT) == (SUCCESS, [SUCCESS])
    finally:
        again.finalize()


@row("E28")
def test_a_decoder_that_forgot_its_link_can_link_again(make_pair):
    pair = make_pair(forwarded=True)
    pair.forwarder.hold()  # the prompt does not learn of it
    pair.decoder.finalize()
    pair.decoder.init(sides.options())
    assert pair.prompt.unlink_clusters([pair.itself], sides.PATIENT) == (SUCCESS, [SUCCESS])
    pair.forwarder.release()
    pair.link()


@row("E28", "a PROMPT that restarts binds its port at once")
def test_a_prompt_that_died_is_replaced(make_pair):
    pair = make_pair(linked=False)
    with remote_process() as process:
        first = process.call(sides.start_prompt, 5, transport=pair.transport)
        port = first.listen_port
        peer = cluster_info(5, port)
        assert pair.decoder.link_clusters([pair.peer, peer], sides.PATIENT) == (SUCCESS, [SUCCESS, SUCCESS])
        process.kill()
    second = sides.start_prompt(5, port=port, transport=pair.transport)
    try:
        target = pair.dm.allocate_cache(byte_desc(1))
        key = CacheKey(5, 9)
        write_new_cache(second.kv_cache_manager, byte_desc(1), [key], seed=9)
        with pytest.raises(RuntimeError):
            pair.dm.pull_cache(key, target)
        assert pair.decoder.unlink_clusters([peer], sides.PATIENT) == (NOTIFY_FAILED, [NOTIFY_FAILED])
        assert pair.decoder.link_clusters([peer], sides.PATIENT) == (SUCCESS, [SUCCESS])
        pair.dm.pull_cache(key, target)
        np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(byte_desc(1), 9))
    finally:
        second.finalize()
    assert_pulls(pair)  # the other peer was not in the way


@row("E29")
def test_a_call_that_waits_for_another_that_links(make_pair):
    pair = make_pair(linked=False)
    results = []
    with silent_listener() as listener:
        slow = cluster_info(7, listener.getsockname()[1])
        first = threading.Thread(
            target=lambda: results.append(pair.decoder.link_clusters([slow], sides.PATIENT))
        )
        first.start()
        connection, _ = listener.accept()
        for call in (pair.decoder.link_clusters, pair.decoder.unlink_clusters):
            overall, codes = call([pair.peer, slow], SHORT)
            assert overall == LLMStatusCode.LLM_PROCESSING_LINK
            assert codes == [overall] * 2
        connection.close()
        first.join()
    assert results == [(FAILED, [FAILED])]
    pair.link()
    assert_pulls(pair)


@row("E29")
def test_two_threads_that_link_queue(make_pair):
    pair = make_pair(linked=False)
    with contextlib.closing(Forwarder(pair.prompt.listen_port)) as forwarder:
        forwarder.hold()
        slow, results = cluster_info(1, forwarder.port), []

        def link() -> None:
            results.append(pair.decoder.link_clusters([slow], sides.PATIENT))

        threads = [threading.Thread(target=link) for _ in range(2)]
        for thread in threads:
            thread.start()
        forwarder.release()
        for thread in threads:
            thread.join()
        assert sorted(codes for _, codes in results) == [[SUCCESS], [ALREADY]]
        assert_pulls(pair)
        assert pair.unlink() == SUCCESS


@row("E29")
@over_tcp
def test_unlink_beside_a_running_pull(make_pair):
    pair = make_pair(pool=1 << 24, forwarded=True)
    desc, key = byte_desc(1, 1 << 20), CacheKey(1, 5)
    pair.call(write_new_cache, pair.pm, desc, [key], seed=5)
    target = pair.dm.allocate_cache(desc)
    pair.forwarder.hold_after(1 << 16)
    pull = threading.Thread(target=pair.dm.pull_cache, args=(key, target))
    pull.start()
    assert pair.forwarder.limit_reached.wait(sides.PATIENT / 1000)
    assert pair.unlink(timeout=SHORT) == LLMStatusCode.LLM_LINK_BUSY
    pair.forwarder.release()
    pull.join()
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 5))
    assert pair.unlink() == SUCCESS


@row("E27")
@over_tcp
def test_a_forced_unlink_beside_a_running_pull(make_pair):
    pair = make_pair(pool=1 << 25, forwarded=True)
    desc, key = byte_desc(1, 1 << 21), CacheKey(1, 5)
    pair.call(write_new_cache, pair.pm, desc, [key], seed=5)
    target = pair.dm.allocate_cache(desc)
    codes = []

    def pull() -> None:
        try:
            pair.dm.pull_cache(key, target)
        except LLMException as error:
            codes.append(error.status_code)

    pair.forwarder.hold_after(1 << 16)
    pulling = threading.Thread(target=pull)
    pulling.start()
    assert pair.forwarder.limit_reached.wait(sides.PATIENT / 1000)
    assert pair.unlink(force=True) == SUCCESS
    pulling.join()
    assert codes == [TIMEOUT]
    pair.forwarder.release()
    pair.link()
    pair.dm.pull_cache(key, target)
    np.testing.assert_array_equal(read_cache(pair.dm, target), pattern(desc, 5))
