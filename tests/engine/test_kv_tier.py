"""The KV tier in an engine: warm after a restart, the same tokens, and no fault of it is the engine's."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import re
import types

import pytest

from engine_checks import check_after_every_step, core_of
from insides import always_load, connector_of, num_stored, tier_of, wait_until_written
from late_device import LateDevice
from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.kv.connectors.stats import KVConnectorStats
from quire.kv.tiers import block_copier, cached_tier
from quire.kv.tiers import connector as tier_connector
from quire.kv.tiers.device_copier import DeviceCopier
from quire.models.decoder import Decoder

PROMPT = list(range(100, 100 + 20 * 16 + 3))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS = {"num_threads": 1, "num_kv_blocks": 64}


def open_llm(directory=None, **options) -> LLM:
    tier = {} if directory is None else {"kv_tier": "disk", "kv_tier_path": str(directory)}
    llm = LLM("mini", **{**OPTIONS, "kv_tier_min_uses": 1, **tier, **options})
    check_after_every_step(core_of(llm))
    always_load(connector_of(llm))
    return llm


def answer(llm: LLM, prompt=PROMPT) -> tuple[list[int], list]:
    [output] = llm.generate([prompt], SamplingParams(**{**vars_of(GREEDY), "logprobs": 1}))
    return output.outputs[0].token_ids, [
        [(logprob.logprob) for logprob in position.values()] for position in output.outputs[0].logprobs
    ]


def vars_of(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in ("temperature", "max_tokens", "ignore_eos")}


@pytest.fixture(scope="module")
def alone() -> tuple[list[int], list]:
    with open_llm() as llm:
        return answer(llm)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    "options", [{}, {"overlap_steps": True}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}], ids=str
)
def test_after_a_restart_the_prefix_is_loaded_and_the_bits_are_the_same(tmp_path, options):
    with open_llm(tmp_path, **options) as llm:
        first = answer(llm)
        assert llm.stats().num_loaded_tokens == 0
    with open_llm(tmp_path, **options) as llm:
        assert answer(llm) == first
        stats = llm.stats()
        assert (stats.num_loaded_tokens, stats.num_failed_loads) == (320, 0)
        assert (stats.kv_connector.num_loaded_blocks, stats.kv_connector.num_loads_chosen) == (20, 1)
        assert stats.kv_connector.num_stored_blocks == 20
        assert stats.kv_connector.num_written_blocks == 0


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize("is_behind_memory", [False, True])
def test_what_the_cache_forgot_is_loaded_from_memory(alone, tmp_path, is_behind_memory):
    prompts = [list(range(start, start + len(PROMPT))) for start in (100, 500, 900)]
    options = {"directory": tmp_path, "kv_tier_memory_size": 1} if is_behind_memory else {"kv_tier": "memory"}
    with open_llm(num_kv_blocks=24, **options) as llm:
        for _ in range(2):
            assert answer(llm, prompts[0]) == alone
            for prompt in prompts[1:]:
                answer(llm, prompt)
            wait_until_written(llm)
        stats = llm.stats()
        assert stats.num_loaded_tokens == 3 * 20 * 16, "all of it the second time"
        assert stats.kv_connector.num_memory_hits == is_behind_memory * 3 * 20
        assert stats.num_failed_loads == 0


def test_what_a_device_copies_late_is_loaded_too(alone, monkeypatch):
    """The cache is the host's, and what moves blocks is what does on a GPU: no copy is early."""
    device = LateDevice(is_eager=True)
    monkeypatch.setattr(block_copier, "MAX_STAGED_BYTES", 4 << 20)
    monkeypatch.setattr(
        tier_connector,
        "host_copier",
        lambda caches, _: DeviceCopier([cache.tensor for cache in caches], device),
    )
    prompts = [list(range(start, start + len(PROMPT))) for start in (100, 500, 900)]
    with open_llm(kv_tier="memory", num_kv_blocks=24, overlap_steps=True) as llm:
        for _ in range(2):
            assert answer(llm, prompts[0]) == alone
            for prompt in prompts[1:]:
                answer(llm, prompt)
            wait_until_written(llm)
        assert llm.stats().num_loaded_tokens == 3 * 20 * 16
        assert llm.stats().num_failed_loads == 0
    assert not any(queue.operations for queue in device.queues)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"kv_cache_dtype": "int8"}, {"block_size": 32}, {"kernels": "reference"}],
    ids=str,
)  # fmt: skip
def test_kv_that_was_computed_otherwise_is_not_found(tmp_path, options):
    with open_llm(tmp_path) as llm:
        answer(llm)
    with open_llm(tmp_path, **options) as llm:
        answer(llm, PROMPT[:40])
        assert llm.stats().num_loaded_tokens == 0


def test_damage_costs_time_but_changes_no_token(tmp_path, alone):
    with open_llm(tmp_path) as llm:
        answer(llm)
    [file] = tmp_path.iterdir()
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2 + 2000)
        opened.write(b"damage")
    with open_llm(tmp_path) as llm:
        assert answer(llm) == alone
        assert 0 < llm.stats().num_loaded_tokens < 320
        assert llm.stats().kv_connector.num_failed_reads == 1
        os.truncate(file, 0)
        assert llm.reset_prefix_cache()
        assert answer(llm) == alone


