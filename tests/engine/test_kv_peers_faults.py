"""Random requests to a prefill and a decode engine whose every call to each other may raise, hang or lie.

Whatever happens, each answer has the tokens and log-probabilities of one engine alone, and nothing is left.
"""

from __future__ import annotations

import random
import threading
import time

import msgspec
import pytest

from checkpoints import make_checkpoint
from engine_checks import check_after_every_step, core_of
from free_ports import free_ports
from insides import always_load, check_nothing_is_shared, connector_of, known_peers_of
from late_steps import compute_late
from quire import LLM, SamplingParams
from quire.datadist.links.decoder_link import DecoderLink
from quire.datadist.links.decoder_links import DecoderLinks
from quire.datadist.links.prompt_link import PromptLink
from quire.datadist.loans.cached_blocks import CachedBlocks, CachedReading
from quire.datadist.loans.loans import Loans
from quire.datadist.status import LLMStatusCode, failure
from quire.datadist.transports.shared_memory import SharedMemoryDestinationEnd, SharedMemorySourceEnd
from quire.datadist.transports.tcp import TcpDestinationEnd, TcpSourceEnd
from quire.datadist.wire.protocol import LoanReport
from quire.engine.messages import EngineCoreRequest
from quire.kv.peers import links, peer_prefixes, pulls
from quire.request_options import RequestOptions
from quire.status import FinishReason, RequestStatus

TIMEOUT = 0.5  # kv_transfer_timeout, seconds
PROMPTS = [
    [5 + (index * step) % 90 for index in range(16 * blocks + 3)] for blocks, step in ((9, 1), (6, 7), (4, 3))
]
MAX_TOKENS = 30  # so that answers outgrow the cache together, and some are preempted

OPTIONS = {
    "num_threads": 1,
    "num_kv_blocks": 22,
    "kv_transfer_token": "secret",
    "kv_transfer_timeout": TIMEOUT,
    "max_num_batched_tokens": 80,
}
FAULTY = [  # what is not the connector's own
    (DecoderLink, "pull_parts"),
    (DecoderLink, "update_loans"),
    (DecoderLink, "find_prefix"),
    (DecoderLinks, "open"),
    (Loans, "open"),
    (Loans, "renew"),
    (Loans, "release"),
    (CachedBlocks, "count_leading"),
    (CachedBlocks, "open"),
    (CachedReading, "require_held"),
    (PromptLink, "serve"),
    (TcpSourceEnd, "send"),
    (TcpDestinationEnd, "receive"),
    (SharedMemorySourceEnd, "send"),
    (SharedMemoryDestinationEnd, "receive"),
]


def params(**changes) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 1, **changes}
    )


class Faults:
    """Makes calls fail at random: before they are made, after they have succeeded, or after a while."""

    def __init__(self, seed: int, rate: float) -> None:
        self.rate = rate
        self.num_faults = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._never = threading.Event()

    def install(self, monkeypatch) -> None:
        for owner, name in FAULTY:
            monkeypatch.setattr(owner, name, self._faulty(getattr(owner, name), name))

    def _faulty(self, function, name: str):
        def call(*args, **kwargs):
            fault = self._draw()
            if fault == "before":
                raise self._error()
            if fault == "hang":
                self._never.wait(0.05)
                raise TimeoutError("injected: it hung")
            result = function(*args, **kwargs)
            if fault == "after":
                if name == "open":
                    end = result.drop if isinstance(result, DecoderLink) else result.close
                    end()  # who never got the link or the reading cannot
                raise self._error()
            if fault == "lie" and name == "update_loans":
                return LoanReport(list(args[1]), list(args[1]))  # all have ended, and are ready
            if fault == "lie" and name == "find_prefix":
                return len(args[1]) // 16  # all is there
            return result

        return call

    def _draw(self) -> str | None:
        with self._lock:
            if self._random.random() >= self.rate:
                return None
            self.num_faults += 1
            return self._random.choice(["before", "before", "after", "lie", "hang"])

    def _error(self) -> Exception:
        with self._lock:
            return self._random.choice(
                [
                    ConnectionError("injected"),
                    ValueError("injected"),
                    failure(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "injected"),
                ]
            )


class Answers:
    """Steps an engine, and collects what it answers."""

    def __init__(self, llm: LLM) -> None:
        self.core = core_of(llm)
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list] = {}
        self.ended: dict[str, FinishReason] = {}
        self.transfers: dict[str, dict | None] = {}

    def add(self, name: str, prompt: list[int], transfer: dict | None, **changes) -> None:
        options = RequestOptions(kv_transfer_params=transfer)
        self.core.add(EngineCoreRequest([name], [0], prompt, params(**changes), options=options))

    def step(self) -> None:
        for output in self.core.step()[0]:
            name = output.request_id
            self.tokens.setdefault(name, []).extend(output.new_token_ids)
            self.logprobs.setdefault(name, []).extend(output.logprobs or [])
            if output.finish_reason is not None:
                assert name not in self.ended, "one terminal output"
                self.ended[name] = output.finish_reason
                self.transfers[name] = output.kv_transfer_params

    def of(self, name: str) -> tuple:
        return self.tokens[name], [msgspec.to_builtins(one) for one in self.logprobs[name]]


