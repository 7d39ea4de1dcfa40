"""Names of models that are not there: what may have been meant."""

import pytest

from quire.errors import ModelNotFoundError
from quire.models.checkpoints.hub import resolve_model


@pytest.fixture
def at_hand(tmp_path, monkeypatch):
    """A directory and a GGUF file here, and a model in the hub's cache; the hub is not reached."""
    (tmp_path / "qwen3-small").mkdir()
    (tmp_path / "llama.gguf").touch()
    (tmp_path / "notes.txt").touch()
    cache = tmp_path / "cache"
    (cache / "models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    (cache / "datasets--Qwen--Qwen3-0.7B").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    monkeypatch.chdir(tmp_path)


def unreachable(*_, **__):
    raise OSError("no network")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("minii", "mini"),
        ("./qwen3-smal", "qwen3-small"),
        ("llama.gguff", "llama.gguf"),
        ("Qwen/Qwen3-0.6", "Qwen/Qwen3-0.6B"),
        ("./minni", "mini"),
    ],
)
def test_the_nearest_model_at_hand_is_named(at_hand, name, meant):
    with pytest.raises(ModelNotFoundError, match=f"did you mean '{meant}'\\?"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["notes", "bert-base", "missing/directory/x", "qwen"])
def test_a_name_like_no_other_gets_no_hint(at_hand, name):
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name)
    assert "did you mean" not in str(caught.value)
