"""Which tests reach which line, and whether they notice a mutant."""

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
# They run the engine as a process of its own, where no coverage is measured.
WITH_PROCESSES = ("tests/engine/test_engine_process.py", "tests/server/test_server_engine.py")
# Imported once, before the processes of the mutants fork off. None of them starts a thread.
HEAVY_IMPORTS = (
    "torch",
    "transformers",
    "hypothesis.stateful",
    "hypothesis.extra.numpy",
    "tokenizers",
    "fastapi",
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
# Tests that are tried first, since to collect all that reach a mutant may take longer than to run them.
NUM_LIKELY_FILES = 2
NUM_LIKELY_TESTS = 30
MAX_DATA_BYTES = 12 << 30


class Plugin:
    """Runs chosen tests in a chosen order, with few and repeatable examples of hypothesis."""

    def __init__(self, chosen: Sequence[str] | None = None) -> None:
        self.chosen = chosen
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Choose, order, and take fewer examples."""
        if self.chosen is not None:
            by_id = {item.nodeid: item for item in items}
            items[:] = [by_id[test] for test in self.chosen if test in by_id]
        for item in items:
            _take_fewer_examples(item)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Measure coverage for this test, if at all."""
        if measured := coverage.Coverage.current():
            measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how long a test took and whether it failed."""
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that cannot be imported."""
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
    """Import what takes long and starts no thread, so that each run of tests can fork off with it."""
    for name in HEAVY_IMPORTS:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"


def measure_reach(results: Path) -> None:
    """Run all tests once and write down which of them reach which line, and how long they take."""
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
    """Which tests reach a place, in the order in which to run them."""

    def __init__(self, results: Path) -> None:
        written = json.loads(results.read_text())
        self._lines: dict[str, dict[str, list[str]]] = written["lines"]
        self.seconds: dict[str, float] = written["seconds"]
        self._left_out = {*written["failed"], ""}

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach a mutant, quick ones and different ones first.

        A place that only an import reaches concerns the whole module, one that nothing reaches the processes.
        """
        lines = self._lines.get(mutant.file, {})
        first, last = mutant.lines
        for chosen in (range(first, last + 1), range(1, 10**4)):
            found = {test for line in chosen for test in lines.get(str(line), ())} - self._left_out
            if found:
                return self._in_order(found)
        return self._in_order({test for test in self.seconds if test.startswith(WITH_PROCESSES)})

    def likely(self, mutant: Mutant, tests: Sequence[str]) -> list[str]:
        """Return the first of the tests in those files of the mutant's room that reach it most often."""
        folder = f"tests/{Path(mutant.file).parts[2]}/"
        files = Counter(test.split("::")[0] for test in tests)
        ranked = sorted(files, key=lambda file: (not file.startswith(folder), -files[file]))[
            :NUM_LIKELY_FILES
        ]
        return [test for test in tests if test.split("::")[0] in ranked][:NUM_LIKELY_TESTS]

    def _in_order(self, tests: set[str]) -> list[str]:
        """The quickest case of each function, then the second of each, and so on."""
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
        seconds: how long that takes without a mutant.
        log: what pytest prints goes there.
    """
    failed = log.with_suffix(".failed")
    failed.unlink(missing_ok=True)

    def run() -> int:
        limit = int(15 + 3 * seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
        sys.dont_write_bytecode = True  # mutants must not become what later runs import
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
    """Run a function in a process group of its own and return its status, SIGKILL if it took too long."""
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
            os.killpg(pid, signal.SIGKILL)  # what the tests started and left behind
        return status
