"""What the scheduler can do, asked for through `LLM` on the built-in model, with all parts in place."""

from __future__ import annotations

import json
import re

import pytest

from engine_checks import check_after_every_step, core_of
from quire import LLM, SamplingParams
from quire.engine.kv_events import KVEventSubscriber
from quire.execution.drafts.adaptive_proposer import RowCost
from quire.front.text.input_processor import derived_seed
from quire.kv.blocks.events import AllBlocksCleared, BlockRemoved, BlockStored
from quire.recording.replay import replay
from quire.status import FinishReason
from quire.structured_outputs import StructuredOutputsParams

pytestmark = pytest.mark.usefixtures("preloaded_engines")

SMALL = {"num_kv_blocks": 256, "num_threads": 1}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def greedy(max_tokens: int = 24, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)


def structured(max_tokens: int = 200, **grammar) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, seed=3, structured_outputs=StructuredOutputsParams(**grammar)
    )


COPY = "copy: b c d b c d b c d b c d b c d"
BATCH = [
    ("What is a KV block?", greedy()),
    (COPY, greedy()),
    (COPY, SamplingParams(max_tokens=16, seed=7, n=3)),
    ("Who is it?", structured(json=SCHEMA)),
    ("A date: ", structured(regex=r"20[0-9]{2}-[01][0-9]-[0-3][0-9]")),
    ("Which color?", structured(choice=("red", "green", "blue"))),
    ("The cache", SamplingParams(max_tokens=12, beam_width=3, n=2)),
    ("The cache", SamplingParams(max_tokens=12, seed=1, best_of=4, n=2)),
    (COPY * 8, greedy()),
]


def tokens(outputs) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def run_batch(llm: LLM, num_times: int = 1) -> list[list[list[int]]]:
    prompts, params = zip(*BATCH * num_times, strict=True)
    outputs = llm.generate(list(prompts), list(params))
    assert all(one.finish_reason in ("stop", "length") for output in outputs for one in output.outputs)
    return tokens(outputs)


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    with LLM("mini", **SMALL) as llm:
        return run_batch(llm)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    "options",
    [
        {"speculative_method": "ngram"},
        {"speculative_method": "suffix", "ngram_min": 1},
        {"speculative_method": "draft-model", "draft_model": "mini"},
        {"overlap_steps": True},
        {"overlap_steps": True, "speculative_method": "ngram", "max_num_batched_tokens": 48},
        {"kv_tier": "memory", "num_kv_blocks": 64},
        {"kv_tier": "memory", "num_kv_blocks": 64, "overlap_steps": True, "speculative_method": "ngram"},
        {"num_kv_blocks": 0},
        {"dynamic_split_fuse": False, "policy": "longest-prefix", "admission": "past-future"},
        {"enable_prefix_caching": False, "max_num_seqs": 4, "victim": "fewest-computed", "policy": "fair"},
    ],
    ids="+".join,
)
def test_no_option_changes_a_token(expected, options, monkeypatch):
    monkeypatch.setattr(RowCost, "of_draft", lambda cost, num_requests: 0.1)  # is measured in time
    with LLM("mini", **{**SMALL, **options}) as llm:
        check_after_every_step(core_of(llm))
        assert run_batch(llm, num_times=2) == expected * 2
        stats = llm.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert (stats.num_accepted_tokens > 0) == ("speculative_method" in options)
        assert stats.num_accepted_tokens <= stats.num_draft_tokens


def test_drafts_from_earlier_outputs_are_of_the_same_tenant_and_salt(expected, monkeypatch):
    monkeypatch.setattr(RowCost, "of_draft", lambda cost, num_requests: 0.1)
    with LLM("mini", **SMALL, speculative_method="suffix", ngram_min=1) as llm:

        def num_accepted(**options):
            before = llm.stats().num_accepted_tokens
            assert tokens(llm.generate(BATCH[0][0], BATCH[0][1], **options)) == expected[:1]
            return llm.stats().num_accepted_tokens - before

        first = num_accepted(tenant="a", cache_salt="b")
        for options in ({"tenant": "a"}, {"cache_salt": "b"}, {"tenant": "ab"}, {}):
            assert num_accepted(**options) <= first
        assert num_accepted(tenant="a", cache_salt="b") > first


