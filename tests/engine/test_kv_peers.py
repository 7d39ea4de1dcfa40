"""A prompt computed by one engine and continued by another: the same bits, whatever fails in between."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from engine_checks import check_after_every_step, core_of
from free_ports import free_port, free_ports
from insides import (
    always_load,
    check_nothing_is_shared,
    connector_of,
    costs_of,
    known_peers_of,
    lent_prompts,
    peer_parts,
)
from quire import LLM, AsyncLLM, SamplingParams
from quire.config import EngineConfig
from quire.datadist.links.decoder_link import DecoderLink
from quire.datadist.transports import nixl_agent
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError
from quire.front.arguments import engine_config
from quire.kv.blocks.events import KVEventCollector
from quire.kv.peers import links, peer, peer_prefixes, pull_readers, pulls
from quire.request_options import RequestOptions
from quire.status import RequestStatus

PROMPT = [5 + index % 90 for index in range(20 * 16 + 3)]
OPTIONS = {"num_threads": 1, "num_kv_blocks": 64}
WHERE = {"do_remote_prefill": True, "remote_host": "1.2.3.4", "remote_port": 1, "transfer_id": "t"}
TOKEN = {"kv_transfer_token": "secret"}


@contextlib.contextmanager
def engine(role="both", **options):
    with LLM("mini", **{**OPTIONS, "role": role, **TOKEN, **options}) as llm:
        check_after_every_step(core_of(llm))
        always_load(connector_of(llm))
        yield llm


def params(**changes) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1, **changes}
    )


def answer(llm: LLM, prompt=PROMPT, transfer=None, **changes) -> list:
    """The completions of a prompt: tokens and log-probabilities."""
    [output] = llm.generate([prompt], params(**changes), kv_transfer_params=transfer)
    return [
        (one.token_ids, [[entry.logprob for entry in position.values()] for position in one.logprobs])
        for one in output.outputs
    ]


def run(llm: LLM) -> dict[str, list[int]]:
    """Step until nothing is left to do; return the new tokens of each request."""
    core, tokens = core_of(llm), {}
    while core.has_unfinished_requests():
        for output in core.step()[0]:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        time.sleep(0.001)  # for the threads of the links
    return tokens


def prefill(llm: LLM, prompt=PROMPT, *, n=1, **more) -> dict:
    [output] = llm.generate(
        [prompt], params(max_tokens=1, n=n), kv_transfer_params={"do_remote_decode": True, **more}
    )
    return output.kv_transfer_params


def step_until(llm: LLM, condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        core_of(llm).step()
        time.sleep(0.001)  # for the threads of the links


def add(llm: LLM, name: str, prompt: list[int], transfer: dict | None, **changes) -> None:
    options = RequestOptions(kv_transfer_params=transfer)
    core_of(llm).add(EngineCoreRequest([name], [0], prompt, params(**changes), options=options))


def check_nothing_is_held(*engines: LLM) -> None:
    for llm in engines:
        core = core_of(llm)
        step_until(llm, lambda core=core: not core.has_requests())
        check_nothing_is_shared(core)


@pytest.fixture(scope="module")
def alone() -> list:
    with engine() as llm:
        return answer(llm)


@pytest.fixture(scope="module")
def pair():
    with engine("prefill") as first, engine("decode") as second:
        yield first, second


@pytest.fixture(autouse=True)
def fresh(request):
    """The engines of `pair` have nothing cached when a test begins, and hold nothing when it ends."""
    if "pair" not in request.fixturenames:
        yield
        return
    engines = request.getfixturevalue("pair")
    yield
    check_nothing_is_held(*engines)
    for llm in engines:
        assert llm.reset_prefix_cache()


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_steps": True},
        {"kv_cache_dtype": "int8"},
        {"kv_transports": "tcp"},
        {"max_num_batched_tokens": 48},
    ],
    ids=str,
)
def test_a_prompt_is_computed_here_and_continued_there(options):
    with engine(**options) as llm:
        expected = answer(llm)
    with engine("prefill", **options) as first, engine("decode", **options) as second:
        transfer = prefill(first)
        assert core_of(first).stats().num_leased_blocks
        assert answer(second, transfer=transfer) == expected
        assert second.stats().num_loaded_tokens == 322
        assert second.stats().num_failed_loads == 0
        check_nothing_is_held(first, second)


def test_layers_travel_while_the_prompt_is_computed(alone):
    with engine("prefill", max_num_batched_tokens=48) as first, engine("decode") as second:
        host, port = core_of(first).info.kv_transfer_address
        where = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": "t"}
        answers = []
        decoding = threading.Thread(target=lambda: answers.append(answer(second, transfer=where)))
        decoding.start()
        prefill(first, transfer_id="t")
        decoding.join(60)
        assert answers == [alone]
        assert second.stats().num_loaded_tokens == 322
        check_nothing_is_held(first, second)


def test_what_is_cached_there_is_not_read_again(pair, alone):
    first, second = pair
    answer(second, PROMPT[:160])
    loaded = second.stats().num_loaded_tokens
    assert answer(second, transfer=prefill(first)) == alone
    assert second.stats().num_loaded_tokens - loaded == 322 - 160
    assert answer(second, transfer=prefill(first)) == alone
    assert second.stats().num_loaded_tokens - loaded == 322 - 160


@pytest.mark.parametrize("num_lent", [1, 2])
def test_a_prompt_that_comes_several_times_at_once_travels_as_often_as_it_is_lent(pair, alone, num_lent):
    first, second = pair
    loaded = second.stats().num_loaded_tokens
    for number, name in enumerate("abcd"):
        add(second, name, PROMPT, prefill(first) if number < num_lent else None)
    assert run(second) == dict.fromkeys("abcd", alone[0][0])
    assert second.stats().num_loaded_tokens == loaded + num_lent * 322


def test_prompts_that_are_computed_in_another_order_than_they_are_waited_for_all_travel():
    prompts = {f"t{number}": [5 + number, *PROMPT[1:]] for number in range(pull_readers.MAX_READERS + 2)}
    lenders_blocks = 2 * (len(PROMPT) // 16 + 2)  # so that no third one is computed before one is read
    with (
        engine("prefill", num_kv_blocks=lenders_blocks) as first,
        engine("decode", num_kv_blocks=256) as second,
    ):
        host, port = core_of(first).info.kv_transfer_address
        where = {"do_remote_prefill": True, "remote_host": host, "remote_port": port}
        for name, prompt in prompts.items():
            add(second, name, prompt, where | {"transfer_id": name})
        for name, prompt in reversed(prompts.items()):
            add(first, name, prompt, {"do_remote_decode": True, "transfer_id": name}, max_tokens=1)
        while core_of(second).has_unfinished_requests():
            core_of(first).step()
            core_of(second).step()
            time.sleep(0.001)  # for the threads of the links
        assert second.stats().num_loaded_tokens == len(prompts) * (len(PROMPT) - 1)
        assert second.stats().num_failed_loads == 0
        check_nothing_is_held(first, second)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_all_tokens_but_the_last_travel_however_long_the_prompt_is(pair, max_tokens):
    first, second = pair
    prompts = [PROMPT[: 160 + length] for length in (0, 1, 2, 16)]
    with engine() as llm:
        expected = [answer(llm, prompt) for prompt in prompts]
    for prompt, right in zip(prompts, expected, strict=True):
        loaded = second.stats().num_loaded_tokens
        [lent] = first.generate(
            [prompt], params(max_tokens=max_tokens), kv_transfer_params={"do_remote_decode": True}
        )
        assert answer(second, prompt, transfer=lent.kv_transfer_params) == right
        assert second.stats().num_loaded_tokens == loaded + len(prompt) - 1
        assert second.reset_prefix_cache()


def test_all_completions_of_a_prompt_use_it(pair):
    first, second = pair
    with engine() as llm:
        expected = answer(llm, n=3, temperature=1.0, seed=7)
    assert answer(second, transfer=prefill(first), n=3, temperature=1.0, seed=7) == expected
    assert second.stats().num_failed_loads == 0


def test_a_prompt_of_several_completions_is_lent_once(pair, alone):
    first, second = pair
    transfer = prefill(first, n=3, transfer_id="mine")
    assert len(lent_prompts(first)) == 1
    assert answer(second, transfer=transfer) == alone


def test_a_prompt_of_less_than_a_block_is_not_lent(pair):
    first, second = pair
    assert prefill(first, PROMPT[:16]) is None
    assert prefill(first, PROMPT[:17]) is not None
    connector_of(first).lease_ended(next(iter(lent_prompts(first))))
    core_of(first).scheduler.accounts.holdings.end_all_leases()
    assert answer(second, PROMPT[:16], transfer={"do_remote_prefill": False})


def failed_loads(llm: LLM) -> int:
    stats = llm.stats()
    return stats.num_failed_loads + stats.kv_connector.num_missing_prompts


def lost_lease(first: LLM) -> dict:
    transfer = prefill(first)
    core_of(first).scheduler.accounts.holdings.end_all_leases()
    return transfer


def other_prompt(first: LLM) -> dict:
    return prefill(first, [7, *PROMPT[1:]])


def shorter_prompt(first: LLM) -> dict:
    return prefill(first, PROMPT[:-16])


def other_engine(first: LLM) -> dict:
    return prefill(first) | {"remote_engine_id": "0123456789abcdef"}


def dead_peer(first: LLM) -> dict:
    return prefill(first) | {"remote_port": 1}


def unknown_transfer(first: LLM) -> dict:
    return prefill(first) | {"transfer_id": "nobody's"}


def test_what_is_cheaper_to_compute_is_computed(pair, alone):
    first, second = pair
    connector = connector_of(second)
    costs_of(connector).prefers_loading = lambda num_blocks, num_queued: num_blocks < 20
    before = connector.stats()
    assert answer(second, transfer=prefill(first)) == alone
    assert connector.stats().num_computations_chosen == before.num_computations_chosen + 1
    assert connector.stats().num_loads_chosen == before.num_loads_chosen
    always_load(connector)


def test_figures(pair):
    first, second = pair
    answer(second, [9] * 32)  # what computing costs is known from now on
    lent, read = core_of(first).stats().kv_connector, core_of(second).stats().kv_connector
    answer(second, transfer=prefill(first))
    now = core_of(second).stats().kv_connector
    assert core_of(first).stats().kv_connector.num_lent_prompts == lent.num_lent_prompts + 1
    assert (now.num_loads_chosen, now.num_loaded_blocks) == (
        read.num_loads_chosen + 1,
        read.num_loaded_blocks + 21,
    )
    assert now.loaded_bytes % now.num_loaded_blocks == 0
    assert now.load_seconds_per_block > 0 < now.compute_seconds_per_token
    assert "shared_memory" in now.num_peers_by_transport


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize(
    "spoil", [lost_lease, other_prompt, shorter_prompt, other_engine, dead_peer, unknown_transfer]
)
def test_what_cannot_be_read_is_computed(pair, alone, spoil):
    first, second = pair
    before = failed_loads(second)
    transfer = spoil(first)
    assert answer(second, transfer=transfer) == alone
    assert failed_loads(second) > before
    core_of(first).scheduler.accounts.holdings.end_all_leases()
    for one in list(known_peers_of(second).values()):  # a peer that is down is not asked for a while
        one.links._down_until = 0.0


def test_a_request_that_never_comes_is_waited_for_only_so_long(pair, alone, monkeypatch):
    first, second = pair
    monkeypatch.setattr(pulls, "OFFER_PATIENCE", 0.1)
    host, port = core_of(first).info.kv_transfer_address
    where = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": "never"}
    assert answer(second, transfer=where) == alone


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("role", "options", "reason"),
    [
        ("decode", {"kv_transfer_token": "guess"}, "refused this end's proof"),
        ("decode", {"kv_cache_dtype": "float32"}, "the KV differs in KV dtype"),
        ("decode", {"block_size": 8, "num_kv_blocks": 128}, "block_size must be a multiple of the PROMPT's"),
    ],
)
def test_engines_that_do_not_fit_are_not_linked(role, options, reason, caplog):
    with engine(**{**options, "kv_transfer_token": ""}) as llm:
        expected = answer(llm)
    with engine("prefill") as first, engine(role, **options) as second:
        assert answer(second, transfer=prefill(first)) == expected
        assert failed_loads(second)
        assert reason in caplog.text


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_blocks_of_another_size_are_put_together(transport, dtype):
    options = {"kv_cache_dtype": dtype, "kv_transports": transport}
    with engine(**options) as llm:
        expected = [answer(llm), answer(llm, PROMPT[:201])]
    with (
        engine("prefill", max_num_batched_tokens=48, **options) as first,
        engine("decode", **{**options, "block_size": 64, "num_kv_blocks": 16}) as second,
    ):
        assert answer(second, transfer=prefill(first)) == expected[0]
        assert second.stats().num_loaded_tokens == 322
        assert second.reset_prefix_cache()
        answer(second, PROMPT[:64])
        assert answer(second, PROMPT[:201], transfer=prefill(first, PROMPT[:201])) == expected[1]
        assert second.stats().num_loaded_tokens == 322 + 200 - 64
        # Layer by layer, while it is computed.
        check_nothing_is_held(first, second)
        assert second.reset_prefix_cache()
        assert first.reset_prefix_cache()
        host, port = core_of(first).info.kv_transfer_address
        where = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "transfer_id": "t"}
        answers = []
        decoding = threading.Thread(target=lambda: answers.append(answer(second, transfer=where)))
        decoding.start()
        prefill(first, transfer_id="t")
        decoding.join(60)
        assert answers == [expected[0]]
        assert second.stats().num_loaded_tokens == 322 + 200 - 64 + 322
        check_nothing_is_held(first, second)


@pytest.mark.parametrize("changes", [{"prompt_logprobs": 1}, {}], ids=str)
def test_a_loan_that_is_not_needed_is_given_back_before_the_answer_ends(pair, changes):
    first, second = pair
    if not changes:
        answer(second)  # all of the prompt is cached now
    transfer = prefill(first)
    core = core_of(second)
    add(second, "a", PROMPT, transfer, max_tokens=64, **changes)
    core.step()
    assert core.scheduler.get_request_counts() == (1, 0)
    step_until(first, lambda: not core_of(first).stats().num_leased_blocks)
    assert core.has_unfinished_requests()
    core.finish(["a"], RequestStatus.FINISHED_ABORTED)


def test_a_request_that_is_refused_keeps_no_loan(pair):
    first, _ = pair
    transfer = prefill(first, transfer_id="mine")
    with pytest.raises(InvalidRequestError, match="'mine' is in use"):
        answer(first, transfer=transfer | {"do_remote_decode": True})
    step_until(first, lambda: not core_of(first).stats().num_leased_blocks)


def test_a_request_that_goes_on_after_its_engine_has_died_reads_no_loan(pair, alone):
    first, second = pair
    core, (tokens, _) = core_of(second), alone[0]
    before = failed_loads(second)
    core.scheduler.accounts.config.kv_load_failure = "fail"
    try:
        options = RequestOptions(kv_transfer_params=lost_lease(first))
        core.add(EngineCoreRequest(["a"], [0], PROMPT, params(), (), options, resumed_outputs=[tokens[:2]]))
        rest = run(second)
    finally:
        core.scheduler.accounts.config.kv_load_failure = "recompute"
    assert rest == {"a": tokens[2:]}
    assert failed_loads(second) == before


def test_however_long_a_transfer_may_take_it_is_one():
    timeout = {"kv_transfer_timeout": 1e10}
    with engine("prefill", **timeout) as first, engine("decode", **timeout) as second:
        answer(second, transfer=prefill(first))
        assert second.stats().num_loaded_tokens == 322
        check_nothing_is_held(first, second)


def test_with_too_many_peers_a_prompt_is_computed(pair, alone, monkeypatch):
    first, second = pair
    monkeypatch.setattr(peer, "MAX_PEERS", 0)
    peers = peer_parts(second).peers
    monkeypatch.setattr(peers, "_peers", {})
    before = failed_loads(second)
    assert answer(second, transfer=prefill(first)) == alone
    assert failed_loads(second) == before + 1
    core_of(first).scheduler.accounts.holdings.end_all_leases()


def test_a_request_that_is_aborted_gives_its_loan_back(pair):
    first, second = pair
    transfer = prefill(first)
    core = core_of(second)
    add(second, "a", PROMPT, transfer)
    core.step()
    core.finish(["a"], RequestStatus.FINISHED_ABORTED)
    step_until(first, lambda: not core_of(first).stats().num_leased_blocks)


def test_an_engine_whose_cache_may_be_written_by_a_lost_read_computes_nothing_more():
    with engine("decode") as llm:
        core = core_of(llm)
        peer_parts(core).memory.is_lost = True
        with pytest.raises(EngineDeadError, match="may still write to the cache"):
            answer(llm)


def test_nixl_must_be_installed_to_be_named(monkeypatch):
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match="kv_transports names nixl, but NIXL is not installed"):
        LLM("mini", **OPTIONS, role="decode", kv_transports="nixl,tcp")


def test_a_lease_that_nobody_renews_ends():
    with engine("prefill", kv_transfer_timeout=0.05) as first:
        prefill(first)
        step_until(first, lambda: not core_of(first).stats().num_leased_blocks)
        check_nothing_is_held(first)


async def test_loans_that_no_peer_will_read_are_released(preloaded_engines):
    config = engine_config("mini", {"role": "prefill", "num_kv_blocks": 64, **TOKEN})
    async with contextlib.AsyncExitStack() as stack:
        llm = AsyncLLM(config)
        stack.push_async_callback(llm.shutdown)
        await llm.wait_until_ready()
        llm.release_kv("never-lent")
        for name in ("lent", "never-lent"):
            lent = {"do_remote_decode": True, "transfer_id": name}
            async for output in llm.generate(PROMPT, params(max_tokens=1), kv_transfer_params=lent):
                assert output.kv_transfer_params["transfer_id"] == name
        assert (await llm.stats()).num_leased_blocks == -(-(len(PROMPT) - 1) // 16)
        llm.release_kv("lent")
        while (await llm.stats()).num_leased_blocks:
            await asyncio.sleep(0.001)
        assert await llm.reset_prefix_cache()


def test_releasing_kv_is_nothing_to_an_engine_that_lends_none():
    with LLM("mini", **OPTIONS) as llm:
        core_of(llm).release_kv("t")


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        ({"do_remote_prefill": True}, "missing required field"),
        ({"do_remote_prefill": True, "remote_host": "x", "remote_port": 1, "transfer_id": "t"}, "IPv4"),
        ({"do_remote_prefill": True, "remote_host": "1.2.3.4", "remote_port": 0, "transfer_id": "t"}, "port"),
        (WHERE | {"transfer_id": ""}, "transfer_id"),
        (WHERE | {"transfer_id": "\N{SNOWMAN}"}, "transfer_id"),  # messages are bounded in bytes
        (WHERE | {"transfer_id": "t" * 129}, "transfer_id"),
    ],
)
def test_parameters_that_are_invalid_refuse_the_request(pair, transfer, message):
    with pytest.raises(InvalidRequestError, match=message):
        answer(pair[1], transfer=transfer)


def test_a_transfer_id_is_used_once(pair):
    first, _ = pair
    prefill(first, transfer_id="mine")
    with pytest.raises(InvalidRequestError, match="'mine' is in use"):
        prefill(first, transfer_id="mine")
    core_of(first).scheduler.accounts.holdings.end_all_leases()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tier": "memory"}, "kv_tier is 'memory' and EngineConfig.role is 'decode'"),
        ({"use_cache_eviction": True}, "role is 'decode', but"),
        ({"kv_transports": "pigeon"}, "kv_transports is 'pigeon'"),
        ({"role": "prefill", "kv_transfer_host": "0.0.0.0"}, "cannot connect to"),
        ({"role": "prefill", "kv_transfer_host": "here"}, "not an IPv4 address"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM("mini", **{**OPTIONS, "role": "decode", **options})


# -- prefix caches of equals ---------------------------------------------------------------------------------


@contextlib.contextmanager
def equals(monkeypatch, **options):
    """Two engines that do everything, and read each other's prefix caches."""
    monkeypatch.setattr(peer_prefixes, "LOOKUP_PATIENCE", 30.0)
    monkeypatch.setattr(peer_prefixes, "MIN_COMPUTING_TIME", 1e-4)
    ports = free_ports(2)
    options = {"kv_peers": ",".join(f"127.0.0.1:{port}" for port in ports), **options}
    with (
        engine(kv_transfer_port=ports[0], **options) as first,
        engine(kv_transfer_port=ports[1], **options) as second,
    ):
        yield first, second
        check_nothing_is_held(first, second)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("options", [{}, {"overlap_steps": True}, {"kv_transports": "tcp"}], ids=str)
