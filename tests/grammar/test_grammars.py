"""Grammars beside the step loop: compiled in threads, shared, timed out, forgotten; and a plan's masks."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import Executor, Future

import numpy as np
import pytest

from quire.errors import InvalidRequestError, QuireError
from quire.grammar.compilation import COMPILE_TIMEOUT, NUM_COMPILERS, FairQueue
from quire.grammar.interface import SlowGrammarError
from quire.grammar.manager import GrammarManager
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.step import NO_TOKEN, CachedRequestData, ChosenTokens, SchedulerOutput
from quire.structured_outputs import StructuredOutputsParams

EOS = 0
VOCAB = 256


class SpellingGrammar:
    """Allows the characters of one word in turn, then the end of the sequence, again and again."""

    def __init__(self, word: str) -> None:
        self.word = [*map(ord, word)]
        self.place = 0

    @property
    def num_bytes(self):
        if self.word == [*map(ord, "unmeasured")]:
            raise RuntimeError("a fault of the backend")
        return 100 * len(self.word)

    def _next(self) -> int:
        return self.word[self.place] if self.place < len(self.word) else EOS

    def accept(self, token_ids):
        if token_ids and token_ids[0] == ord("!"):
            raise InvalidRequestError("too complex")
        count = self.num_valid(token_ids)
        if count < len(token_ids):
            return False
        self.place += count
        return True

    def rollback(self, num_tokens):
        self.place -= num_tokens

    def num_valid(self, token_ids):
        rest = [*self.word, *[EOS] * len(token_ids)][self.place :]
        return next((i for i, token in enumerate(token_ids) if token != rest[i]), len(token_ids))

    def fill_bitmask(self, row):
        if self.word[self.place : self.place + 1] == [ord("?")]:
            raise RuntimeError("a fault of the backend")
        row[:] = 0
        row.view(np.uint32)[self._next() // 32] = 1 << self._next() % 32

    def copy(self):
        other = SpellingGrammar("".join(map(chr, self.word)))
        other.place = self.place
        return other


class GatedBackend:
    """Compiles a word when its gate is open; words without a gate at once."""

    vocab_size = VOCAB

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.entered: dict[str, threading.Event] = {}
        self.compiled: list[str] = []
        self.slow: set[str] = set()  # being compiled slowly, or have been
        self.made: list[weakref.ref[SpellingGrammar]] = []

    def gate(self, word: str) -> threading.Event:
        self.entered[word] = threading.Event()
        return self.gates.setdefault(word, threading.Event())

    def compile(self, spec):
        word = spec.regex
        if word in self.gates:
            self.entered[word].set()
            assert self.gates[word].wait(30)
        self.compiled.append(word)
        if word.startswith("slow") and word not in self.slow:
            raise SlowGrammarError
        if word == "bad":
            raise InvalidRequestError("the word is bad")
        if word == "crash":
            raise ZeroDivisionError("no")
        grammar = SpellingGrammar(word)
        self.made.append(weakref.ref(grammar))
        return grammar

    def compile_slowly(self, spec):
        self.slow.add(spec.regex)
        return self.compile(spec)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def backend():
    backend = GatedBackend()
    yield backend
    for gate in backend.gates.values():
        gate.set()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def grammars(backend, clock):
    grammars = GrammarManager(backend, clock=clock)
    yield grammars
    grammars.shutdown()


def request(request_id: str, word: str, output: str = "", tenant: str = "") -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=word))
    made = Request(request_id, [1], params, tenant=tenant)
    made.output_token_ids = [*map(ord, output)]
    return made


def reported(grammars: GrammarManager, count: int) -> dict[str, str | None]:
    """Ask, as a step loop does, until `count` requests were reported; pytest's timeout is the limit."""
    found: dict[str, str | None] = {}
    while len(found) < count:
        ended = grammars.take_compiled()
        found.update({name: None if error is None else str(error) for name, error in ended})
    return found


def live(grammars: GrammarManager, **words: str) -> None:
    """Give requests their grammars."""
    for request_id, word in words.items():
        grammars.start(request(request_id, word))
    assert reported(grammars, len(words)) == dict.fromkeys(words)