@pytest.fixture(scope="module")
def alone() -> list[tuple]:
    return answers_alone()


def answers_alone(model="mini", **options) -> list[tuple]:
    with LLM(model, num_threads=1, num_kv_blocks=26, **options) as llm:
        answers = Answers(llm)
        for number, prompt in enumerate(PROMPTS):
            answers.add(str(number), prompt, None)
        while len(answers.ended) < len(PROMPTS):
            answers.step()
        return [answers.of(str(number)) for number in range(len(PROMPTS))]


def serve(first: Answers, second: Answers, seed: int, num_requests: int) -> dict[str, int]:
    """Send requests through both engines; return which prompt each that was not aborted had."""
    choose = random.Random(seed)
    host, port = first.core.info.kv_transfer_address
    waiting = [f"r{number}" for number in range(num_requests)]
    prompts = {name: choose.randrange(len(PROMPTS)) for name in waiting}
    prefilling: set[str] = set()
    answering: set[str] = set()
    while waiting or prefilling or answering:
        if waiting and len(prefilling) + len(answering) < 5:
            name = waiting.pop()
            prompt, lend = PROMPTS[prompts[name]], {"do_remote_decode": True}
            if choose.random() < 0.5:  # both at once
                where = {"do_remote_prefill": True, "remote_host": host, "remote_port": port}
                lend["transfer_id"] = name
                second.add(name, prompt, where | {"transfer_id": name})
                answering.add(name)
            else:
                prefilling.add(name)
            first.add(name, prompt, lend, max_tokens=choose.choice([1, 1, 20]))
        if choose.random() < 0.03:
            engine = choose.choice([first, second])
            name = choose.choice(sorted(prompts))
            for output in engine.core.finish([name], RequestStatus.FINISHED_ABORTED):
                engine.ended[output.request_id] = output.finish_reason
        first.step()
        second.step()
        for name in sorted(prefilling & first.ended.keys()):
            prefilling.remove(name)
            second.add(name, PROMPTS[prompts[name]], first.transfers.get(name))
            answering.add(name)
        answering -= second.ended.keys()
    return {name: one for name, one in prompts.items() if second.ended[name] is not FinishReason.ABORT}


def drain(*engines: Answers) -> None:
    for engine in engines:
        while engine.core.has_requests():
            engine.step()
        check_nothing_is_shared(engine.core)
        assert not any(
            peer._waiting or peer._offered or peer._ended for peer in known_peers_of(engine.core).values()
        )


def serve_equals(engines: list[Answers], seed: str, num_requests: int) -> dict[str, tuple[Answers, int]]:
    """Send requests to engines that ask each other; return who answered which prompt, but for the aborted."""
    choose = random.Random(seed)
    asked: dict[str, tuple[Answers, int]] = {}
    waiting = [f"r{seed}-{number}" for number in range(num_requests)]
    while waiting or any(engine.core.has_requests() for engine in engines):
        if waiting and choose.random() < 0.1:
            name = waiting.pop()
            engine, prompt = choose.choice(engines), choose.randrange(len(PROMPTS))
            asked[name] = engine, prompt
            engine.add(name, PROMPTS[prompt], None)
        if asked and choose.random() < 0.01:
            name = choose.choice(sorted(asked))
            for output in asked[name][0].core.finish([name], RequestStatus.FINISHED_ABORTED):
                asked[name][0].ended[name] = output.finish_reason
        if choose.random() < 0.05:
            choose.choice(engines).core.reset_prefix_cache()
        for engine in engines:
            engine.step()
    return {name: one for name, one in asked.items() if one[0].ended[name] is not FinishReason.ABORT}


@pytest.mark.histories
@pytest.mark.parametrize(("seed", "options"), [(3, {}), (4, {"overlap_steps": True})], ids=str)
def test_no_fault_of_an_equal_changes_an_answer_or_leaves_anything(alone, monkeypatch, seed, options):
    serve_equals_with_faults(alone, monkeypatch, seed, options)


