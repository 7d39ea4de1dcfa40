"""Model names to directories, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from quire.errors import ModelNotFoundError
from quire.models.checkpoints import hub


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert hub.resolve_model(str(tmp_path)) == tmp_path


def test_the_built_in_model_is_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "_BUILT_IN_DIRECTORY", tmp_path)
    with pytest.raises(ModelNotFoundError, match="incomplete"):
        hub.resolve_model("mini")
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_model("mini") == tmp_path


def test_a_hub_name_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **kwargs: Any) -> str:
        asked.update(kwargs, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    assert asked["name"] == "Qwen/Qwen3-0.6B"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(pattern.endswith(".bin") for pattern in asked["allow_patterns"])
    files = ["model-00001-of-00002.safetensors", "consolidated.safetensors", "original/params.json"]
    assert list(filter_repo_objects(files, **asked_patterns(asked))) == files[:1]


def asked_patterns(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}


def test_what_was_tried_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(name: str, **kwargs: Any) -> str:
        raise OSError("no route to the hub\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFoundError, match=r"no directory of that name.*no route to the hub$"):
        hub.resolve_model("some/model")


def test_a_name_that_no_hub_has(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="not a valid hub name"):
        hub.resolve_model(str(tmp_path / "not" / "here"))


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelNotFoundError, match="is a file"):
        hub.resolve_model(str(file))
