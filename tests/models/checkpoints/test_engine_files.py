"""The files that an engine's configuration names: revision, tokenizer, chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quire.config import ChatTemplateConfig, EngineConfig
from quire.errors import ConfigError, ModelError
from quire.models.checkpoints.engine_files import resolve_files
from quire.models.checkpoints.hub import resolve_model
from quire.models.checkpoints.tokenizers.engine_tokenizer import engine_tokenizer
from quire.models.checkpoints.tokenizers.reading import MAX_TEMPLATE_BYTES, read_tokenizer

MINI = resolve_model("mini")
UPPER = "{{ bos_token }}{% for one in messages %}{{ one.content | upper }}{% endfor %}"


def resolved(**fields: str) -> EngineConfig:
    templating = ChatTemplateConfig(chat_template=fields.pop("chat_template", ""))
    return resolve_files(EngineConfig(chat_templating=templating, **fields))[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The built-in model without its tokenizer."""
    shutil.copytree(MINI, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*", "*.safetensors"))
    return tmp_path / "model"


@pytest.mark.parametrize("revision", ["", "v1.0"])
def test_a_revision_is_asked_of_the_hub(revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **how: asked.update(how) or tmp_path
    )
    resolved(model="Qwen/Qwen3-0.6B", revision=revision)
    assert asked["revision"] == (revision or None)


def test_a_model_on_this_machine_has_no_revision():
    with pytest.raises(ConfigError, match=r"revision is 'v1.0', but 'mini' is on this machine"):
        resolved(revision="v1.0")


@pytest.mark.parametrize("is_file", [True, False])
def test_a_given_template_is_used(is_file: bool, tmp_path: Path):
    (tmp_path / "upper.jinja").write_text(UPPER)
    config = resolved(chat_template=str(tmp_path / "upper.jinja") if is_file else UPPER)
    tokenizer = engine_tokenizer(config, MINI)
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    finally:
        tokenizer.close()
    assert text.endswith("HELLO")
    assert tokenizer.fingerprint != read_tokenizer(MINI).fingerprint


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ("no-such.jinja", "neither a file nor a template"),
        ("{% if %}", "not valid jinja2"),
        ("{{ x }}" * MAX_TEMPLATE_BYTES, "characters; at most"),
        (str(MINI), "neither a file nor a template"),
        (str(MINI / "model.safetensors"), "at most 262144 are read"),
    ],
    ids=["missing", "invalid", "long", "directory", "large"],
)
def test_a_template_that_cannot_be_used_is_refused(given: str, refusal: str):
    with pytest.raises(ConfigError, match=refusal):
        resolved(chat_template=given)


def test_another_tokenizer_is_used(model: Path):
    config = resolved(model=str(model), tokenizer="mini")
    ours, theirs = engine_tokenizer(config, model), read_tokenizer(MINI)
    assert ours.encode("What is a block?") == theirs.encode("What is a block?")
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.chat_template_source == theirs.chat_template_source


def test_the_models_own_ends_of_sequences_count_with_another_tokenizer(model: Path):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    config = resolved(model=str(model), tokenizer="mini")
    assert 7 in engine_tokenizer(config, model).eos_token_ids


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model: Path):
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, "vocab_size": 100}))
    (model / "generation_config.json").unlink()
    config = resolved(model=str(model), tokenizer="mini")
    with pytest.raises(ModelError, match="has 100; give the tokenizer that the model was trained with"):
        engine_tokenizer(config, model)
