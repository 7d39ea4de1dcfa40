"""The benchmark of recovery, with the built-in model, a disk tier and one signal."""

from __future__ import annotations

import asyncio
import signal

import recovery

from quire import LLM


def test_a_stream_goes_on_with_the_same_tokens_and_the_tiers_blocks(monkeypatch, preloaded_engines):
    monkeypatch.setattr(recovery, "SIGNALS", (signal.SIGKILL,))
    monkeypatch.setattr(recovery, "STANDBY_MODES", {"with": True})
    prompt = list(range(10, 60))
    with LLM("mini") as llm:
        [output] = llm.generate([prompt], recovery.PARAMS)
    undisturbed = list(output.outputs[0].token_ids)
    recoveries = asyncio.run(recovery.measure_tier("mini", "disk", prompt, undisturbed, rounds=1))
    [one] = recoveries["with"]["SIGKILL"]
    assert one.is_equal
    assert one.loaded_tokens == 48
    assert one.total > 0
    table = recovery.report({"disk": recoveries}).splitlines()
    assert table[-1].startswith("| disk | with | SIGKILL | ")
    assert table[-1].endswith("| 1 of 1 |")