@pytest.mark.histories
@pytest.mark.parametrize(("seed", "family"), [(9, "lfm2"), (10, "qwen3_5")])
def test_no_fault_of_an_equal_changes_an_answer_of_recurrent_layers(monkeypatch, tmp_path, seed, family):
    model = str(make_checkpoint(family, tmp_path, max_position_embeddings=512))
    options = {"max_num_seqs": 4, "num_linear_attention_blocks": 8}
    serve_equals_with_faults(answers_alone(model, **options), monkeypatch, seed, options, model)


def serve_equals_with_faults(
    right: list[tuple], monkeypatch, seed: int, options: dict, model: str = "mini"
) -> None:
    """Serve with faults by two engines that ask each other, and check all that must hold."""
    monkeypatch.setattr(links, "DOWN_SECONDS", 0.05)
    monkeypatch.setattr(peer_prefixes, "LOOKUP_PATIENCE", TIMEOUT)
    monkeypatch.setattr(peer_prefixes, "MIN_COMPUTING_TIME", 0.0)
    faults = Faults(seed, rate=0.0)
    faults.install(monkeypatch)
    threads = set(threading.enumerate())
    ports = free_ports(2)
    options = {"kv_peers": ",".join(f"127.0.0.1:{port}" for port in ports), **OPTIONS, **options}
    with (
        LLM(model, kv_transfer_port=ports[0], **options) as one,
        LLM(model, kv_transfer_port=ports[1], **options) as another,
    ):
        engines = [Answers(one), Answers(another)]
        for engine in engines:
            check_after_every_step(engine.core)
            always_load(connector_of(engine.core))
        num_loaded = 0
        for part in range(10):  # what is asked when depends on threads
            faults.rate = 0.1
            asked = serve_equals(engines, f"{seed}-{part}", num_requests=12)
            for name, (engine, prompt) in asked.items():
                assert engine.of(name) == right[prompt], name
            faults.rate = 0.0
            drain(*engines)
            num_loaded = sum(engine.core.stats().num_loaded_tokens for engine in engines)
            if faults.num_faults and num_loaded:
                break
        assert faults.num_faults
        assert num_loaded
    check_threads_end(threads)


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("seed", "options"),
    [(1, {"kv_transports": "tcp"}), (2, {"overlap_steps": True})],
    ids=str,
)
def test_no_fault_changes_an_answer_or_leaves_anything(alone, monkeypatch, seed, options):
    assert serve_with_faults(alone, monkeypatch, seed, options) > 0


@pytest.mark.histories
def test_no_fault_changes_an_answer_of_steps_in_flight(monkeypatch):
    unknown_tokens = compute_late(monkeypatch)
    options = {"overlap_steps": True, "kv_transports": "tcp"}
    assert serve_with_faults(answers_alone(**options), monkeypatch, 6, options) > 0
    assert sum(unknown_tokens) > 0


@pytest.mark.histories
def test_no_fault_changes_an_answer_of_several_ranks(monkeypatch, preloaded_engines):
    options = {"tensor_parallel_size": 2}
    serve_with_faults(answers_alone(**options), monkeypatch, 5, options)  # slow: nothing may arrive in time


@pytest.mark.histories
@pytest.mark.first_case
@pytest.mark.parametrize(("seed", "family"), [(7, "lfm2"), (8, "qwen3_5")])
def test_no_fault_changes_an_answer_of_recurrent_layers(monkeypatch, tmp_path, seed, family):
    model = str(make_checkpoint(family, tmp_path, max_position_embeddings=512))
    options = {"max_num_seqs": 4, "num_linear_attention_blocks": 8}
    right = answers_alone(model, **options)
    assert serve_with_faults(right, monkeypatch, seed, options, model) > 0


def serve_with_faults(right: list[tuple], monkeypatch, seed: int, options: dict, model: str = "mini") -> int:
    """Serve with faults and check all that must hold; return how many tokens were loaded."""
    monkeypatch.setattr(links, "DOWN_SECONDS", 0.05)
    monkeypatch.setattr(pulls, "OFFER_PATIENCE", TIMEOUT)
    faults = Faults(seed, rate=0.15)
    faults.install(monkeypatch)
    threads = set(threading.enumerate())
    with (
        LLM(model, role="prefill", **OPTIONS, **options) as prefill,
        LLM(model, role="decode", **OPTIONS, **options) as decode,
    ):
        first, second = Answers(prefill), Answers(decode)
        for one in (first, second):
            check_after_every_step(one.core)
            always_load(connector_of(one.core))
        for name, prompt in serve(first, second, seed, num_requests=10).items():
            assert second.of(name) == right[prompt], name
        drain(first, second)
        faults.rate = 0.0
        assert faults.num_faults
        num_loaded_tokens = second.core.stats().num_loaded_tokens
    check_threads_end(threads)
    return num_loaded_tokens


def check_threads_end(threads_before: set[threading.Thread]) -> None:
    deadline = time.monotonic() + 20
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), thread.name