def plan(drafts: dict[str, str], chunked: tuple[str, ...] = ()) -> SchedulerOutput:
    """A step of these requests and drafts; those of `chunked` do not reach their last known token."""
    ids = list(drafts)
    width = max(map(len, drafts.values()), default=0)
    num_drafts = np.array([len(text) for text in drafts.values()], dtype=np.int32)
    none = np.zeros(0, dtype=np.int32)
    return SchedulerOutput(
        step=0,
        request_ids=ids,
        slots=np.arange(len(ids), dtype=np.int32),
        num_tokens=np.array([1 if id_ in chunked else 1 + len(drafts[id_]) for id_ in ids], dtype=np.int32),
        num_computed_tokens=np.array([0 if id_ in chunked else 4 for id_ in ids], dtype=np.int32),
        num_known_tokens=np.full(len(ids), 5, dtype=np.int32),
        draft_token_ids=np.array(
            [[*map(ord, text), *[NO_TOKEN] * (width - len(text))] for text in drafts.values()], dtype=np.int32
        ).reshape(len(num_drafts), width),
        finished_req_ids=[],
        preempted_req_ids=[],
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(none, none, none.reshape(1, 0), []),
        forks=[],
        chosen_tokens=ChosenTokens(none, none),
        block_copies=none.reshape(0, 2, 1),
    )


def allowed(row) -> str:
    """The tokens of a bitmask row as characters, the end as $; * for all."""
    bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    return "*" if len(bits) == VOCAB else "".join("$" if token == EOS else chr(token) for token in bits)


