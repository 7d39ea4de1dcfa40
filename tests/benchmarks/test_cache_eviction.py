"""The benchmark of cache eviction, at sizes that take a second."""

from __future__ import annotations

import argparse
import re

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
