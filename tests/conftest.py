"""Settings and fixtures shared by all tests."""

import collections
import gc
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))  # `pythonpath` is not there yet

from case_ids import case_id
from interpreter_patches import hurry_the_interpreter

# Folders whose tests are marked `programs` (pyproject.toml says what the marks mean).
PROGRAMS = ("benchmarks", "examples", "tools")
# The hypothesis profile of `make test`: a quarter of each test's examples, but ten at least.
FEW_EXAMPLES = "few-examples"
# That of `make test-random`: other examples each time. The others make the same each time.
OTHER_EXAMPLES = "other-examples"

# Before anything loads torch: waiting threads sleep soon, as in the engine, and torch computes on one thread.
# Engines have a setting for their threads, and tests run beside each other.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton decides when it is imported whether kernels run in its interpreter; 0 runs their tests on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Some tests interrupt themselves. A shell that starts pytest in the background has it ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Let no test fail because the machine is busy, or by chance."""
    gc.disable()  # until all tests are collected: what imports and tests leave is no garbage
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.register_profile("quire", patient, derandomize=True)
        settings.load_profile("quire")
        settings.register_profile(FEW_EXAMPLES, settings.get_profile("quire"))  # --hypothesis-profile chooses
        settings.register_profile(OTHER_EXAMPLES, patient)


def pytest_collection_finish():
    """Keep collected tests and imported modules out of garbage collections, some of which tests ask for."""
    hurry_the_interpreter()
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config, items):
    """Mark tests of programs, and the first case of each test that is marked so as representative."""
    if config.getoption("--hypothesis-profile", default=None) == FEW_EXAMPLES:
        _take_few_examples(items)
    seen = set()
    for item in items:
        if item.path.parent.name in PROGRAMS:
            item.add_marker("programs")
        if item.function not in seen and item.get_closest_marker("first_case"):
            item.add_marker("representative")
        seen.add(item.function)


def _take_few_examples(items):
    """Reduce the examples of tests that say themselves how many they take; a profile changes only others."""
    from hypothesis import settings

    reduced = set()
    for item in items:
        test = getattr(item, "obj", None)
        holder, attribute = getattr(test, "__func__", test), "_hypothesis_internal_use_settings"
        if item.name == "runTest":  # of a state machine
            holder, attribute = item.cls, "settings"
        given = getattr(holder, attribute, None)
        if isinstance(given, settings) and holder not in reduced:
            examples = min(given.max_examples, max(given.max_examples // 4, 10))
            setattr(holder, attribute, settings(given, max_examples=examples))
            reduced.add(holder)


def pytest_make_parametrize_id(val):
    """Name a case by its values."""
    return case_id(val)


def pytest_terminal_summary(terminalreporter):
    """Print how many tests each room has, and the seconds that they took with their fixtures."""
    tests, seconds = collections.Counter(), collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                room = "/".join(Path(report.nodeid.split("::")[0]).parts[:-1])
                tests[room] += report.when == "call" or report.skipped
                seconds[room] += report.duration
    if seconds:
        terminalreporter.section("tests and seconds by room")
    for room, duration in seconds.most_common():
        terminalreporter.write_line(f"{tests[room]:6} {duration:7.1f}  {room}")


@pytest.fixture(scope="session", autouse=True)
def own_state_directory(tmp_path_factory):
    """Let what Quire keeps about its runs not end up in the user's files."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture
def preloaded_engines():
    """Let processes of engines and fronts start with torch imported (tests/support/preloaded.py)."""
    import preloaded

    with preloaded.engines():
        yield


@pytest.fixture(scope="session")
def slow_steps_file(tmp_path_factory):
    """Let engines with a `SlowScheduler` know the file of `slow_steps`; for fixtures that start them."""
    from engine_schedulers import SLOW_STEPS  # imports Quire

    path = tmp_path_factory.mktemp("engines") / "slow_steps"
    os.environ[SLOW_STEPS] = str(path)
    return path


@pytest.fixture
def slow_steps(slow_steps_file):
    """Path of a file that is not there yet; while it is, engines with a `SlowScheduler` are slow."""
    yield slow_steps_file
    slow_steps_file.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """Directory of a random Qwen3 of 512 tokens' length, in float32."""
    from checkpoints import make_checkpoint  # imports transformers, which not every test needs

    return str(make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3"))
