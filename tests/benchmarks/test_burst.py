"""The benchmark of bursts, with the built-in model."""

from __future__ import annotations

from argparse import Namespace

import burst


def test_what_requests_share_is_computed_once():
    options = Namespace(model="mini", requests=3, shared=32, rounds=1)
    figures = burst.measure("quire", options)
    assert figures["engine"] == "quire"
    assert len(figures["seconds"]) == 1
    assert figures["computed_tokens"] == 32 + 3 * burst.OWN_TOKENS
