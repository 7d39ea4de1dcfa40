"""Time from the death of an engine to the next token of a stream that runs on it.

An engine is killed (SIGKILL) or aborted (SIGABRT) while it decodes. The time until the stream's next token is
divided where the front hears of the next engine: that it runs, that it reads weights, and that it is ready;
the rest is the prompt, which is computed again or loaded from a KV tier. The tokens must be those of a run
that nothing disturbs. Engines with and without a standby process (`standby_engine`) take turns.

    python benchmarks/recovery.py [--model mini] [--prompt-len 1000] [--rounds 3] [--json]

`--model ''` makes a model of Qwen3-0.6B's shape with random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from random_model import random_model

from quire import AsyncLLM, EngineConfig, SamplingParams, SchedulerConfig
from quire.config import KVTierConfig, SupervisionConfig
from quire.engine.messages import LoadProgress, Ready, Starting, StepOutputs
from quire.front.process.supervision import EngineCrashed
from quire.scheduling.outputs import KVConnectorStats

FIRST_ID, END_ID = 10, 250  # token ids of prompts, which every model has
BLOCK_SIZE = 16
TOKENS_BEFORE = 4  # of the stream, before the engine is struck
TOKENS_AFTER = 16  # that are compared
TIERS = ("none", "memory", "disk")
SIGNALS = (signal.SIGKILL, signal.SIGABRT)
STANDBY_MODES = {"with": True, "without": False}
TIMEOUT = 60.0  # of storing a prompt, and of starting a standby
PARAMS = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)


class Recorder:
    """Notes when the front hears what of an engine's death and of the next engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.times: dict[str, float] = {}
        self.num_tokens = 0  # of the stream
        self.num_lost = 0  # tokens of the stream when the engine died: the continuation begins with them
        self._receive = llm._engine.receive

    def receive(self, timeout: float | None) -> list[Any]:
        """Take the place of `EngineSupervisor.receive`."""
        messages = self._receive(timeout)
        for message in messages:
            self._note(message)
        return messages

    def _note(self, message: Any) -> None:
        match message:
            case EngineCrashed():
                self.num_lost = self.num_tokens
                self.times.clear()  # of the start of the engine that has died
                self._mark("death")
            case Starting():
                self._mark("started")
            case LoadProgress():
                self._mark("loading")
            case Ready():
                self._mark("ready")
            case StepOutputs(outputs):
                num_tokens = sum(len(output.new_token_ids) for output in outputs)
                self.num_tokens += num_tokens
                if num_tokens and "ready" in self.times:
                    self._mark("token")

    def _mark(self, name: str) -> None:
        self.times.setdefault(name, time.perf_counter())


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What one death of an engine has cost; seconds, and tokens."""

    total: float
    start: float
    imports: float
    load: float
    prompt: float
    computed_tokens: int
    loaded_tokens: int
    is_equal: bool


Recoveries = dict[str, dict[str, dict[str, list[Recovery]]]]
"""By tier, standby and the signal's name."""


def open_llm(model: str, tier: str, directory: str, *, has_standby: bool) -> AsyncLLM:
    """Return an engine in a process of its own, with a tier that stores each prompt at once."""
    tiering = KVTierConfig(
        kv_tier="" if tier == "none" else tier, kv_tier_path=directory, kv_tier_min_uses=1, kv_tier_size=0.5
    )
    scheduler = SchedulerConfig(block_size=BLOCK_SIZE, num_kv_blocks=256)
    supervision = SupervisionConfig(standby_engine=has_standby)
    return AsyncLLM(
        EngineConfig(model=model, scheduler=scheduler, supervision=supervision, kv_tiering=tiering)
    )


