"""Limits of tenants: buckets against a naive model, places of sequences, and what clients are told."""

from __future__ import annotations

import asyncio
import random
from fractions import Fraction
from types import SimpleNamespace

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import SamplingParams
from quire.config import ServerConfig, TenantConfig
from quire.errors import ConfigError, InvalidRequestError
from quire.server.app import create_app
from quire.server.tenancy.limits import TenantUsage, TokenBucket
from quire.server.wire.errors import ApiError

TENANTS = """
[tenants.alice]
keys = ["alice-key"]
requests_per_minute = 6
tokens_per_minute = 100

[tenants.bob]
keys = ["bob-key"]
max_running_seqs = 2
max_queued_seqs = 3

[tenants.dave]
keys = ["dave-key"]
tokens_per_minute = 320

[tenants.carol]
keys = ["carol-key"]
max_pending_grammars = 1
"""


FINISHED = SimpleNamespace(finished=True, outputs=[SimpleNamespace(token_ids=[0])])


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@settings(max_examples=200)
@given(
    size=st.integers(1, 50),
    calls=st.lists(
        st.tuples(st.sampled_from(["take", "back", "wait", "resize"]), st.integers(0, 60)), max_size=40
    ),
)
def test_a_bucket_is_its_size_plus_what_flowed_in_less_what_was_taken(size, calls):
    clock = Clock()
    bucket, level = TokenBucket(size, clock), Fraction(size)
    for call, number in calls:
        if call == "take":
            wait = bucket.seconds_until(min(number, size))
            assert wait == pytest.approx(float(max(0, min(number, size) - level) * 60 / size), abs=1e-6)
            if number <= level:
                bucket.take(number)
                level -= number
        elif call == "back":
            bucket.put_back(number)
            level = min(Fraction(size), level + number)
        elif call == "wait":
            clock.now += number / 4
            level = min(Fraction(size), level + Fraction(number, 4) * size / 60)
        elif number:
            bucket.resize(number)
            size, level = number, min(Fraction(number), level)
        assert bucket.level == pytest.approx(float(level), abs=1e-6)


def prepared(request_id, params, num_prompt=1):
    core_request = SimpleNamespace(prompt_token_ids=[0] * num_prompt)
    return SimpleNamespace(request_id=request_id, params=params, core_request=core_request)


def params_of(n=1, max_tokens=1):
    return SamplingParams(n=n, max_tokens=max_tokens, temperature=1.0)


@pytest.mark.parametrize("seed", range(25))
async def test_places_are_never_exceeded_and_all_come_back(seed):
    rng = random.Random(seed)
    most_running, most_queued = rng.randint(1, 6), rng.randint(1, 8)
    usage = TenantUsage(
        TenantConfig(
            max_running_seqs=most_running,
            max_queued_seqs=most_queued,
            tokens_per_minute=1000,
            max_pending_grammars=2,
        ),
        Clock(),
    )
    running, started, refused = 0, [], 0

    async def call(number):
        nonlocal running, refused
        n, num_prompts = rng.randint(1, most_running), rng.randint(1, 3)
        try:
            with usage.call(num_prompts, n, 1, has_grammar=rng.random() < 0.2) as one:
                for prompt in range(num_prompts):
                    await one.admit(prepared(f"{number}/{prompt}", params_of(n), 3))
                    running += n
                    started.append(number)
                    try:
                        assert running <= most_running
                        for _ in range(rng.randint(0, 4)):
                            await asyncio.sleep(0)
                    finally:
                        running -= n
                        one.note(f"{number}/{prompt}", FINISHED)
        except (ApiError, InvalidRequestError):
            refused += 1

    tasks = []
    for number in range(30):
        tasks.append(asyncio.create_task(call(number)))
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert started
    with (
        usage.call(1, most_running, 1, has_grammar=True),
        usage.call(1, min(most_queued, most_running), 1, has_grammar=True),
    ):
        pass


