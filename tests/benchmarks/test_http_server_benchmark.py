"""The benchmarks of the HTTP server, with a few requests."""

from __future__ import annotations

import sys
from pathlib import Path

import embedding_requests
import http_server
import pytest

import subprocesses


def test_versions_serve_side_by_side() -> None:
    source = str(Path(http_server.__file__).parents[1] / "src")
    options = ["--rounds", "1", "--requests", "8"]
    done = subprocesses.run([sys.executable, http_server.__file__, source, source, *options])
    assert done.returncode == 0, done.stderr
    _, _, *rows = done.stdout.splitlines()
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {number}", source] for number in (1, 1, 16, 16)]


@pytest.mark.programs
def test_a_server_embeds_short_texts() -> None:
    options = ["--rounds", "1", "--requests", "8"]
    done = subprocesses.run([sys.executable, embedding_requests.__file__, *options])
    assert done.returncode == 0, done.stderr
    _, _, *rows = done.stdout.splitlines()
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 16"]
    assert all(float(row.split(" | ")[1].replace(",", "")) > 0 for row in rows)