def masks(grammars: GrammarManager, step: SchedulerOutput) -> dict[str, list[str]]:
    output = grammars.bitmask(step)
    if output is None:
        return {}
    assert output.bitmask.dtype == np.int32
    assert output.bitmask.shape == (output.num_rows.sum(), VOCAB // 32)
    rows = np.split(output.bitmask, np.cumsum(output.num_rows)[:-1])
    return {id_: [*map(allowed, block)] for id_, block in zip(output.request_ids, rows, strict=True)}


def test_without_a_backend_a_structured_request_is_refused():
    with pytest.raises(InvalidRequestError, match="no grammar backend") as caught:
        GrammarManager(None).start(request("a", "word"))
    assert caught.value.param == "structured_outputs"


def test_a_compilation_is_reported_once_and_when_it_has_ended(grammars, backend):
    gate = backend.gate("word")
    grammars.start(request("a", "word"))
    assert backend.entered["word"].wait(30)
    assert grammars.take_compiled() == []
    assert "a" in grammars
    assert grammars.num_compiling == 1
    gate.set()
    assert reported(grammars, 1) == {"a": None}
    assert "a" in grammars
    assert grammars.num_compiling == 0
    assert grammars.take_compiled() == []


@pytest.mark.parametrize(("word", "error"), [("bad", "the word is bad"), ("crash", "ZeroDivisionError: no")])
def test_a_bad_grammar_is_the_error_of_its_requests_alone(grammars, word, error):
    grammars.start(request("bad", word))
    grammars.start(request("good", "word"))
    found = reported(grammars, 2)
    assert found.pop("good") is None
    assert error in found["bad"]
    assert "bad" not in grammars


def test_equal_specifications_share_a_compilation_but_not_a_place(grammars, backend):
    gate = backend.gate("word")
    for request_id in ("a", "b"):
        grammars.start(request(request_id, "word"))
    gate.set()
    assert reported(grammars, 2) == {"a": None, "b": None}
    grammars.start(request("c", "word"))  # from the cache
    assert grammars.num_compiling == 1
    assert grammars.take_compiled() == [("c", None)]
    assert backend.compiled == ["word"]
    assert grammars.accept("a", [ord("w")])
    assert masks(grammars, plan({"a": "", "b": "", "c": ""})) == {"a": ["o"], "b": ["w"], "c": ["w"]}


def test_the_cache_keeps_the_grammars_used_last(backend, clock):
    grammars = GrammarManager(backend, clock=clock, max_cache_bytes=1000)
    words = [f"w{number}" for number in range(4)]  # of 200 bytes; "new" has 300
    for word in words:
        grammars.start(request(word, word))
        reported(grammars, 1)
    grammars.start(request("used", "w0"))
    grammars.start(request("new", "new"))
    assert reported(grammars, 2) == {"used": None, "new": None}
    for request_id, word in (("again", "w0"), ("gone", "w1")):
        grammars.start(request(request_id, word))
        assert reported(grammars, 1) == {request_id: None}
    assert backend.compiled == [*words, "new", "w1"]
    grammars.shutdown()


@pytest.mark.parametrize(("max_cache_bytes", "num_compiled"), [(0, 2), (399, 2), (400, 1)])
def test_a_grammar_that_does_not_fit_is_not_kept(backend, clock, max_cache_bytes, num_compiled):
    grammars = GrammarManager(backend, clock=clock, max_cache_bytes=max_cache_bytes)
    for request_id in ("a", "b"):
        grammars.start(request(request_id, "word"))
        assert reported(grammars, 1) == {request_id: None}
    assert len(backend.compiled) == num_compiled
    grammars.shutdown()


def test_a_grammar_whose_size_cannot_be_had_is_an_error(grammars):
    grammars.start(request("a", "unmeasured"))
    assert "a fault of the backend" in reported(grammars, 1)["a"]
    live(grammars, b="ab")


def test_a_request_forgotten_while_it_compiles_leaves_nothing(grammars, backend):
    gate = backend.gate("word")
    grammars.start(request("a", "word"))
    assert backend.entered["word"].wait(30)
    grammars.forget("a")
    grammars.forget("a")
    assert "a" not in grammars
    assert grammars.num_compiling == 0
    grammars.start(request("b", "word"))  # joins what is still running
    gate.set()
    assert reported(grammars, 1) == {"b": None}
    assert backend.compiled == ["word"]
    grammars.forget("b")
    assert "b" not in grammars
    grammars.shutdown()
    gc.collect()
    assert [ref() for ref in backend.made] == [None]


def test_a_request_forgotten_before_it_compiles_is_never_compiled(grammars, backend):
    gates = [backend.gate(f"busy{number}") for number in range(NUM_COMPILERS)]
    for number in range(NUM_COMPILERS):
        grammars.start(request(f"busy{number}", f"busy{number}"))
        assert backend.entered[f"busy{number}"].wait(30)
    grammars.start(request("a", "word"))
    grammars.forget("a")
    grammars.start(request("b", "other"))
    for gate in gates:
        gate.set()
    assert set(reported(grammars, NUM_COMPILERS + 1)) == {"b", *(f"busy{n}" for n in range(NUM_COMPILERS))}
    assert "word" not in backend.compiled


def test_a_request_forgotten_when_it_is_ready_is_not_reported(grammars):
    live(grammars, a="word")
    grammars.start(request("b", "word"))
    grammars.forget("b")
    assert grammars.take_compiled() == []
    assert "b" not in grammars


def test_a_compilation_may_take_so_long_and_no_longer(grammars, backend, clock):
    gate = backend.gate("word")
    grammars.start(request("a", "word"))
    clock.now = 1.0
    grammars.start(request("b", "word"))
    clock.now = COMPILE_TIMEOUT - 0.1
    assert grammars.take_compiled() == []
    clock.now = COMPILE_TIMEOUT + 0.1
    [(request_id, error)] = grammars.take_compiled()
    assert request_id == "a"
    assert f"{COMPILE_TIMEOUT:g} s" in str(error)
    assert "a" not in grammars
    gate.set()
    assert reported(grammars, 1) == {"b": None}


class ByHand(Executor):
    """Runs what was submitted when told to."""

    def __init__(self) -> None:
        self.pending = []

    def submit(self, function, /, *arguments, **options):
        self.pending.append((Future(), function, arguments))
        return self.pending[-1][0]

    def run(self) -> None:
        pending, self.pending = self.pending, []
        for future, function, arguments in pending:
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)


