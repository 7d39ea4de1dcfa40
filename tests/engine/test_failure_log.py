"""What is said of an engine that could not be built, and what a file keeps."""

import logging

import pytest

from quire.engine.process import main as process
from quire.engine.process.main import log_failed_start
from quire.errors import ModelError


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "quire"


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_error_that_says_what_to_do_is_all_that_is_said(state, caplog):
    info = log_failed_start(raised(ModelError("model.safetensors cannot be read")))
    assert (info.kind, info.message) == ("ModelError", "model.safetensors cannot be read")
    assert "in raised\n" in (state / "engine.log").read_text()
    assert caplog.text == ""


def test_another_error_names_the_file_with_its_traceback(state, caplog):
    info = log_failed_start(raised(KeyError("lost \udc80")))
    assert info.message.endswith(f" (the traceback is in {state / 'engine.log'})")
    assert "KeyError: 'lost" in (state / "engine.log").read_text()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("error", "is_shown"), [(ModelError("no weights"), False), (ZeroDivisionError("by zero"), True)]
)
def test_without_the_file_only_such_an_error_has_its_traceback_shown(
    tmp_path, monkeypatch, caplog, error, is_shown
):
    (tmp_path / "quire").touch()  # where the directory should be
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with caplog.at_level(logging.DEBUG):
        assert log_failed_start(raised(error)).message == str(error)
    assert ("in raised\n" in caplog.text) == is_shown


def test_the_file_begins_anew_when_it_is_full(state, monkeypatch):
    monkeypatch.setattr(process, "MAX_LOG_BYTES", 1000)
    sizes = []
    for number in range(20):
        log_failed_start(raised(ModelError(f"failure {number}")))
        sizes.append((state / "engine.log").stat().st_size)
        assert f"failure {number}" in (state / "engine.log").read_text()
    assert max(sizes) < 1000 + sizes[0] * 2
    assert sizes != sorted(sizes)
