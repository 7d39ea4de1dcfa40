"""Coverage of each test, and running tests against a mutant."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import coverage
import pytest
from hypothesis import HealthCheck, Phase, settings
from mutants import Mutant

FOLDERS = (
    "conformance",
    "e2e",
    "engine",
    "execution",
    "front",
    "grammar",
    "kernels",
    "kv",
    "models",
    "recording",
    "scheduling",
)
# They run the engine in its own process, where coverage is not measured.
WITH_PROCESSES = ("tests/engine/test_engine_process.py", "tests/server/test_server_engine.py")
# Imported once, before forking a process per mutant. None of them starts a thread.
HEAVY_IMPORTS = (
    "torch",
    "transformers",
    "hypothesis.stateful",
    "hypothesis.extra.numpy",
    "tokenizers",
    "safetensors.torch",
    "msgspec",
    "zmq",
    "llguidance",
    "jinja2",
    "httpx",
    "pytest_asyncio.plugin",
)
OPTIONS = ("-o", "addopts=-q", "-p", "no:cacheprovider", "--tb=short", "--timeout=120")
MAX_EXAMPLES = 25
# Number of tests to run first: collecting all that reach a mutant may take longer than running them.
NUM_LIKELY_FILES = 2
NUM_LIKELY_TESTS = 30
MAX_DATA_BYTES = 12 << 30


class Plugin:
    """Runs selected tests in a given order, with few and deterministic hypothesis examples."""

    def __init__(self, chosen: Sequence[str] | None = None) -> None:
        self.chosen = chosen
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Select and sort the tests, and reduce the number of examples."""
        if self.chosen is not None:
            by_id = {item.nodeid: item for item in items}
            items[:] = [by_id[test] for test in self.chosen if test in by_id]
        for item in items:
            _take_fewer_examples(item)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Start the coverage context of this test, if coverage is measured."""
        if measured := coverage.Coverage.current():
            measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the duration and the outcome of a test."""
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a module that cannot be imported."""
        if report.failed:
            self.failed.append(report.nodeid)


def _take_fewer_examples(item: pytest.Item) -> None:
    test = getattr(item, "obj", None)
    holder, attribute = getattr(test, "__func__", test), "_hypothesis_internal_use_settings"
    if item.name == "runTest":  # of a state machine
        holder, attribute = getattr(item, "cls", None), "settings"
    if given := getattr(holder, attribute, None):
        fewer = settings(
            given,
            max_examples=min(given.max_examples, MAX_EXAMPLES),
            derandomize=True,
            database=None,
            phases=(Phase.explicit, Phase.generate),
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        setattr(holder, attribute, fewer)


def prepare() -> None:
    """Import slow modules that start no thread, so that each test run can be forked with them loaded."""
    for name in HEAVY_IMPORTS:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"


def measure_reach(results: Path) -> None:
    """Run all tests once and record which lines each executes, and how long it takes."""
    paths = [f"tests/{folder}" for folder in FOLDERS] + list(WITH_PROCESSES)

    def run() -> int:
        measured = coverage.Coverage(data_file=None, config_file=False, source=["src/quire"], messages=False)
        measured.start()
        plugin = Plugin()
        pytest.main([*sorted({path for path in paths if Path(path).exists()}), *OPTIONS], plugins=[plugin])
        measured.stop()
        data = measured.get_data()
        root = Path.cwd()
        lines = {
            str(Path(file).relative_to(root)): data.contexts_by_lineno(file) for file in data.measured_files()
        }
        results.write_text(json.dumps({"seconds": plugin.seconds, "failed": plugin.failed, "lines": lines}))
        return 0

    outcome = _fork(run, 3600, results.with_suffix(".log"))
    assert outcome == 0, f"see {results.with_suffix('.log')}"


class Reach:
    """The tests that reach a place, in the order to run them."""

    def __init__(self, results: Path) -> None:
        written = json.loads(results.read_text())
        self._lines: dict[str, dict[str, list[str]]] = written["lines"]
        self.seconds: dict[str, float] = written["seconds"]
        self._left_out = {*written["failed"], ""}

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach a mutant, fast and different ones first.

        For a place executed only on import, these are all tests of the module; for one that no test executes,
        the tests of processes.
        """
        lines = self._lines.get(mutant.file, {})
        first, last = mutant.lines
        for chosen in (range(first, last + 1), range(1, 10**4)):
            found = {test for line in chosen for test in lines.get(str(line), ())} - self._left_out
            if found:
                return self._in_order(found)
        return self._in_order({test for test in self.seconds if test.startswith(WITH_PROCESSES)})

    def likely(self, mutant: Mutant, tests: Sequence[str]) -> list[str]:
        """Return the first tests in the files of the mutant's package that reach it most often."""
        folder = f"tests/{Path(mutant.file).parts[2]}/"
        files = Counter(test.split("::")[0] for test in tests)
        ranked = sorted(files, key=lambda file: (not file.startswith(folder), -files[file]))[
            :NUM_LIKELY_FILES
        ]
        return [test for test in tests if test.split("::")[0] in ranked][:NUM_LIKELY_TESTS]

    def _in_order(self, tests: set[str]) -> list[str]:
        """Return the fastest case of each function, then the second of each, and so on."""
        rank: dict[str, int] = defaultdict(int)
        keyed = []
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            function = test.split("[")[0]
            keyed.append((rank[function], self.seconds[test], test))
            rank[function] += 1
        return [test for _, _, test in sorted(keyed)]


def noticed_by(tests: Sequence[str], seconds: float, log: Path) -> str | None:
    """Run tests until one fails; return which, "timeout", "crash", or None if none did.

    Args:
        tests: what to run, in this order.
        seconds: duration without a mutant.
        log: file for pytest's output.
    """
    failed = log.with_suffix(".failed")
    failed.unlink(missing_ok=True)

    def run() -> int:
        limit = int(15 + 3 * seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
        sys.dont_write_bytecode = True  # later runs must not import mutants
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        plugin = Plugin(tests)
        code = pytest.main(
            [*dict.fromkeys(test.split("::")[0] for test in tests), "-x", *OPTIONS], plugins=[plugin]
        )
        if plugin.failed or code != pytest.ExitCode.OK:
            failed.write_text(plugin.failed[0] if plugin.failed else str(code))
        return 0

    outcome = _fork(run, 60 + 10 * seconds, log)
    if failed.exists():
        return failed.read_text()
    if outcome == 0:
        return None
    return "timeout" if outcome in (signal.SIGKILL, signal.SIGXCPU) else "crash"


def _fork(run: Callable[[], int], max_seconds: float, log: Path) -> int:
    """Run a function in its own process group and return its status; SIGKILL if it took too long."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = run()
            sys.stdout.flush()
            os._exit(code)
        finally:
            os._exit(1)
    deadline = time.monotonic() + max_seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended and time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        elif not ended:
            time.sleep(0.02)
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes that the tests left behind
        return status