def test_compilations_run_where_they_are_told_to(backend, clock):
    executor = ByHand()
    grammars = GrammarManager(backend, clock=clock, executor=executor)
    grammars.start(request("a", "word"))
    assert grammars.take_compiled() == []
    executor.run()
    assert grammars.take_compiled() == [("a", None)]
    grammars.shutdown()


def test_a_compilation_that_cannot_begin_is_an_error(backend, clock):
    executor = ByHand()
    executor.submit = lambda *_: 1 // 0
    grammars = GrammarManager(backend, clock=clock, executor=executor)
    grammars.start(request("a", "word"))
    [(request_id, error)] = grammars.take_compiled()
    assert request_id == "a"
    assert "ZeroDivisionError" in str(error)
    assert not isinstance(error, InvalidRequestError), "the request is not at fault"


def test_slow_grammars_wait_for_each_other_only(backend, clock):
    executor = ByHand()
    grammars = GrammarManager(backend, clock=clock, executor=executor)
    for number in range(40):
        grammars.start(request(f"slow{number}", f"slow{number}", tenant="a"))
    grammars.start(request("quick", "quick", tenant="a"))
    ended: list[str] = []
    while not ended:
        executor.run()
        ended += [request_id for request_id, _ in grammars.take_compiled()]
    assert ended[0] == "quick"
    assert len(ended) <= 2
    grammars.start(request("other", "slow40", tenant="b"))
    grammars.forget("slow3")
    while len(ended) < 41:
        executor.run()
        assert len(backend.slow) <= len(ended)  # one at a time; the quick one was not slow
        ended += [request_id for request_id, _ in grammars.take_compiled()]
    assert ended.index("other") < 6
    assert "slow3" not in backend.slow
    assert grammars.num_compiling == 0
    grammars.shutdown()


def test_tenants_take_turns(backend, clock):
    executor = ByHand()
    grammars = GrammarManager(backend, clock=clock, executor=executor)
    for number in range(40):
        grammars.start(request(f"many{number}", f"many{number}", tenant="many"))
    grammars.start(request("one", "one", tenant="one"))
    grammars.start(request("shared", "many30", tenant="other"))
    ended: list[str] = []
    while len(ended) < 42:
        executor.run()
        ended += [request_id for request_id, _ in grammars.take_compiled()]
    first = [name for name in ended if name not in {"one", "shared", "many30"}]
    assert first == [f"many{number}" for number in range(40) if number != 30]
    assert ended.index("one") <= NUM_COMPILERS + 3
    assert ended.index("shared") <= NUM_COMPILERS + 3
    assert ended.index("many30") <= NUM_COMPILERS + 3
    grammars.shutdown()


def test_small_grammars_do_not_wait_behind_many_large_ones_of_their_tenant(backend, clock):
    executor = ByHand()
    grammars = GrammarManager(backend, clock=clock, executor=executor)
    for number in range(40):
        grammars.start(request(f"large{number}", f"large{number}", tenant="a"))
    for number in range(20):
        grammars.start(request(f"s{number}", f"s{number}", tenant="a"))
    ended: list[str] = []
    while len(ended) < 60:
        executor.run()
        ended += [request_id for request_id, _ in grammars.take_compiled()]
    large = [name for name in ended if name.startswith("large")]
    assert ended.index("s0") <= NUM_COMPILERS + 1
    assert ended.index("s19") <= NUM_COMPILERS + 2 * 20
    assert ended.index("large9") <= NUM_COMPILERS + 2 * 10  # nor do the large ones wait for all small ones
    assert large == [f"large{number}" for number in range(40)]
    grammars.shutdown()


def test_a_specification_that_comes_back_is_queued_once():
    queue = FairQueue()
    small, large = (StructuredOutputsParams(regex=regex) for regex in ("a", "aaa"))
    for spec in (large, small):
        queue.push("a", spec)
        queue.push("b", spec)
    queue.remove(small)
    queue.push("a", small)
    assert [queue.pop() for _ in range(3)] == [small, large, None]


