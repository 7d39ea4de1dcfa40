"""Time from a cold start to the first token, compared with a bare `import torch`.

Runs `quire generate QUESTION` and `python -c "import torch"` alternately, each in a new process, and compares
the medians: seconds from the start of the process to the first byte of the answer, and to the end of the
import. The difference should be at most 1.5 s.

    python benchmarks/cold_start.py [--runs 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

QUESTION = "What is a KV block?"
ALLOWED_SECONDS = 1.5
GENERATE = [sys.executable, "-m", "quire.cli.main", "generate", QUESTION]
IMPORT_TORCH = [sys.executable, "-c", "import torch"]


def seconds_to_first_token() -> float:
    """Start `quire generate` and return the seconds until its first byte on standard output."""
    started = time.perf_counter()
    with subprocess.Popen(GENERATE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if process.returncode or not first.strip():
        raise SystemExit(f"{' '.join(GENERATE)} ended with status {process.returncode} and without an answer")
    return seconds


def seconds_to_import_torch() -> float:
    """Return how many seconds a process takes that only imports torch."""
    started = time.perf_counter()
    subprocess.run(IMPORT_TORCH, check=True)
    return time.perf_counter() - started


def main() -> int:
    """Measure and print; return 1 if the difference is too large."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    seconds_to_import_torch()  # fills the file cache for both
    pairs = [(seconds_to_import_torch(), seconds_to_first_token()) for _ in range(options.runs)]
    imports, tokens = zip(*pairs, strict=True)
    difference = statistics.median(tokens) - statistics.median(imports)
    if options.json:
        print(json.dumps({"import_torch": imports, "first_token": tokens, "difference": difference}))
    else:
        for label, seconds in (("import torch", imports), ("first token of quire generate", tokens)):
            runs = "  ".join(f"{value:.2f}" for value in seconds)
            print(f"{label:32} median {statistics.median(seconds):.2f} s   runs {runs}")
        print(f"{'difference':32} {difference:+.2f} s         allowed {ALLOWED_SECONDS:.2f} s")
    return int(difference > ALLOWED_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
