"""Random faults of networks and machines, one after another: `make soak-datadist`, see docs/datadist.md."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator

from fault_split import BYSTANDER, DECODER, OPERATIONS, PROMPT, Split
from faults import KINDS, KINDS_ON_ONE_HOST, Fault, plan
from network_namespaces import network_of, why_not_permitted


def soak(faults: Iterator[Fault], seed: int, transport: str) -> None:
    """Let faults strike; print each before, and a summary at the end."""
    kinds: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(network_of(PROMPT, DECODER, BYSTANDER, seed=seed))
        split = Split(network, stack, transport)
        for fault in faults:
            print(fault, flush=True)
            split.run(fault)
            kinds[fault.kind] += 1
        split.close()
    counts = split.counts
    print(f"{kinds.total()} faults over {transport}: " + _listed(kinds))
    outcomes = {name: count for name, count in counts.items() if name not in {"right", "retries"}}
    print("struck: " + _listed(Counter(outcomes)))
    print(
        f"{counts['right']} pulls brought the right bytes, 0 others; leaks 0; "
        f"{counts['retries']} retries without a fault; "
        f"no call took more than {max(0.0, split.longest_overrun):.2f} s beyond its limit"
    )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def main() -> None:
    """Run the soak that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=["tcp", "shared_memory"], default="tcp")
    parser.add_argument("--plan", action="store_true", help="only print the faults")
    options = parser.parse_args()
    kinds = KINDS if options.transport == "tcp" else KINDS_ON_ONE_HOST
    faults = plan(options.seed, options.faults, PROMPT, DECODER, operations=OPERATIONS, kinds=kinds)
    if options.plan:
        for fault in faults:
            print(fault)
        return
    reason = why_not_permitted()
    if reason is not None:
        sys.exit(reason)
    soak(faults, options.seed, options.transport if options.transport == "tcp" else "shared_memory,tcp")


if __name__ == "__main__":
    main()