def test_shutdown_does_not_wait_for_what_compiles(grammars, backend):
    backend.gate("word")
    grammars.start(request("a", "word"))
    assert backend.entered["word"].wait(30)
    grammars.start(request("b", "other"))
    grammars.shutdown()
    assert "a" not in grammars
    assert grammars.num_compiling == 0
    assert grammars.take_compiled() == []


def test_a_request_that_goes_on_from_elsewhere_starts_behind_its_output(grammars):
    grammars.start(request("a", "word", output="wo"))
    grammars.start(request("b", "word", output="wx"))
    found = reported(grammars, 2)
    assert found["a"] is None
    assert "do not follow" in found["b"]
    assert "b" not in grammars
    assert masks(grammars, plan({"a": ""})) == {"a": ["r"]}


def test_tokens_are_followed_to_the_end_and_behind_it(grammars):
    live(grammars, a="ab")
    assert grammars.accept("a", [*map(ord, "ab")])
    assert masks(grammars, plan({"a": ""})) == {"a": ["$"]}
    assert grammars.accept("a", [EOS])
    assert grammars.accept("a", [])
    assert masks(grammars, plan({"a": ""})) == {"a": ["$"]}
    assert grammars.error("a") is None


def test_a_token_that_is_not_allowed_ends_the_following(grammars):
    live(grammars, a="ab", b="ab")
    assert not grammars.accept("a", [ord("x")])
    assert "[120]" in str(grammars.error("a"))
    assert not grammars.accept("a", [ord("a")])
    assert grammars.valid_drafts("a", [ord("a")]) == []
    assert masks(grammars, plan({"a": "a", "b": "a"})) == {"a": ["*", "*"], "b": ["a", "b"]}


def test_a_grammar_that_fails_in_the_middle_fails_its_request_alone(grammars):
    live(grammars, a="a?", b="ab", c="ab")
    assert grammars.accept("a", [ord("a")])
    assert masks(grammars, plan({"a": "", "b": "a"})) == {"a": ["*"], "b": ["a", "b"]}
    assert "a fault of the backend" in str(grammars.error("a"))
    assert not grammars.accept("a", [ord("?")])
    assert not grammars.accept("c", [ord("!")])
    assert str(grammars.error("c")) == "too complex"
    kinds = [type(grammars.error(name)) for name in "ac"]
    assert kinds == [QuireError, InvalidRequestError], "only what the backend refuses is the client's fault"
    assert grammars.error("b") is None


def test_masks_are_for_the_places_where_a_structured_request_samples(grammars):
    live(grammars, a="abc", b="xy", c="word")
    step = plan({"plain": "zz", "a": "ab", "c": "", "b": ""}, chunked=("c",))
    assert masks(grammars, step) == {"a": ["a", "b", "c"], "b": ["x"]}
    assert masks(grammars, step) == {"a": ["a", "b", "c"], "b": ["x"]}  # nothing was accepted for good
    assert grammars.bitmask(plan({"plain": ""})) is None
    assert grammars.bitmask(plan({"c": ""}, chunked=("c",))) is None


def test_behind_a_wrong_draft_nothing_is_forbidden(grammars):
    live(grammars, a="abc")
    assert masks(grammars, plan({"a": "axc"})) == {"a": ["a", "b", "*", "*"]}
    assert masks(grammars, plan({"a": "abc"})) == {"a": ["a", "b", "c", "$"]}


def test_drafts_are_cut_where_they_leave_the_grammar(grammars):
    live(grammars, a="abc")
    drafts = [*map(ord, "abx")]
    assert grammars.valid_drafts("a", drafts) == drafts[:2]
    assert grammars.valid_drafts("a", drafts[2:]) == []
    assert masks(grammars, plan({"a": ""})) == {"a": ["a"]}


def test_a_request_without_a_grammar_may_have_any_token(grammars):
    assert grammars.accept("plain", [1, 2])
    assert grammars.error("plain") is None
    assert grammars.valid_drafts("plain", [1, 2]) == [1, 2]
    assert "plain" not in grammars
    assert grammars.bitmask(plan({"plain": ""})) is None
