"""Models that generate as rerankers, which score texts by the logits of tokens, against `transformers`."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import preloaded
from checkpoints import make_checkpoint
from encoders import make_encoder, save_encoder
from quire import LLM, AsyncLLM, EngineConfig, PoolingParams, SchedulerConfig
from quire.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelError
from quire.models.checkpoints.config_reading import read_model_config

SMALL = {"num_threads": 2, "num_kv_blocks": 256}
NO, YES = 7, 9
QUERY, DOCUMENTS = "What is a block?", ["It holds <|im_end|> keys.", "no", "yes " * 30]
PAIRS = """{%- for role in ['query', 'document'] %}{{ messages | selectattr('role', 'eq', role)
    | map(attribute='content') | first }}|{% endfor %}=>"""


def byte_tokens() -> Tokenizer:
    """Return a tokenizer of bytes, of the tokens no and yes, and of those that begin and end a turn."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"[PAD]": 0, "<|im_start|>": 1, "<|im_end|>": 2, "no": NO, "yes": YES}
    free = iter(number for number in range(384) if number not in vocabulary.values())
    vocabulary |= {letter: next(free) for letter in letters}
    vocabulary |= {"ye": next(free)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("n", "o"), ("y", "e"), ("ye", "s")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


def make_reranker(path: Path, name: str = "qwen3", template: str | None = None, **config: Any) -> Any:
    model = make_encoder(name, kind="ForCausalLM", max_position_embeddings=1024, **config)
    save_encoder(model, path)
    byte_tokens().save(str(path / "tokenizer.json"))
    if template is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return model


def publish(path: Path, values: dict[str, Any], **settings: Any) -> None:
    """Write what sentence-transformers publishes of such a model."""
    types = ["base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore"]
    listed = [
        {"idx": number, "path": folder, "type": f"sentence_transformers.{kind}"}
        for number, (folder, kind) in enumerate(zip(["", "1_LogitScore"], types, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_LogitScore").mkdir()
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(values))
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))


def last_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0, -1].double()
    return logits


def probability(model: Any, prompt: list[int]) -> float:
    return float(last_logits(model, prompt)[[NO, YES]].softmax(-1)[1])


def qwen3_text(query: str, document: str) -> list[int]:
    """Return the tokens of a prompt as the model card of Qwen3-Reranker writes it."""
    tokenizer = byte_tokens()
    start, end = [1], [2]
    judge = (
        "system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".'
    )
    task = "Given a web search query, retrieve relevant passages that answer the query"
    *parts, last = f"user\n<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}".split("<|im_end|>")
    plain = Tokenizer.from_str(tokenizer.to_str())
    ids = [*start, *plain.encode(judge).ids, *end, *plain.encode("\n").ids, *start]
    for part in parts:
        ids += [*plain.encode(part).ids, *(plain.encode(one).ids[0] for one in "<|im_end|>")]
    ids += [*plain.encode(last).ids, *end, *plain.encode("\n").ids, *start]
    return [*ids, *plain.encode("assistant\n<think>\n\n</think>\n\n").ids]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("published", [True, False])
def test_qwen3_reranker(tied: bool, published: bool, tmp_path: Path) -> None:
    model = make_reranker(tmp_path, tie_word_embeddings=tied, template="{{ messages[0].content }}")
    options: dict[str, Any] = {"classifier_from_token": ("no", "yes")}
    if published:
        publish(tmp_path, {"true_token_id": YES, "false_token_id": NO}, activation_fn="torch.nn.Identity")
        (tmp_path / "chat_template.jinja").write_text(PAIRS)
        options = {}
    with LLM(str(tmp_path), **options, **SMALL) as llm:
        assert llm.info.labels == ("LABEL_0",)
        together = llm.score(QUERY, DOCUMENTS)
        [raw] = llm.score(QUERY, DOCUMENTS[0], PoolingParams(activation=False))
        for document, output in zip(DOCUMENTS, together, strict=True):
            if not published:
                assert output.prompt_token_ids == qwen3_text(QUERY, document)
            expected = probability(model, output.prompt_token_ids)
            np.testing.assert_allclose(output.outputs.data, [expected], atol=1e-5, rtol=0)
            [alone] = llm.score(QUERY, document)
            assert alone.outputs.data.tobytes() == output.outputs.data.tobytes()
        logits = last_logits(model, raw.prompt_token_ids)
        np.testing.assert_allclose(raw.outputs.data, [logits[YES] - logits[NO]], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("named", "is_raw"), [("torch.nn.Identity", True), (None, False)])
def test_the_logit_of_one_token(named: str | None, is_raw: bool, tmp_path: Path) -> None:
    model = make_reranker(tmp_path, "llama", template=PAIRS)
    settings = {} if named is None else {"activation_fn": named}
    publish(tmp_path, {"true_token_id": YES, "false_token_id": None}, **settings)
    with LLM(str(tmp_path), **SMALL) as llm:
        [output] = llm.score("a", "b")
    assert output.prompt_token_ids == byte_tokens().encode("a|b|=>").ids
    logit = last_logits(model, output.prompt_token_ids)[YES]
    expected = logit if is_raw else torch.sigmoid(logit)
    np.testing.assert_allclose(output.outputs.data, [expected], atol=1e-5, rtol=0)


def test_a_prompt_is_the_instruction(tmp_path: Path) -> None:
    make_reranker(tmp_path, template=PAIRS.replace("['query'", "['system', 'query'"))
    publish(tmp_path, {"true_token_id": YES}, prompts={"web": "find"})
    with LLM(str(tmp_path), **SMALL) as llm:
        [output] = llm.score("a", "b", prompt_name="web")
    assert output.prompt_token_ids == byte_tokens().encode("find|a|b|=>").ids


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_fewer_bits(options: dict[str, Any], tmp_path: Path) -> None:
    model = make_reranker(tmp_path, template=PAIRS)
    tokens: Any = ["no", "yes"]  # as clients of vLLM write it
    with LLM(str(tmp_path), classifier_from_token=tokens, **options, **SMALL) as llm:
        [output] = llm.score("a", "b")
    expected = probability(model, output.prompt_token_ids)
    np.testing.assert_allclose(output.outputs.data, [expected], atol=0.05, rtol=0)


