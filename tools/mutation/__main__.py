"""Mutation testing: make small changes to the code and count those that the tests detect (`make mutants`).

All results are in the folder `--results`; an interrupted run continues from there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutants import ROOMS, Mutant, draw
from reach import Reach, measure_reach, noticed_by, prepare


def main() -> None:
    """Choose mutants, measure coverage, run the tests and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("build/mutation"), help="folder for results")
    parser.add_argument("--per-room", type=int, default=62, help="number of mutants per package")
    parser.add_argument("--seed", type=int, default=0, help="seed for choosing mutants")
    parser.add_argument("--like", type=Path, help="results of another commit, whose mutants are reused")
    parser.add_argument(
        "--seconds", type=float, default=30, help="maximum duration of the tests of one mutant"
    )
    arguments = parser.parse_args()
    if subprocess.run(["git", "diff", "--quiet", "--", "src"], check=False).returncode:
        raise SystemExit("src has uncommitted changes, which could not be distinguished from mutants")
    arguments.results.mkdir(parents=True, exist_ok=True)
    found = arguments.results / "mutants.json"
    if not found.exists():
        like = _read(arguments.like / "mutants.json") if arguments.like else []
        mutants = draw(arguments.per_room, arguments.seed, [Mutant(**row["mutant"]) for row in like])
        keys = {Mutant(**row["mutant"]).key for row in like}
        _write(found, [{"mutant": asdict(mutant), "again": mutant.key in keys} for mutant in mutants])
    prepare()
    reach = arguments.results / "reach.json"
    if not reach.exists():
        measure_reach(reach)
    _run(found, Reach(reach), arguments.seconds)
    print(report(_read(found)))


def _run(found: Path, reach: Reach, max_seconds: float) -> None:
    rows = _read(found)
    for number, row in enumerate(rows, 1):
        mutant = Mutant(**row["mutant"])
        tests = reach.tests(mutant)
        chosen: list[str] = []
        seconds = 0.0
        for test in tests:
            if seconds + reach.seconds[test] <= max_seconds or not chosen:
                chosen.append(test)
                seconds += reach.seconds[test]
        if row.get("outcome") in ("killed", "timed out") or row.get("num_tests") == len(chosen):
            continue  # a survivor is run again with more tests, if --seconds now allows
        row |= {"num_tests": len(chosen), "num_reaching": len(tests)}
        likely = reach.likely(mutant, chosen)
        others = [test for test in chosen if test not in likely]
        row["noticed_by"] = _try_out(mutant, [likely, others], reach, found.with_name("tests.log"))
        row["outcome"] = _OUTCOMES.get(row["noticed_by"], "killed")
        print(
            f"{number}/{len(rows)} {row['outcome']} {mutant.file}:{mutant.line} {mutant.operator}", flush=True
        )
        _write(found, rows)


_OUTCOMES = {None: "survived", "timeout": "timed out"}


def _try_out(mutant: Mutant, batches: list[list[str]], reach: Reach, log: Path) -> str | None:
    path = Path(mutant.file)
    before, times = path.read_bytes(), path.stat()
    try:
        path.write_text(mutant.source())
        outcomes = (
            noticed_by(tests, sum(reach.seconds[test] for test in tests), log) for tests in batches if tests
        )
        return next((outcome for outcome in outcomes if outcome), None)
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def report(rows: list[dict[str, Any]]) -> str:
    """Return a table of outcomes by room, and the list of survivors."""
    lines = ["| package | mutants | killed | survived | timed out | share |", "|---|---|---|---|---|---|"]
    for room in (*ROOMS, "all"):
        outcomes = [row["outcome"] for row in rows if room in ("all", row["mutant"]["room"])]
        killed, survived, timed_out = (
            outcomes.count(outcome) for outcome in ("killed", "survived", "timed out")
        )
        share = (killed + timed_out) / max(1, len(outcomes))
        lines.append(f"| {room} | {len(outcomes)} | {killed} | {survived} | {timed_out} | {share:.1%} |")
    lines.append(f"\n{sum(row['again'] for row in rows)} mutants are from the earlier run.\n\nSurvivors:")
    for row in rows:
        if row["outcome"] == "survived":
            mutant = row["mutant"]
            operator = mutant["operator"].removeprefix("core/")
            lines.append(f"{mutant['file']}:{mutant['line']} {operator}: {mutant['text']}")
    return "\n".join(lines)


def _read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
