"""Engines that share a Mooncake store: what one computes, others read; no fault of it is a request's."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_checks import check_after_every_step, core_of
from insides import always_load, connector_of, wait_until_written
from mooncake_faults import blocks_in, break_store, use_fake_mooncake
from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.kv.tiers import connector as tier_connector
from quire.kv.tiers.mooncake import client as mooncake_client
from quire.kv.tiers.mooncake import tier as mooncake_tier

pytestmark = pytest.mark.processes

PROMPT = list(range(100, 100 + 20 * 16 + 3))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """A store's directory: one file for each block."""
    use_fake_mooncake(monkeypatch)
    monkeypatch.setattr(mooncake_client, "CALL_TIMEOUT", 60.0)  # also on a busy machine
    monkeypatch.setattr(mooncake_client, "SETUP_TIMEOUT", 60.0)
    monkeypatch.setattr(mooncake_tier, "SETUP_TIMEOUT", 60.0)
    monkeypatch.setattr(tier_connector, "SEARCH_PATIENCE", 60.0)
    return tmp_path


def open_llm(store: Path | None = None, **options) -> LLM:
    shared = {
        "kv_tier": "mooncake",
        "kv_tier_store": "127.0.0.1:50051",
        "kv_tier_store_metadata": str(store),
        "kv_tier_size": 0.02,
        "kv_tier_min_uses": 1,
    }
    llm = LLM("mini", num_threads=1, num_kv_blocks=64, **{**(shared if store else {}), **options})
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


@pytest.mark.representative
def test_what_one_engine_computes_another_reads(store, alone):
    with open_llm(store) as first, open_llm(store) as second:
        assert answer(first) == alone
        wait_until_written(first)
        assert first.stats().kv_connector.num_written_blocks == 20
        assert answer(second) == alone
        stats = second.stats()
        assert (stats.num_loaded_tokens, stats.num_failed_loads) == (320, 0)
        assert stats.kv_connector.num_written_blocks == 0
    names = {path.name.split("@")[1] for path in blocks_in(store)}
    assert len(blocks_in(store)) == 20
    assert len(names) == 1


def test_the_store_outlives_the_engine_and_what_is_missing_is_computed_and_stored_again(store, alone):
    with open_llm(store) as llm:
        answer(llm)
    for path in blocks_in(store)[::3]:
        path.unlink()
    with open_llm(store) as llm:
        assert answer(llm) == alone
        assert llm.stats().num_failed_loads == 0, "what is not there is not loaded"
        wait_until_written(llm)
        assert len(blocks_in(store)) == 20


def test_what_follows_a_cached_prefix_is_found(store, alone):
    with open_llm(store, kv_tier_min_uses=2) as second, open_llm(store) as first:
        second.generate([PROMPT[:165]], GREEDY)
        answer(first)
        wait_until_written(first)
        assert answer(second) == alone
        assert second.stats().num_loaded_tokens == 160


@pytest.mark.formats
@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"kv_cache_dtype": "int8"}, {"block_size": 32}], ids=str
)
def test_kv_that_was_computed_otherwise_is_not_found(store, options):
    with open_llm(store) as llm:
        answer(llm)
    with open_llm(store, **options) as llm:
        answer(llm)
        assert llm.stats().num_loaded_tokens == 0
    assert len({path.name.split("@")[1] for path in blocks_in(store)}) == 2


def test_what_was_forgotten_is_not_found_by_others_either(store, alone):
    with open_llm(store) as first, open_llm(store) as second:
        assert first.reset_prefix_cache()
        answer(first)
        wait_until_written(first)
        assert answer(second) == alone
        assert second.stats().num_loaded_tokens == 0


@pytest.mark.representative
def test_a_store_that_lies_costs_time_but_changes_no_token(store, alone):
    with open_llm(store) as llm:
        answer(llm)
    for path in blocks_in(store)[::3]:
        path.write_bytes(path.read_bytes()[:5000] + b"damage" + path.read_bytes()[5006:])
    with open_llm(store) as llm:
        assert answer(llm) == alone
        assert llm.stats().num_loaded_tokens < 320
        assert llm.stats().kv_connector.num_failed_reads
    assert len(blocks_in(store)) < 20, "what is damaged is removed"


@pytest.mark.first_case
@pytest.mark.parametrize(
    "faults", ["get=crash", "get=hang", "exist=hang", "put=raise exist=error", "setup=error"]
)
def test_no_fault_of_the_store_is_a_fault_of_a_request(store, alone, faults, monkeypatch):
    with open_llm(store) as llm:
        answer(llm)
    monkeypatch.setattr(mooncake_client, "CLOSE_TIMEOUT", 0.1)
    if "hang" in faults:
        monkeypatch.setattr(mooncake_client, "CALL_TIMEOUT", 0.2)
        monkeypatch.setattr(tier_connector, "SEARCH_PATIENCE", 0.1)
    is_late = "setup" not in faults
    break_store(store, "" if is_late else faults)
    with open_llm(store) as llm:
        break_store(store, faults)
        assert answer(llm) == alone
        assert llm.stats().num_loaded_tokens < 320
        assert answer(llm) == alone


def test_what_is_missing_or_wrong_is_said(store, monkeypatch):
    with pytest.raises(ConfigError, match=r"kv_tier_store is ''; kv_tier mooncake needs the address"):
        LLM("mini", kv_tier="mooncake")
    with pytest.raises(ConfigError, match="kv_tier_store is 'a:1', but kv_tier is 'disk'"):
        LLM("mini", kv_tier="disk", kv_tier_store="a:1")
    with pytest.raises(ConfigError, match=r"kv_tier_size is 0.001 GB; .* no less than 0\.016778 .* or 0"):
        open_llm(store, kv_tier_size=0.001)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[mooncake\]'"):
        open_llm(store)
