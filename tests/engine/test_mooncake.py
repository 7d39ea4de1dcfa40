"""Engines that share a Mooncake store: what one computes, others read; no fault of it is a request's."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire.kv.tiers.mooncake.client as mooncake_client
from engine_checks import check_after_every_step, core_of
from insides import always_load, connector_of, tier_of, wait_until_written
from quire import LLM, SamplingParams
from quire.errors import ConfigError

PROMPT = list(range(100, 100 + 20 * 16 + 3))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
FAKE = Path(__file__).parents[1] / "support" / "fake_mooncake"


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """A store's directory: one file for each block."""
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setenv("PYTHONPATH", str(FAKE), prepend=":")
    monkeypatch.setattr(mooncake_client, "CALL_TIMEOUT", 0.5)
    return tmp_path


def open_llm(store: Path | None = None, **options) -> LLM:
    shared = {
        "kv_tier": "mooncake",
        "kv_tier_store": "127.0.0.1:50051",
        "kv_tier_store_metadata": str(store),
        "kv_tier_size": 0.001,
        "kv_tier_min_uses": 1,
    }
    llm = LLM("mini", num_threads=1, num_kv_blocks=64, **(shared if store else {}), **options)
    check_after_every_step(core_of(llm))
    always_load(connector_of(llm))
    return llm


def answer(llm: LLM) -> tuple[list[int], list[float]]:
    [output] = llm.generate([PROMPT], GREEDY)
    [completion] = output.outputs
    return completion.token_ids, [value.logprob for at in completion.logprobs for value in at.values()]


@pytest.fixture(scope="module")
def alone() -> tuple[list[int], list[float]]:
    with open_llm() as llm:
        return answer(llm)


def blocks_of(store: Path) -> list[Path]:
    return sorted(store.glob("quire@*"))


def break_store(store: Path, faults: str) -> None:
    (store / "faults").write_text(faults)


def test_what_one_engine_computes_another_reads(store, alone):
    with open_llm(store) as first, open_llm(store) as second:
        assert answer(first) == alone
        wait_until_written(first)
        assert first.stats().kv_connector.num_written_blocks == 20
        assert answer(second) == alone
        stats = second.stats()
        assert (stats.num_loaded_tokens, stats.num_failed_loads) == (320, 0)
        assert stats.kv_connector.num_written_blocks == 0
    names = {path.name.split("@")[1] for path in blocks_of(store)}
    assert len(blocks_of(store)) == 20
    assert len(names) == 1


def test_the_store_outlives_the_engine_and_what_is_missing_is_computed_and_stored_again(store, alone):
    with open_llm(store) as llm:
        answer(llm)
    for path in blocks_of(store)[::3]:
        path.unlink()
    with open_llm(store) as llm:
        assert answer(llm) == alone
        assert llm.stats().num_failed_loads == 0, "what is not there is not loaded"
        wait_until_written(llm)
        assert len(blocks_of(store)) == 20


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"kv_cache_dtype": "int8"}, {"block_size": 32}], ids=str
)
def test_kv_that_was_computed_otherwise_is_not_found(store, options):
    with open_llm(store) as llm:
        answer(llm)
    with open_llm(store, **options) as llm:
        answer(llm)
        assert llm.stats().num_loaded_tokens == 0
    assert len({path.name.split("@")[1] for path in blocks_of(store)}) == 2


def test_what_was_forgotten_is_not_found_by_others_either(store, alone):
    with open_llm(store) as first, open_llm(store) as second:
        assert first.reset_prefix_cache()
        answer(first)
        wait_until_written(first)
        assert answer(second) == alone
        assert second.stats().num_loaded_tokens == 0


def damage(content: bytes) -> bytes:
    return content[:5000] + b"damage" + content[5006:]


@pytest.mark.parametrize(
    "change",
    [damage, lambda content: content[:-1], lambda content: b"", lambda content: b"\0" * len(content)],
    ids=["damaged", "short", "empty", "zeros"],
)
def test_a_store_that_lies_costs_time_but_changes_no_token(store, alone, change):
    with open_llm(store) as llm:
        answer(llm)
    for path in blocks_of(store):
        path.write_bytes(change(path.read_bytes()))
    with open_llm(store) as llm:
        assert answer(llm) == alone
        assert 1 <= llm.stats().kv_connector.num_failed_reads <= 20
    assert len(blocks_of(store)) < 20, "what is damaged is removed"


def test_blocks_in_each_others_place_are_not_used(store, alone):
    with open_llm(store) as llm:
        answer(llm)
    first, *_, last = blocks_of(store)
    content = first.read_bytes()
    first.write_bytes(last.read_bytes())
    last.write_bytes(content)
    with open_llm(store) as llm:
        assert answer(llm) == alone
        assert llm.stats().kv_connector.num_failed_reads


@pytest.mark.parametrize("fault", ["raise", "hang", "crash", "error", "text", "more", "empty", "huge"])
@pytest.mark.parametrize("operation", ["exist", "get", "put"])
def test_no_fault_of_a_call_is_a_fault_of_a_request(store, alone, operation, fault):
    with open_llm(store) as llm:
        answer(llm)
    if operation == "put":
        for path in blocks_of(store):
            path.unlink()
    with open_llm(store) as llm:
        break_store(store, f"{operation}={fault}")
        assert answer(llm) == alone
        assert answer(llm) == alone
        wait_until_written(llm)
        break_store(store, "")
        assert answer(llm) == alone


@pytest.mark.parametrize("fault", ["raise", "hang", "crash", "error"])
@pytest.mark.parametrize("operation", ["setup", "register_buffer", "unregister_buffer", "close", "remove"])
def test_no_fault_at_the_ends_is_a_fault_of_a_request(store, alone, monkeypatch, operation, fault):
    for module in (mooncake_client, mooncake_client.sys.modules["quire.kv.tiers.mooncake.tier"]):
        monkeypatch.setattr(module, "SETUP_TIMEOUT", 0.5)
    monkeypatch.setattr(mooncake_client, "CLOSE_TIMEOUT", 0.2)
    break_store(store, f"{operation}={fault}")
    with open_llm(store) as llm:
        assert answer(llm) == alone


def test_a_full_store_is_read_and_not_written(store, alone):
    with open_llm(store) as llm:
        answer(llm)
    blocks_of(store)[-1].unlink()
    with open_llm(store) as llm:
        break_store(store, "put=full")
        assert answer(llm) == alone
        wait_until_written(llm)
        tier = tier_of(connector_of(llm))
        assert tier.is_readable
        assert not tier.is_writable
        break_store(store, "")
        tier.refresh()
        assert tier.is_writable


def test_after_a_crash_of_the_client_another_joins(store, alone):
    now = [0.0]
    with open_llm(store) as llm:
        tier = tier_of(connector_of(llm))
        tier._client._clock = lambda: now[0]
        break_store(store, "exist=crash")
        assert answer(llm) == alone
        assert not tier.is_readable
        break_store(store, "")
        now[0] += mooncake_client.MAX_BACKOFF
        tier.refresh()
        tier._searches.call(lambda: None).result(10)
        assert tier.is_readable
        assert llm.reset_prefix_cache()


def test_what_is_missing_or_wrong_is_said(store, monkeypatch):
    with pytest.raises(ConfigError, match=r"kv_tier_store is ''; kv_tier mooncake needs the address"):
        LLM("mini", kv_tier="mooncake")
    with pytest.raises(ConfigError, match="kv_tier_store is 'a:1', but kv_tier is 'disk'"):
        LLM("mini", kv_tier="disk", kv_tier_store="a:1")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[mooncake\]'"):
        open_llm(store)