@pytest.fixture
async def http(llm, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(TENANTS)
    path.chmod(0o600)
    app = create_app(llm, ServerConfig(api_keys_file=str(path)))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.fixture
def client(http):
    def client(name):
        return openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key=f"{name}-key", http_client=http, max_retries=0
        )

    return client


async def complete(client, prompt="ab", **fields):
    return await client.completions.with_raw_response.create(model="fake", prompt=prompt, **fields)


def left(response, name):
    return int(response.headers[f"x-ratelimit-remaining-{name}"])


async def test_tokens_are_reserved_and_what_is_not_generated_comes_back(client):
    alice = client("alice")
    first = await complete(alice, max_tokens=20)
    assert first.headers["x-ratelimit-limit-tokens"] == "100"
    assert first.headers["x-ratelimit-reset-requests"] == "10s"
    assert left(first, "requests") == 5
    assert left(first, "tokens") == 77  # the prompt has two characters and a beginning
    with pytest.raises(
        openai.RateLimitError, match="of tokens_per_minute 100 are left and the call needs"
    ) as error:
        await complete(alice, max_tokens=90)
    assert int(error.value.response.headers["retry-after"]) in range(1, 61)
    assert error.value.code == "rate_limit_exceeded"
    stopped = await complete(alice, max_tokens=60, stop="quick")
    assert 77 - left(stopped, "tokens") < 20
    with pytest.raises(openai.BadRequestError, match="tokens_per_minute of the tenant 'alice' is 100"):
        await complete(alice, max_tokens=200)


async def test_tokens_for_which_there_is_no_room_are_not_reserved(client):
    dave = client("dave")
    with pytest.raises(openai.BadRequestError, match="needs 402, and tokens_per_minute of the tenant 'dave'"):
        await complete(dave, "x", max_tokens=200, n=2)
    response = await complete(dave, "x" * 200, max_tokens=200, n=2)  # there is room for 55
    assert left(response, "tokens") < 320 - 201


async def test_each_sequence_counts_as_a_request(client):
    alice = client("alice")
    assert left(await complete(alice, ["a", "b"], n=2, max_tokens=1), "requests") == 2
    with pytest.raises(
        openai.RateLimitError, match="2 of requests_per_minute 6 are left and the call needs 3"
    ):
        await complete(alice, n=3, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="requests_per_minute"):
        await complete(alice, ["a", "b", "c", "d"], n=2, max_tokens=1)
    unlimited = await complete(client("bob"), max_tokens=1)
    assert not [name for name in unlimited.headers if name.startswith("x-ratelimit")]


async def test_sequences_wait_for_their_tenants_own_and_beyond_that_are_refused(client, llm):
    bob = client("bob")
    call = asyncio.create_task(complete(bob, ["hold", "hold", "hold"]))
    while len(llm.live) < 2:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(llm.live) == 2
    with pytest.raises(
        openai.RateLimitError, match=r"3 of max_running_seqs [+] max_queued_seqs 5 are in use"
    ):
        await complete(bob, ["a", "b", "c"])
    with pytest.raises(openai.BadRequestError, match="max_running_seqs 2"):
        await complete(bob, n=3)
    with pytest.raises(openai.BadRequestError, match="send smaller calls"):
        await complete(bob, ["a"] * 6)
    await complete(client("carol"), "others go on")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await complete(bob, ["a"] * 5)


async def test_grammars_that_are_being_compiled_are_limited(client, llm):
    carol = client("carol")
    extra = {"structured_outputs": {"regex": "a*"}}
    refused = None
    while refused is None:  # until two of them meet
        calls = (complete(carol, extra_body=extra) for _ in range(2))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert len(errors) < 2
        refused = errors[0] if errors else None
    assert isinstance(refused, openai.RateLimitError)
    assert "1 of max_pending_grammars 1" in str(refused)
    await complete(carol, extra_body=extra)


def test_a_queue_without_a_limit_of_running_sequences_is_a_mistake():
    with pytest.raises(ConfigError, match="set that too"):
        TenantConfig(max_queued_seqs=3)
