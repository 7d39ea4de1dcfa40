"""Reading weights where their files are mapped, and giving the pages back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from gguf_checkpoints import write_gguf
from safetensors.torch import load_file

from checkpoints import make_checkpoint
from quire.errors import ModelError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.mapped_files import drop_pages
from quire.models.weights import WeightSource

WIDE = WeightSource("model.layers.0.mlp.up_proj.weight", (2048, 128))  # 1 MiB in float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mapped") / "model"
    return make_checkpoint("llama", path, hidden_size=128, intermediate_size=2048, head_dim=32)


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def files(request: pytest.FixtureRequest, model: Path) -> Path:
    return model if request.param == "safetensors" else _gguf(model)


def _gguf(model: Path) -> Path:
    return write_gguf(model, "llama", "F32")[0]


def _resident_bytes(address: int) -> int:
    """Return how much of the mapping at `address` is in memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no mapping at {address:#x}")


def test_a_float_matrix_lies_where_the_file_is_mapped(files: Path) -> None:
    with Checkpoint(files) as checkpoint:
        first, second = checkpoint.weight(WIDE), checkpoint.weight(WIDE)
        assert isinstance(first, torch.Tensor)
        assert isinstance(second, torch.Tensor)
        assert first.data_ptr() == second.data_ptr()


def test_released_pages_leave_memory_and_come_back(files: Path, model: Path) -> None:
    wanted = load_file(model / "model.safetensors")[WIDE.name]
    with Checkpoint(files) as checkpoint:
        weight = checkpoint.weight(WIDE)
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(weight, wanted)
        before = _resident_bytes(weight.data_ptr())
        checkpoint.release(WIDE)
        assert _resident_bytes(weight.data_ptr()) <= before - weight.nbytes + 2 * 4096
    assert torch.equal(weight, wanted)  # also when the checkpoint is closed


def test_the_neighbours_of_what_is_released_stay(model: Path) -> None:
    stored = load_file(model / "model.safetensors")
    with Checkpoint(model) as checkpoint:
        sources = [WeightSource(name, tuple(weight.shape)) for name, weight in stored.items()]
        weights = {source.name: checkpoint.weight(source) for source in sources}
        for source in sources:
            checkpoint.release(source)
            for name, weight in weights.items():
                assert torch.equal(weight, stored[name])


def test_a_directory_with_config_and_gguf_is_a_hugging_face_checkpoint(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .* nor a GGUF file"):
        Checkpoint(tmp_path)


def test_pages_between_the_rows_of_a_weight_are_released_with_them(model: Path) -> None:
    with Checkpoint(model) as checkpoint:
        weight = checkpoint.weight(WIDE)
        assert isinstance(weight, torch.Tensor)
        assert float(weight.sum()) != 0
        before = _resident_bytes(weight.data_ptr())
        drop_pages(weight[::2])
        assert _resident_bytes(weight.data_ptr()) <= before - weight.nbytes + 2 * 4096