def test_a_prefix_that_an_equal_has_cached_is_read_from_it(alone, monkeypatch, options):
    with equals(monkeypatch, **options) as (first, second):
        assert answer(first) == alone
        assert answer(second) == alone
        assert second.stats().num_loaded_tokens == 320
        assert second.stats().kv_connector.num_prefixes_found == 1
        # What was read is cached here now: nobody is asked.
        assert answer(second) == alone
        assert second.stats().kv_connector.num_prefix_lookups == 1
        # The same tokens with a salt are another prompt.
        [salted] = second.generate([PROMPT], params(), cache_salt="other")
        assert salted.outputs[0].token_ids == alone[0][0]
        assert second.stats().num_loaded_tokens == 320


def test_a_prefix_that_several_requests_lack_at_once_is_read_once(alone, monkeypatch):
    with equals(monkeypatch) as (first, second):
        answer(first)
        outputs = second.generate([PROMPT] * 8, params())
        assert [output.outputs[0].token_ids for output in outputs] == [alone[0][0]] * 8
        assert second.stats().num_loaded_tokens == 320


def test_only_what_is_not_cached_here_is_read_from_an_equal(alone, monkeypatch):
    with equals(monkeypatch) as (first, second):
        answer(second, PROMPT[:100])
        answer(first, PROMPT[:230])
        assert first.stats().num_loaded_tokens == 6 * 16
        assert answer(second) == alone
        assert second.stats().num_loaded_tokens == 14 * 16 - 6 * 16
        assert answer(first) == alone
        assert first.stats().num_loaded_tokens == 6 * 16 + 20 * 16 - 14 * 16


