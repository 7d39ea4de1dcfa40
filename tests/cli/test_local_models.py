"""`quire list` and `quire pull`, with a hub's cache that the test writes."""

import json
import os

import pytest
from typer.testing import CliRunner

from quire.cli.main import app


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache as the hub's client lays it out: blobs, and snapshots of links to them."""
    for name, size in (("models--Qwen--Qwen3-0.6B", 1500), ("datasets--a--b", 7)):
        blobs, snapshot = tmp_path / name / "blobs", tmp_path / name / "snapshots" / "abc"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (blobs / "123").write_bytes(b"x" * size)
        os.symlink(blobs / "123", snapshot / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_built_in_model_and_cached_ones_are_listed(cache):
    mini, embedder, cached = run("list").splitlines()
    assert mini.startswith("mini ")
    assert embedder.startswith("mini-embed ")
    assert cached.split() == [
        "Qwen/Qwen3-0.6B", "1.5", "kB", str(cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc")
    ]  # fmt: skip


def test_as_json(cache):
    mini, embedder, cached = map(json.loads, run("list", "--json").splitlines())
    assert (mini["name"], cached["name"], cached["bytes"]) == ("mini", "Qwen/Qwen3-0.6B", 1500)
    assert embedder["bytes"] <= 4_000_000, "the limit for what is in every wheel"


def test_without_a_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "none"))
    assert run("list").split()[0] == "mini"


def test_a_model_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: tmp_path / name)
    assert run("pull", "Qwen/Qwen3-0.6B") == f"{tmp_path}/Qwen/Qwen3-0.6B\n"