async def wait_until_stored(llm: AsyncLLM, num_blocks: int) -> None:
    """Return when an engine's tier has all full blocks of the prompt."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            stats = (await llm.stats()).kv_connector
            assert isinstance(stats, KVConnectorStats)
            if stats.num_stored_blocks + stats.num_loaded_blocks >= num_blocks:
                return
            await asyncio.sleep(0.01)


async def wait_for_standby(llm: AsyncLLM) -> None:
    """Return when the process that is to become the next engine has imported everything."""
    async with asyncio.timeout(TIMEOUT):
        while not llm._engine._standby.is_ready():
            await asyncio.sleep(0.01)


async def measure(
    llm: AsyncLLM, prompt: list[int], undisturbed: list[int], number: int, has_tier: bool
) -> Recovery:
    """Strike the engine with a signal while it has a stream, and return how that goes on."""
    await llm.wait_until_ready()
    if llm.config.supervision.standby_engine:
        await wait_for_standby(llm)
    recorder = Recorder(llm)
    with mock.patch.object(llm._engine, "receive", recorder.receive):
        async with contextlib.aclosing(llm.generate(prompt, PARAMS)) as stream:
            async for output in stream:
                if len(output.outputs[0].token_ids) >= TOKENS_BEFORE:
                    break
            if has_tier:
                await wait_until_stored(llm, (len(prompt) - 1) // BLOCK_SIZE)
            assert llm._engine._process is not None
            struck = time.perf_counter()
            os.kill(llm._engine._process.pid, number)
            async for output in stream:
                tokens = output.outputs[0].token_ids
                if "token" in recorder.times and len(tokens) >= recorder.num_lost + TOKENS_AFTER:
                    break
            assert "token" in recorder.times, "the stream ended before its engine died"
            num_resumed = recorder.num_tokens - recorder.num_lost
            stats = await llm.stats()
    times = recorder.times
    loading = times.get("loading", times["ready"])
    known = len(prompt) + recorder.num_lost
    assert num_resumed >= TOKENS_AFTER
    return Recovery(
        total=times["token"] - struck,
        start=times["started"] - struck,
        imports=loading - times["started"],
        load=times["ready"] - loading,
        prompt=times["token"] - times["ready"],
        computed_tokens=known - stats.num_loaded_tokens,
        loaded_tokens=stats.num_loaded_tokens,
        is_equal=list(tokens) == undisturbed[: len(tokens)],
    )


async def measure_tier(
    model: str, tier: str, prompt: list[int], undisturbed: list[int], rounds: int
) -> dict[str, dict[str, list[Recovery]]]:
    """Return the recoveries of engines with one kind of tier, by standby and the signal's name."""
    recoveries: dict[str, dict[str, list[Recovery]]] = {
        standby: {number.name: [] for number in SIGNALS} for standby in STANDBY_MODES
    }
    async with contextlib.AsyncExitStack() as stack:
        llms = {}
        for standby, has_standby in STANDBY_MODES.items():
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            llms[standby] = open_llm(model, tier, directory, has_standby=has_standby)
            stack.push_async_callback(llms[standby].shutdown)
        for _ in range(rounds):
            for number in SIGNALS:
                for standby, llm in llms.items():
                    recovery = await measure(llm, prompt, undisturbed, number, tier != "none")
                    recoveries[standby][number.name].append(recovery)
    return recoveries


async def tokens_undisturbed(model: str, prompt: list[int]) -> list[int]:
    """Return the tokens of a stream whose engine does not die."""
    llm = open_llm(model, "none", "", has_standby=False)
    try:
        async for output in llm.generate(prompt, PARAMS):
            tokens = output.outputs[0].token_ids
    finally:
        await llm.shutdown()
    return list(tokens)


async def measure_all(model: str, prompt_len: int, rounds: int) -> Recoveries:
    """Return all recoveries."""
    rng = random.Random(0)
    prompt = [rng.randrange(FIRST_ID, END_ID) for _ in range(prompt_len)]
    undisturbed = await tokens_undisturbed(model, prompt)
    return {tier: await measure_tier(model, tier, prompt, undisturbed, rounds) for tier in TIERS}


def report(recoveries: Recoveries) -> str:
    """Return a table of medians in Markdown."""
    fields = [field.name for field in dataclasses.fields(Recovery) if field.name != "is_equal"]
    lines = [
        "| tier | standby | signal | next token, s | start | import | load | prompt "
        "| computed | loaded | same |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for tier, standby, name, rounds in each_kind(recoveries):
        medians = [statistics.median(getattr(one, field) for one in rounds) for field in fields]
        cells = [f"{value:.2f}" for value in medians[:5]] + [f"{value:.0f}" for value in medians[5:]]
        num_equal = sum(one.is_equal for one in rounds)
        lines.append(f"| {tier} | {standby} | {name} | {' | '.join(cells)} | {num_equal} of {len(rounds)} |")
    return "\n".join(lines)


def each_kind(recoveries: Recoveries) -> Iterator[tuple[str, str, str, list[Recovery]]]:
    """Yield (tier, standby, the signal's name, recoveries)."""
    for tier, by_standby in recoveries.items():
        for standby, by_signal in by_standby.items():
            for name, rounds in by_signal.items():
                yield tier, standby, name, rounds


def main() -> int:
    """Measure and print; return 1 if tokens differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini", help="name or directory; empty: made (default: mini)")
    parser.add_argument("--prompt-len", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="deaths by each signal (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with random_model(options.model) as model:
        recoveries = asyncio.run(measure_all(model, options.prompt_len, options.rounds))
    if options.json:
        print(json.dumps(recoveries, default=dataclasses.asdict))
    else:
        print(report(recoveries))
    return int(not all(one.is_equal for *_, rounds in each_kind(recoveries) for one in rounds))


if __name__ == "__main__":
    raise SystemExit(main())