@pytest.fixture(scope="module")
def llm():
    with LLM("mini", **SMALL) as llm:
        check_after_every_step(core_of(llm))
        yield llm


def test_outputs_follow_their_grammars(llm):
    outputs = llm.generate(
        ["Who is it?", "A date: ", "Which color?"],
        [
            structured(json=SCHEMA),
            structured(regex=r"20[0-9]{2}-[01][0-9]-[0-3][0-9]"),
            structured(choice=("red", "green", "blue")),
        ],
    )
    person, date, color = (output.outputs[0].text for output in outputs)
    assert all(output.outputs[0].finish_reason is FinishReason.STOP for output in outputs)
    person = json.loads(person)
    assert set(person) == {"name", "age"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 8
    assert type(person["age"]) is int
    assert person["age"] <= 99
    assert re.fullmatch(r"20[0-9]{2}-[01][0-9]-[0-3][0-9]", date)
    assert color in ("red", "green", "blue")


@pytest.mark.parametrize("grammar", [{"regex": "("}, {"json": {"type": "nothing"}}, {"grammar": "start: ?"}])
def test_a_bad_grammar_fails_its_request_alone(llm, grammar):
    good = ["What is a KV block?", "Which color?"]
    params = [greedy(), structured(choice=("red", "green"))]
    alone = llm.generate(good, params)
    first, failed, last = llm.generate(
        [good[0], "bad", good[1]], [params[0], structured(**grammar), params[1]]
    )
    assert tokens([first, last]) == tokens(alone)
    (completion,) = failed.outputs
    assert (completion.finish_reason, completion.error_type) == (FinishReason.ERROR, "InvalidRequestError")
    assert completion.error
    assert completion.token_ids == []


def test_n_completions_share_the_prompt_and_are_four_requests_of_derived_seeds(llm):
    prompt = list(range(20, 20 + 40 * 16 + 5))
    core = core_of(llm)
    llm.reset_prefix_cache()
    before = core.stats()
    most_in_use = 0
    step = core.step

    def watched_step():
        nonlocal most_in_use
        result = step()
        most_in_use = max(most_in_use, before.num_blocks - core.stats().num_free_blocks)
        return result

    core.step = watched_step
    params = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    (together,) = llm.generate([prompt], SamplingParams(n=4, seed=11, **params))
    core.step = step
    assert most_in_use <= 40 + 4 * 2, "40 shared blocks, and what each has of its own"
    num_computed = core.stats().num_scheduled_tokens - before.num_scheduled_tokens
    assert num_computed <= len(prompt) + 4 * 20, "the prompt is computed once"
    llm.reset_prefix_cache()
    apart = llm.generate(
        [prompt] * 4, [SamplingParams(seed=derived_seed(11, index), **params) for index in range(4)]
    )
    assert [one.token_ids for one in together.outputs] == [one.outputs[0].token_ids for one in apart]
    assert len({tuple(one.token_ids) for one in together.outputs}) == 4


def test_whose_time_is_up_ends_alone_and_keeps_what_it_has():
    options = {**SMALL, "scheduler_cls": "stepped_clock.SecondPerStep", "max_num_seqs": 1}
    with LLM("mini", request_timeout=6, queue_timeout=4, **options) as llm:
        short, long, waiting = llm.generate(
            ["a", "b", "c"], [greedy(1), greedy(40, ignore_eos=True), greedy()]
        )
        assert llm.stats().num_timeouts == 2
        assert short.outputs[0].finish_reason is FinishReason.LENGTH
        assert long.outputs[0].finish_reason is FinishReason.ERROR
        assert long.outputs[0].error_type == "RequestTimeoutError"
        assert "request_timeout" in long.outputs[0].error
        assert 0 < len(long.outputs[0].token_ids) < 6
        assert waiting.outputs[0].token_ids == []
        assert "queue_timeout" in waiting.outputs[0].error
        (kept,) = llm.generate("b", greedy(len(long.outputs[0].token_ids), ignore_eos=True))
        assert kept.outputs[0].token_ids == long.outputs[0].token_ids


class Follower:
    """What a router knows of an engine's cache, from its events alone: tokens and parent of each block."""

    def __init__(self, llm: LLM, endpoint: str, replay_endpoint: str) -> None:
        self.llm = llm
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.subscriber = KVEventSubscriber(endpoint, replay_endpoint)
        number = 0
        while not (batches := self.subscriber.receive(0.02)):  # until the subscription has taken hold
            number += 1
            llm.generate([[number] * 17], greedy(1))
        self.apply(batches)

    def apply(self, batches) -> None:
        for event in (event for batch in batches for event in batch.events):
            match event:
                case BlockStored(parent_block_hash=parent, token_ids=token_ids, block_size=size):
                    for place, name in enumerate(event.block_hashes):
                        self.blocks[name] = (parent, token_ids[place * size : (place + 1) * size])
                        parent = name
                case BlockRemoved():
                    for name in event.block_hashes:
                        del self.blocks[name]
                case AllBlocksCleared():
                    self.blocks.clear()

    def follow(self, is_there) -> None:
        while not is_there():
            batches = self.subscriber.receive(10)
            assert batches, "no event came"
            self.apply(batches)

    def num_held(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt, from its start, are in blocks that the engine holds."""
        parent, num_found = None, 0
        while True:
            wanted = (parent, prompt[num_found : num_found + 16])
            found = [name for name, block in self.blocks.items() if block == wanted]
            if not found:
                return num_found
            (parent,) = found
            num_found += 16


def test_kv_events_say_what_the_engine_holds(tmp_path):
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("live", "replay")]
    options = dict(zip(("kv_events_endpoint", "kv_events_replay_endpoint"), endpoints, strict=True))
    first, second = list(range(100, 100 + 10 * 16 + 3)), list(range(600, 600 + 20 * 16 + 3))
    with LLM("mini", num_threads=1, num_kv_blocks=24, **options) as llm:
        follower = Follower(llm, *endpoints)
        try:
            llm.generate([first], greedy(1))
            follower.follow(lambda: follower.num_held(first) == 10 * 16)
            llm.generate([second], greedy(1))
            follower.follow(lambda: follower.num_held(second) == 20 * 16)
            num_held = follower.num_held(first)
            assert 0 < num_held < 10 * 16, "some had to go"
            (again,) = llm.generate([first], greedy(1))
            assert again.num_cached_tokens == num_held
            assert llm.reset_prefix_cache()
            follower.follow(lambda: not follower.blocks)
        finally:
            follower.subscriber.close()


def test_a_captured_run_is_replayed_exactly(tmp_path, expected):
    path = tmp_path / "run.quire"
    options = {"overlap_steps": True, "speculative_method": "ngram", "kv_tier": "memory"}
    with LLM("mini", record_path=str(path), num_kv_blocks=64, num_threads=1, **options) as llm:
        assert run_batch(llm) == expected
    report = replay(path)
    assert report.difference is None
    assert not report.is_truncated
    assert report.num_requests == 3 + 1 + 1 + 1 + 1 + 1 + 4 + 2


def test_a_cache_of_no_given_size_grows_with_what_is_in_it():
    with LLM("mini", num_threads=1, max_num_seqs=4) as llm:
        pool = core_of(llm).scheduler.accounts.kv.pools.first
        assert pool.num_committed == 0
        llm.generate("short", greedy(1))
        small = pool.num_committed
        llm.generate([list(range(100 + place, 1000 + place)) for place in range(4)], greedy(2))
        assert 0 < small < pool.num_committed <= llm.info.num_blocks
        stats = llm.stats()
        assert stats.num_blocks == stats.num_free_blocks == llm.info.num_blocks
