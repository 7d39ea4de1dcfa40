"""All figures of a server against the answers that it gave: a random mix of calls through every API."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import preloaded
from quire import AsyncLLM, EngineConfig
from quire.config import SchedulerConfig, ServerConfig
from quire.server.app import create_app

pytestmark = pytest.mark.processes

BLOCK = 16
NAME = "mini"


async def served(num_kv_blocks: int, work) -> None:
    """Run `work` with a client of a server whose cache has so many blocks."""
    scheduler = SchedulerConfig(num_kv_blocks=num_kv_blocks, max_num_seqs=8, block_size=BLOCK)
    with preloaded.engines():
        llm = AsyncLLM(EngineConfig(num_threads=1, scheduler=scheduler))
    try:
        await llm.wait_until_ready()
        transport = httpx.ASGITransport(app=create_app(llm, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            await work(http)
    finally:
        await llm.shutdown()


async def metrics_of(http) -> dict[str, float]:
    text = (await http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return {
        one.name + (f":{one.labels['reason']}" if "reason" in one.labels else ""): one.value
        for family in families
        for one in family.samples
        if family.name.startswith("quire_") and "le" not in one.labels and "route" not in one.labels
    }


def draw_completion(rng: random.Random) -> dict:
    body: dict = {"max_tokens": rng.randint(1, 60), "temperature": 1, "seed": rng.randrange(1000)}
    length = lambda: rng.choice([1, 15, 16, 17, 33, 60])  # noqa: E731
    pool = [list(range(10, 80)), list(range(200, 270))]
    prompts = [rng.choice(pool)[: length()] for _ in range(rng.choice([1, 1, 1, 3]))]
    body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
    match rng.choice(["plain", "plain", "n", "best_of", "beams", "echo", "scored", "stop"]):
        case "n":
            body["n"] = rng.randint(2, 4)
        case "best_of":
            body |= {"n": 2, "best_of": 3}
        case "beams":
            body |= {"use_beam_search": True, "beam_width": 3, "n": 2, "temperature": 0, "max_tokens": 4}
        case "echo":
            body["echo"] = True
        case "scored":
            body |= {"echo": True, "max_tokens": 0, "logprobs": 1}
        case "stop":
            body["stop"] = ["e", " a"]
    if rng.random() < 0.4 and "best_of" not in body and "use_beam_search" not in body:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def usage_in_stream(text: str) -> dict:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return events[-1]["usage"]


class Seen:
    """What the answers say altogether."""

    def __init__(self) -> None:
        self.sums: Counter = Counter()

    def note(self, prompt: int, cached: int, generated: int, *, requests: int, sequences: int) -> None:
        assert 0 <= cached < prompt
        self.sums.update(
            prompt=prompt, cached=cached, generated=generated, requests=requests, sequences=sequences
        )


async def call_completions(http, rng: random.Random, seen: Seen) -> None:
    body = draw_completion(rng)
    num_prompts = len(body["prompt"]) if isinstance(body["prompt"][0], list) else 1
    answer = await http.post("/v1/completions", json={"model": NAME, **body})
    assert answer.status_code == 200, answer.text
    usage = usage_in_stream(answer.text) if body.get("stream") else answer.json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if body["max_tokens"] == 0:
        assert usage["completion_tokens"] == 0
        seen.sums["not looked up"] += usage["prompt_tokens"]
    seen.sums["scored"] += num_prompts if body["max_tokens"] == 0 else 0
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    sequences = num_prompts * body.get("n", 1)
    seen.note(
        usage["prompt_tokens"], cached, usage["completion_tokens"], requests=num_prompts, sequences=sequences
    )


async def call_chat(http, rng: random.Random, seen: Seen) -> None:
    kind = rng.choice(["chat", "messages", "ollama", "responses"])
    messages = [{"role": "user", "content": rng.choice("abc") * rng.choice([1, 40, 90])}]
    n = 1
    if kind == "chat":
        n = rng.randint(1, 3)
        body = {"model": NAME, "messages": messages, "n": n, "max_tokens": rng.randint(1, 12)}
        usage = (await http.post("/v1/chat/completions", json=body)).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        figures = usage["prompt_tokens"], cached, usage["completion_tokens"]
    elif kind == "messages":
        body = {"model": NAME, "messages": messages, "max_tokens": rng.randint(1, 12)}
        usage = (await http.post("/v1/messages", json=body)).json()["usage"]
        cached = usage["cache_read_input_tokens"]
        figures = usage["input_tokens"] + cached, cached, usage["output_tokens"]
    elif kind == "responses":
        body = {"model": NAME, "input": messages, "max_output_tokens": rng.randint(1, 12)}
        usage = (await http.post("/v1/responses", json=body)).json()["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        figures = usage["input_tokens"], cached, usage["output_tokens"]
    else:
        options = {"num_predict": rng.randint(1, 12)}
        body = {"model": NAME, "messages": messages, "stream": False, "options": options}
        answer = (await http.post("/api/chat", json=body)).json()
        figures = answer["prompt_eval_count"], 0, answer["eval_count"]
        seen.sums["prompt of unknown"] += figures[0]  # how much of it was cached is not told
    seen.note(*figures, requests=1, sequences=n)


@pytest.mark.parametrize(("seed", "num_kv_blocks"), [(1, 400), (2, 16)])
async def test_sums_of_the_answers_are_the_counters(seed, num_kv_blocks):
    async def work(http):
        rng, seen = random.Random(seed), Seen()
        calls = [call_completions, call_completions, call_chat]
        for _ in range(3):
            await asyncio.gather(*(rng.choice(calls)(http, rng, seen) for _ in range(12)))
        await asyncio.gather(*(call_at_length(http, 10 + number, seen) for number in range(8)))
        before = await metrics_of(http)
        check(before, seen.sums)
        assert (before["quire_preemptions_total"] > 0) == (num_kv_blocks < 100)
        await abandon_a_call(http)
        after = await metrics_of(http)
        assert after["quire_requests_finished_total:abort"] == 3
        assert after["quire_prompt_tokens_total"] == before["quire_prompt_tokens_total"]

    await served(num_kv_blocks, work)


async def call_at_length(http, token_id: int, seen: Seen) -> None:
    """Generate what takes four blocks: eight of them do not fit into sixteen."""
    body = {"model": NAME, "prompt": [token_id], "max_tokens": 60, "ignore_eos": True}
    usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    assert usage["completion_tokens"] == 60
    seen.note(1, 0, 60, requests=1, sequences=1)


async def abandon_a_call(http) -> None:
    """Send a call of three sequences, and leave before it has ended."""
    body = {"model": NAME, "prompt": "abc", "n": 3, "max_tokens": 300, "ignore_eos": True}
    call = asyncio.create_task(http.post("/v1/completions", json=body))
    while (await http.get("/v1/requests")).json()["data"] == []:
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


def check(values: dict[str, float], sums: Counter) -> None:
    answered = {"quire_requests_finished_total:stop", "quire_requests_finished_total:length"}
    ended = {
        name: value for name, value in values.items() if name.startswith("quire_requests_finished_total")
    }
    assert sum(ended[name] for name in answered) == sum(ended.values()) == sums["sequences"]
    assert values["quire_prompt_tokens_total"] == sums["prompt"]
    assert values["quire_generation_tokens_total"] == sums["generated"]
    of_requests = ("time_to_first_token", "queue_time", "prefill_time", "decode_time", "inference_time")
    for name in of_requests:
        assert values[f"quire_{name}_seconds_count"] == sums["requests"] - sums["scored"], name
    assert values["quire_request_duration_seconds_count"] == sums["requests"]
    assert values["quire_request_prompt_tokens_count"] == sums["requests"]
    assert values["quire_request_prompt_tokens_sum"] == sums["prompt"]
    assert values["quire_request_generation_tokens_count"] == sums["sequences"]
    assert values["quire_request_generation_tokens_sum"] == sums["generated"]
    num_speaking = sums["sequences"] - sums["scored"]
    assert values["quire_inter_token_latency_seconds_count"] <= sums["generated"] - num_speaking
    assert values["quire_time_per_output_token_seconds_count"] <= num_speaking
    assert values["quire_prefix_cache_queried_tokens_total"] == sums["prompt"] - sums["not looked up"]
    unknown = values["quire_prefix_cache_hit_tokens_total"] - sums["cached"]
    assert 0 <= unknown < max(1, sums["prompt of unknown"])
    for gauge in ("requests_running", "requests_waiting", "requests_awaiting", "kv_cache_usage_ratio"):
        assert values[f"quire_{gauge}"] == 0, gauge


async def test_cached_tokens_are_what_a_naive_cache_holds():
    async def work(http):
        rng = random.Random(5)
        held: set[tuple[int, ...]] = set()  # sequences of full blocks, from their start
        known: list[list[int]] = [[rng.randrange(10, 200) for _ in range(70)]]
        for _ in range(40):
            prompt = rng.choice(known)[: rng.randint(1, 90)] + [
                rng.randrange(10, 200) for _ in range(rng.randint(0, 30))
            ]
            n = rng.choice([1, 1, 2, 4])
            body = {"model": NAME, "prompt": prompt, "n": n, "max_tokens": rng.randint(1, 40), "seed": 1}
            answer = (await http.post("/v1/completions", json={**body, "return_token_ids": True})).json()
            lengths = range(BLOCK, len(prompt), BLOCK)
            expected = max((length for length in lengths if tuple(prompt[:length]) in held), default=0)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
            for choice in answer["choices"]:
                tokens = [*prompt, *choice["token_ids"]]
                known.append(tokens)
                # The last token is not computed any more.
                held |= {tuple(tokens[:length]) for length in range(BLOCK, len(tokens), BLOCK)}

    await served(400, work)
