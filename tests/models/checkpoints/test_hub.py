"""Names of models: short ones, and what may have been meant by those that no model has."""

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
        ("mini-embeds", "mini-embed"),
        ("./qwen3-smal", "qwen3-small"),
        ("llama.gguff", "llama.gguf"),
        ("Qwen/Qwen3-0.6", "Qwen/Qwen3-0.6B"),
        ("./minni", "mini"),
        ("qwen3-0.6", "Qwen3-0.6B"),
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


@pytest.mark.parametrize(
    ("name", "asked_for"),
    [
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("gpt2", "gpt2"),
        ("Gpt2", "gpt2"),
        ("bert-base", "bert-base"),
        ("other/Qwen3-0.6B", "other/Qwen3-0.6B"),
    ],
)
def test_the_last_part_of_a_downloaded_models_name_is_enough(at_hand, tmp_path, monkeypatch, name, asked_for):
    (tmp_path / "cache" / "models--gpt2").mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: tmp_path / name)
    assert resolve_model(name) == tmp_path / asked_for


def test_the_last_part_of_several_names_is_not(at_hand, tmp_path):
    (tmp_path / "cache" / "models--unsloth--Qwen3-0.6B").mkdir()
    with pytest.raises(
        ModelNotFoundError, match=r"short for Qwen/Qwen3-0\.6B and unsloth/Qwen3-0\.6B; give one"
    ):
        resolve_model("qwen3-0.6b")


def test_a_name_in_full_is_not_short_for_another(at_hand, tmp_path, monkeypatch):
    for name in ("models--gpt2", "models--someone--GPT2"):
        (tmp_path / "cache" / name).mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: tmp_path / name)
    assert resolve_model("gpt2") == tmp_path / "gpt2"