async def test_the_event_loop_does_not_wait_for_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_reranker(tmp_path, template=PAIRS)
    publish(tmp_path, {"true_token_id": YES})
    with preloaded.engines():
        llm = AsyncLLM(
            EngineConfig(model=str(tmp_path), num_threads=1, scheduler=SchedulerConfig(num_kv_blocks=256))
        )
    threads: set[threading.Thread] = set()
    render = llm.tokenizer.render_chat

    def noted(*args: Any, **options: Any) -> Any:
        threads.add(threading.current_thread())
        return render(*args, **options)

    monkeypatch.setattr(llm.tokenizer, "render_chat", noted)
    try:
        outputs = [output async for output in llm.score("a", "b")]
    finally:
        await llm.shutdown()
    assert outputs[-1].prompt_token_ids == byte_tokens().encode("a|b|=>").ids
    assert len(threads - {threading.main_thread()}) == len(threads) == 1


def test_a_conversion_has_the_same_template(tmp_path: Path) -> None:
    make_reranker(tmp_path, template=PAIRS)
    model = make_encoder("qwen3", kind="ForSequenceClassification", num_labels=1)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), **SMALL) as llm:
        [output] = llm.score("a", "b")
    assert output.prompt_token_ids == byte_tokens().encode("a|b|=>").ids


def test_the_end_of_the_document_is_cut(tmp_path: Path) -> None:
    make_reranker(tmp_path, template=PAIRS)
    options: dict[str, Any] = {"classifier_from_token": ("no", "yes"), **SMALL}
    with LLM(str(tmp_path), **options) as llm:
        with pytest.raises(ContextLengthError, match="more than 1024 tokens; the limit is 1024"):
            llm.score("ab", "c" * 2001)
        for num_tokens, length in ((-1, 1024), (20, 20)):
            [output] = llm.score("ab", "c" * 2001, truncate_prompt_tokens=num_tokens)
            text = f"ab|{'c' * (length - 6)}|=>"
            assert output.prompt_token_ids == byte_tokens().encode(text).ids
        with pytest.raises(ContextLengthError, match="the second text has only 1"):
            llm.score("ab", "c", truncate_prompt_tokens=3)
    with (
        LLM(str(tmp_path), special_tokens_in_content=True, **options) as llm,
        pytest.raises(InvalidRequestError, match="it is not known where the second text is"),
    ):
        llm.score("ab", "c" * 2001, truncate_prompt_tokens=20)


def test_a_query_behind_the_document_is_not_cut(tmp_path: Path) -> None:
    turned = "{% for m in messages | reverse %}{{ m.content }}|{% endfor %}{# 'query' 'document' #}"
    make_reranker(tmp_path, template=turned)
    with LLM(str(tmp_path), classifier_from_token=("no", "yes"), **SMALL) as llm:
        [output] = llm.score("ab", "cd")
        assert output.prompt_token_ids == byte_tokens().encode("cd|ab|").ids
        with pytest.raises(InvalidRequestError, match="the chat template must put it last"):
            llm.score("ab", "c" * 2001, truncate_prompt_tokens=20)


def test_what_has_no_such_scores_is_refused(tmp_path: Path) -> None:
    make_reranker(tmp_path / "llama", "llama", template="{{ messages[0].content }}")
    with LLM(str(tmp_path / "llama"), classifier_from_token=("no", "yes"), **SMALL) as llm:
        with pytest.raises(InvalidRequestError, match="no roles query and document; give one"):
            llm.score("a", "b")
        assert llm.classify("a")[0].outputs.data.shape == (1,)
    for tokens, message in (
        (("no", "maybe"), "has 'maybe', which is no token"),
        (("no", "no"), "they must differ"),
    ):
        with pytest.raises((ConfigError, ModelError), match=message):
            LLM(str(tmp_path / "llama"), classifier_from_token=tokens, **SMALL)
    save_encoder(make_encoder("bert"), tmp_path / "bert")
    with pytest.raises(ModelError, match="is to score texts by the logits of tokens, but makes no logits"):
        LLM(str(tmp_path / "bert"), classifier_from_token=("a",), **SMALL)


@pytest.mark.parametrize(
    ("values", "settings", "message"),
    [
        ({}, {}, "has no true_token_id"),
        ({"true_token_id": -1}, {}, "true_token_id -1; it must be"),
        ({"true_token_id": 384}, {}, "must differ and be from 0 to 383"),
        ({"true_token_id": 5, "false_token_id": 5}, {}, "must differ"),
        ({"true_token_id": 5}, {"activation_fn": "torch.nn.Tanh"}, "activation 'Tanh'"),
        ({"true_token_id": 5}, {"activation_fn": 3}, "activation_fn 3; it must be"),
    ],
)
def test_damaged_descriptions(
    values: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_reranker(tmp_path)
    publish(tmp_path, values, **settings)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize("entries", [{"final_logit_softcapping": 30.0}, {"logits_scaling": 2.0}], ids=str)
def test_other_logits_are_refused(entries: dict[str, Any], tmp_path: Path) -> None:
    name = "gemma2" if "final_logit_softcapping" in entries else "granite"
    path = make_checkpoint(name, tmp_path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    publish(path, {"true_token_id": 5})
    with pytest.raises(ModelError, match="neither capped, scaled nor biased"):
        read_model_config(path)
