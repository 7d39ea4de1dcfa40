"""The benchmark of cache eviction, at sizes that take a second."""

from __future__ import annotations

import argparse
import re
from xml.etree import ElementTree

import cache_eviction

from quire.models.checkpoints.hub import resolve_model


def test_speed_compares_requests_of_which_only_the_held_ones_evict(capsys):
    options = argparse.Namespace(requests=2, context=400, budget=176, rounds=2)
    cache_eviction.speed(options, str(resolve_model("mini")))
    printed = capsys.readouterr().out
    rates = re.findall(r"^(.{10}) +([\d.]+) tokens/s, (\d+) blocks evicted$", printed, re.MULTILINE)
    evicted = {name.strip(): int(blocks) for name, _rate, blocks in rates}
    # A prompt of 25 blocks keeps 11, and each request then evicts about one in each of the two rounds.
    assert set(evicted) == {"full KV", "held", "short"}
    assert 2 * 14 + 2 < evicted["held"] < 2 * 14 + 2 * 5
    assert evicted["full KV"] == evicted["short"] == 0
    assert all(float(rate) > 0 for _name, rate, _blocks in rates)
    assert re.search(
        r"^held / full KV \d+\.\d\d\nscores and eviction -?[\d.]+% of a step$", printed, re.MULTILINE
    )


def test_quality_prints_and_draws_every_budget(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cache_eviction, "SHARES", (25.0, 75.0))
    monkeypatch.setattr(cache_eviction, "MODES", {"norm_sum": {}})
    path = tmp_path / "curve.svg"
    cache_eviction.quality(argparse.Namespace(prompts=1, questions="name", svg=str(path)))
    printed = capsys.readouterr().out
    assert "1 prompts of" in printed
    assert re.search(r"^\| forward \| norm_sum \| \d+ % \| \d+ % \|$", printed, re.MULTILINE)
    assert re.search(r"^\| centered \| norm_sum \| \d+ % \| 100 % \|$", printed, re.MULTILINE)
    assert len(list(ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}polyline"))) == 2


def test_questions_consist_of_the_name_asked_for():
    mixed, name = cache_eviction.retrieval_cases(4, "mixed"), cache_eviction.retrieval_cases(4, "name")
    for before, after in zip(mixed, name, strict=True):
        text, question = after.messages[-1]["content"].rsplit("\n", 1)
        assert before.messages[-1]["content"].startswith(f"{text}\n")
        assert f"\n{after.answer}\n" in text
        assert question == after.answer.replace(":", "").split()[0] + "?"


def test_what_kvcrush_retains_is_part_of_the_budget():
    options = cache_eviction.eviction(688, **cache_eviction.MODES["norm_sum, KVCrush"])
    assert options["cache_eviction_config"].max_cache_size == 688 - cache_eviction.RETAINED * 16
    assert cache_eviction.eviction(688)["cache_eviction_config"].max_cache_size == 688


def test_half_the_prompt_keeps_the_answers_if_pooling_is_centered():
    """The end of this answer is in the next block, which pooling forward evicts."""
    cases = cache_eviction.retrieval_cases(7, "name")[6:]
    shares = {
        pooling: cache_eviction.exact_match(cases, cache_eviction.eviction(688, score_pooling=pooling))[0]
        for pooling in ("forward", "centered")
    }
    assert shares == {"forward": 0.0, "centered": 100.0}