def test_two_engines_share_a_tier(tmp_path, alone):
    with open_llm(tmp_path) as writer, open_llm(tmp_path) as reader:
        answer(writer)
        wait_until_written(writer)
        tier_of(connector_of(reader)).refresh()
        assert answer(reader) == alone
        assert reader.stats().num_loaded_tokens == 320
        assert reader.stats().kv_connector.num_written_blocks == 0


def test_after_a_reset_nothing_stored_before_is_used(tmp_path):
    with open_llm(tmp_path) as llm:
        answer(llm)
        assert llm.reset_prefix_cache()
        answer(llm)
        assert llm.stats().num_loaded_tokens == 0
    with open_llm(tmp_path) as llm:
        assert llm.stats().kv_connector.num_stored_blocks == 0


def test_by_default_a_prompt_is_stored_when_it_comes_again(tmp_path):
    numbers = []
    with open_llm(tmp_path, kv_tier_min_uses=2) as llm:
        for _ in range(2):
            answer(llm)
            wait_until_written(llm)
            numbers.append(llm.stats().kv_connector.num_stored_blocks)
    assert numbers == [0, 20]


# -- failures ----------------------------------------------------------------------------------------------


def finish_reasons(llm: LLM, prompts: list[list[int]]) -> list[str]:
    return [output.outputs[0].finish_reason for output in llm.generate(prompts, GREEDY)]


def test_kv_of_a_request_with_nan_logits_is_not_stored(alone, monkeypatch):
    logits, num_calls = Decoder.logits, itertools.count()

    def poisoned(model, hidden, num_largest):
        result = logits(model, hidden, num_largest)
        if next(num_calls) == 0:
            result[0] = float("nan")
        return result

    other = list(range(900, 940))
    with open_llm(kv_tier="memory") as llm:
        monkeypatch.setattr(Decoder, "logits", poisoned)
        assert finish_reasons(llm, [PROMPT, other]) == ["error", "length"]
        monkeypatch.undo()
        assert (num_stored(llm, PROMPT), num_stored(llm, other)) == (0, 2)
        assert answer(llm) == alone
        assert num_stored(llm, PROMPT) == 20


# -- settings ----------------------------------------------------------------------------------------------


def test_a_tier_that_holds_no_block_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"kv_tier_size is 1e-06 GB, too little .* at least 0\.0"):
        open_llm(tmp_path, kv_tier_size=1e-6)
    too_little = r"kv_tier_memory_size is 1e-06 GB, too little .* at least 0\.0"
    with pytest.raises(ConfigError, match=too_little) as refusal:
        open_llm(tmp_path, kv_tier_memory_size=1e-6)
    least = float(re.search(r"at least ([0-9.]+),", str(refusal.value))[1])
    open_llm(tmp_path, kv_tier_memory_size=least).shutdown()
    with pytest.raises(ConfigError, match="kv_tier is 'memory'; set kv_tier to 'disk'"):
        open_llm(kv_tier="memory", kv_tier_memory_size=1.0)


def test_memory_that_there_is_not_is_refused(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    flags = {"MAP_PRIVATE": mmap.MAP_PRIVATE, "MAP_ANONYMOUS": mmap.MAP_ANONYMOUS}
    monkeypatch.setattr(cached_tier, "mmap", types.SimpleNamespace(mmap=refuse, **flags))
    with pytest.raises(
        ConfigError, match=r"kv_tier_memory_size is 1\.0 GB, which this machine does not have"
    ):
        open_llm(tmp_path, kv_tier_memory_size=1.0)


def test_a_directory_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"kv_tier_path is .* cannot be used.* choose a directory"):
        open_llm(tmp_path / "file")


def test_a_tier_and_a_connector_are_too_much():
    with pytest.raises(ConfigError, match=r"kv_tier is 'memory' and EngineConfig.kv_connector is 'a\.B'"):
        open_llm(kv_tier="memory", kv_connector="a.B")


def test_without_a_path_the_tier_is_in_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_llm(kv_tier="disk"):
        assert [path.suffix for path in (tmp_path / "quire" / "kv").iterdir()] == [".kvtier"]


# -- what the engine asks of its connector -----------------------------------------------------------------


def test_statistics_that_cannot_be_had_are_left_out(tmp_path, caplog):
    with open_llm(tmp_path) as llm:
        assert isinstance(llm.stats().kv_connector, KVConnectorStats)
        connector_of(llm).stats = lambda: 1 // 0
        assert llm.stats().kv_connector is None
        assert llm.stats().num_blocks == 64
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_connector_that_cannot_be_closed_does_not_keep_the_engine(tmp_path, caplog):
    with open_llm(tmp_path) as llm:
        connector = connector_of(llm)
        close, connector.close = connector.close, lambda: 1 // 0
    assert "could not be closed" in caplog.text
    close()


def test_a_closed_tier_can_be_written_by_the_next_engine(tmp_path):
    for _ in range(3):
        with open_llm(tmp_path) as llm:
            assert tier_of(connector_of(llm)).is_writable