def test_what_an_equal_gives_up_while_it_is_read_is_computed(alone, monkeypatch):
    with equals(monkeypatch) as (first, second):
        answer(first)
        pull_parts = DecoderLink.pull_parts

        def give_up_first(link, *arguments):
            assert first.reset_prefix_cache()
            pull_parts(link, *arguments)

        monkeypatch.setattr(DecoderLink, "pull_parts", give_up_first)
        assert answer(second) == alone
        assert second.stats().num_loaded_tokens == 0
        assert second.stats().num_failed_loads == 1


def test_what_is_given_up_is_not_read_even_if_it_cannot_be_published(monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(KVEventCollector, "removed", fails)
    with engine(kv_transfer_port=free_port(), kv_events_endpoint="tcp://127.0.0.1:*") as llm:
        for first in range(5, 9):  # prompts that do not fit into the cache together
            answer(llm, [first, *PROMPT[1:]])
        pool = core_of(llm).scheduler.accounts.kv.pools.first
        assert connector_of(llm)._cached._entries[0].keys() == pool._by_digest.keys()


def test_equals_that_are_gone_or_silent_cost_a_moment(alone, monkeypatch):
    monkeypatch.setattr(peer_prefixes, "LOOKUP_PATIENCE", 0.01)
    for module in (links, peer):
        monkeypatch.setattr(module, "LINK_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        peers = f"127.0.0.1:{free_port()},127.0.0.1:{silent.getsockname()[1]}"
        with engine(kv_peers=peers) as llm:
            assert answer(llm) == alone
            assert llm.stats().kv_connector.num_prefix_lookups == 1
            assert llm.stats().kv_connector.num_prefixes_found == 0


def test_what_takes_no_time_to_compute_is_not_asked_for(monkeypatch):
    with equals(monkeypatch) as (first, second):
        answer(first)
        costs_of(connector_of(second)).seconds_per_token = 1e-9
        answer(second)
        assert second.stats().kv_connector.num_prefix_lookups == 0


@pytest.mark.parametrize(
    "value", ["10.0.0.2", "10.0.0.2:0", "10.0.0.2:70000", "here:7000", "10.0.0.2:1,", "10.0.0.2:x"]
)
def test_addresses_of_equals_are_checked(value):
    with pytest.raises(
        ConfigError, match=r"KVTransferConfig.kv_peers is .* is not an IPv4 address and a port"
    ):
        LLM("mini", kv_peers=value, **OPTIONS)


def test_at_most_so_many_equals_are_asked():
    with pytest.raises(ConfigError, match="has 17 addresses; the maximum is 16"):
        LLM("mini", kv_peers=",".join(["10.0.0.2:7000"] * 17), **OPTIONS)


def test_sharing_kv_with_others_is_one_way_of_moving_it():
    with pytest.raises(ConfigError, match="an engine moves KV in one way only"):
        engine_config("mini", {"kv_peers": "10.0.0.2:7000", "kv_tier": "memory"})
    sharing = {"kv_peers": "10.0.0.2:7000", "role": "decode", "kv_transfer_port": 7000}
    assert engine_config("mini", sharing).shares_kv
    assert not EngineConfig(model="mini").shares_kv
