"""Hours of random histories in minutes: `make soak`, see docs/scheduling.md.

First histories of many configurations, each with everything that can go wrong in it; then a few long ones,
to see whether what the scheduler holds when it is idle grows with the requests it has served.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

from census import held_by_scheduler, num_bytes
from mixed_actions import drain, run_random
from mixed_driver import MixedDriver
from mixed_world import RandomChooser

from quire.config import CacheEvictionConfig, SchedulerConfig
from quire.limits import limits_of

STEPS_PER_HISTORY = 1000
NUM_LONG_HISTORIES = 4  # one for each order of service
NUM_WARM_UP_REQUESTS = 1500  # what is kept of the past, such as compiled grammars, is at its bound by then
REQUESTS_PER_READING = 500
NUM_READINGS = 4  # early, and as many late
MOST_GROWTH = 1.0  # bytes per request; less is noise: lists and dictionaries that keep room to grow

ROWS = {  # of the summary: what the driver counts, under a name for people
    "steps planned": "steps",
    "tokens computed": "tokens",
    "requests accepted": "requests",
    "  beam searches": "beam searches",
    "  with a grammar": "structured requests",
    "  continued from elsewhere": "continued requests",
    "ended at their limit": "ended: length",
    "ended by a stop token": "ended: stop",
    "preemptions": "num_preemptions",
    "prefix tokens found": "prefix_hit_tokens",
    "prefixes shared within a step": "prefixes shared within a step",
    "tokens loaded from elsewhere": "num_loaded_tokens",
    "drafts verified": "num_draft_tokens",
    "  accepted": "num_accepted_tokens",
    "steps begun while some wait": "steps begun while some wait",
    "forks of beams": "forks of beams",
    "blocks copied on write": "blocks copied",
    "blocks evicted while running": "blocks evicted",
    "blocks behind a window, in checks": "blocks left behind a window",
    "cache resets with requests running": "prefix cache resets, requests running",
    "invariant checks": "invariant checks",
}
GROUPS = {  # of the summary: all counts whose name begins so
    "aborts, by state": "aborts: ",
    "aborts of everything": "aborts of all",
    "errors that clients were told": "errors: ",
    "refused at the door": "refused: ",
    "steps that were lost": "steps lost",
    "injected: runner errors": "runner errors armed",
    "injected: connector": "connector: ",
    "injected: policies": "policy: ",
    "KV tiers": "tiers: ",
    "injected: failed loads": "num_failed_loads",
    "injected: memory changes": "changes of memory",
    "timeouts": "num_timeouts",
    "pauses": "pause states: PAUSED",
}


def history(seed: int, num_steps: int) -> Counter[str]:
    """Run one history to its end; return what happened in it."""
    choose = RandomChooser(seed)
    driver = MixedDriver(choose)
    try:
        run_random(driver, choose, num_steps)
        drain(driver)
    except Exception:
        _report_violation(driver, f"SEED={seed}")
        raise
    return driver.counts


def long_history(seed: int) -> tuple[Counter[str], float]:
    """Serve many requests with one scheduler, and measure again and again what it holds while it is idle.

    Returns:
        What happened, and the growth in bytes per request: the mean of the later readings less that of the
        earlier ones, over the requests between.
    """
    choose = RandomChooser(seed)
    driver = MixedDriver(choose, _long_config(seed))
    try:
        _serve(driver, choose, NUM_WARM_UP_REQUESTS)
        sizes = [_serve(driver, choose, REQUESTS_PER_READING) for _ in range(2 * NUM_READINGS)]
    except Exception:
        _report_violation(driver, f"SEED={seed} STEPS=0")
        raise
    growth = (sum(sizes[NUM_READINGS:]) - sum(sizes[:NUM_READINGS])) / NUM_READINGS
    return driver.counts, growth / (NUM_READINGS * REQUESTS_PER_READING)


def _long_config(seed: int) -> SchedulerConfig:
    limits = limits_of(SchedulerConfig)
    return SchedulerConfig(
        policy=limits["policy"].choices[seed % 4],
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        admission=limits["admission"].choices[seed % 2],
        prefix_retention=limits["prefix_retention"].choices[seed % 3],
        overlap_steps=bool(seed % 2),
        kv_transfer_timeout=20.0,
        use_cache_eviction=seed % 4 == 2,
        cache_eviction_config=CacheEvictionConfig(start_size=4, recent_size=4, max_cache_size=16),
        max_num_queued_reqs=12,
        max_num_queued_tokens=400,
    ).validate()


def _serve(driver: MixedDriver, choose: RandomChooser, num_requests: int) -> int:
    """Let so many requests end, and all that are left; return the bytes that the idle scheduler holds."""
    end = driver.counts["finished"] + num_requests
    while driver.counts["finished"] < end:
        run_random(driver, choose, driver.counts["steps"] + 50)
    drain(driver)
    return num_bytes(held_by_scheduler(driver.world))


def _report_violation(driver: MixedDriver, arguments: str) -> None:
    traceback.print_exc()
    print(f"\nviolated in step {driver.counts['steps']} of the history that comes first with")
    print(f"    make soak {arguments}")


def summary(counts: Counter[str]) -> str:
    lines = [f"{name:<44}{counts[key]:>12,}" for name, key in ROWS.items()]
    for name, prefix in GROUPS.items():
        found = {key: count for key, count in sorted(counts.items()) if key.startswith(prefix)}
        lines.append(f"{name:<44}{sum(found.values()):>12,}")
        if len(found) > 1:
            lines += [f"  {key.removeprefix(prefix) or key:<42}{count:>12,}" for key, count in found.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000, help="fewest steps, long histories not counted")
    parser.add_argument("--seed", type=int, default=0, help="of the first history; the next have the next")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # of injected faults
    started = time.monotonic()
    counts: Counter[str] = Counter()
    num_histories, growth = 0, 0.0
    try:
        while counts["steps"] < options.steps:
            counts += history(options.seed + num_histories, STEPS_PER_HISTORY)
            num_histories += 1
        for seed in range(options.seed, options.seed + NUM_LONG_HISTORIES):
            counts_of_one, growth_of_one = long_history(seed)
            counts += counts_of_one
            growth += growth_of_one / NUM_LONG_HISTORIES
    except Exception:
        return 1
    print(summary(counts))
    print(f"{'histories':<44}{num_histories + NUM_LONG_HISTORIES:>12,}")
    print(f"{'growth, bytes per million finished requests':<44}{growth * 1e6:>12,.0f}")
    print(f"\n{time.monotonic() - started:.0f} s; no invariant violated")
    if growth > MOST_GROWTH:
        print(f"but what it holds when idle grew by {growth:.1f} bytes per request; noise is {MOST_GROWTH}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
