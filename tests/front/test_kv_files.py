"""Saving and restoring one prompt's KV: the same bits elsewhere, and a reason wherever it is refused."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints import make_checkpoint
from insides import always_load, connector_of
from quire import LLM, AsyncLLM, SamplingParams
from quire.cli.main import app
from quire.errors import KVFileError
from quire.front.arguments import engine_config
from quire.models.checkpoints.hub import resolve_model

PROMPT = list(range(100, 100 + 10 * 16 + 5))
OPTIONS = {"num_threads": 1, "num_kv_blocks": 64, "kv_tier": "memory"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)


def open_llm(model: str = "mini", **options) -> LLM:
    llm = LLM(model, **{**OPTIONS, **options})
    always_load(connector_of(llm))
    return llm


def answer(llm: LLM, prompt=PROMPT, **options) -> list:
    [output] = llm.generate([prompt], GREEDY, **options)
    [completion] = output.outputs
    return [
        completion.token_ids,
        [[value.logprob for value in each.values()] for each in completion.logprobs],
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list]:
    """A file, and the answer of the engine that wrote it."""
    path = tmp_path_factory.mktemp("kv") / "prompt.kv"
    with open_llm() as llm:
        right = answer(llm)
        assert llm.save_kv(PROMPT, path) == 160
    return path, right


def test_another_engine_goes_on_with_the_same_bits(saved):
    path, right = saved
    with open_llm() as llm:
        assert llm.restore_kv(path) == PROMPT[:160]
        assert answer(llm) == right
        assert llm.stats().num_loaded_tokens == 160
        assert llm.restore_kv(path) == PROMPT[:160], "restoring twice is no error"


def test_what_was_not_computed_yet_is_computed_to_be_saved(tmp_path, saved):
    with open_llm(kv_tier_min_uses=3) as llm:
        assert llm.save_kv(PROMPT, tmp_path / "again.kv") == 160
    assert (tmp_path / "again.kv").read_bytes() == saved[0].read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again.kv"]


def test_a_conversation_is_saved_as_its_prompt(tmp_path):
    messages = [{"role": "user", "content": "What is a KV block, what is a token, and what is 27 + 58?"}]
    with open_llm() as llm:
        assert llm.save_kv(messages, tmp_path / "talk.kv") == 16
        [output] = llm.chat(messages, GREEDY)
        assert llm.restore_kv(tmp_path / "talk.kv") == list(output.prompt_token_ids)[:16]


def test_kv_is_found_only_with_the_salt_it_was_restored_for(saved):
    with open_llm() as llm:
        llm.restore_kv(saved[0], cache_salt="tenant")
        answer(llm)
        assert llm.stats().num_loaded_tokens == 0
        assert answer(llm, cache_salt="tenant") == saved[1]
        assert llm.stats().num_loaded_tokens == 160


async def test_an_engine_in_a_process_of_its_own_saves_and_restores(tmp_path, saved, preloaded_engines):
    llm = AsyncLLM(engine_config("mini", OPTIONS))
    try:
        assert await llm.save_kv(PROMPT, tmp_path / "async.kv") == 160
        assert await llm.restore_kv(saved[0]) == PROMPT[:160]
        with pytest.raises(KVFileError, match="No such file"):
            await llm.restore_kv(tmp_path / "missing.kv")
    finally:
        await llm.shutdown()
    assert (tmp_path / "async.kv").read_bytes() == saved[0].read_bytes()


# -- what is refused ---------------------------------------------------------------------------------------


def with_other_rope(directory: Path) -> str:
    model = directory / "model"
    shutil.copytree(resolve_model("mini"), model)
    config = json.loads((model / "config.json").read_text())
    config["rope_theta"] = config.get("rope_theta", 10000.0) * 2
    config.pop("rope_parameters", None)
    (model / "config.json").write_text(json.dumps(config))
    return str(model)


def with_other_weights(directory: Path) -> str:
    model = directory / "model"
    shutil.copytree(resolve_model("mini"), model)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1000, 2)
        [byte] = file.read(1)
        file.seek(-1000, 2)
        file.write(bytes([byte ^ 1]))
    return str(model)


@pytest.mark.formats
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("differing", "options"),
    [
        ("dtype", {"dtype": "float32", "kv_cache_dtype": "bfloat16"}),
        ("KV dtype", {"kv_cache_dtype": "int8"}),
        ("block size", {"block_size": 32}),
        ("quantization", {"quantization": "int8"}),
        ("sparse prefill", {"use_sparse_attention": True}),
        ("rope", {"model": with_other_rope}),
        ("model", {"model": with_other_weights}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kv_that_was_computed_otherwise_is_refused_with_the_reason(saved, tmp_path, differing, options):
    made = options.get("model")
    options = {**options, **({"model": made(tmp_path)} if made else {})}
    with open_llm(**options) as llm:
        with pytest.raises(KVFileError, match=r"does not belong to this engine; different: ") as refused:
            llm.restore_kv(saved[0])
        reasons = str(refused.value).split("does not belong to this engine; different: ")[1]
        assert f"{differing} (" in reasons
        assert ("block size (" in reasons) == (differing == "block size")
        assert llm.stats().kv_connector.num_stored_blocks == 0


def test_kv_of_weights_that_were_replaced_under_the_engine_is_neither_saved_nor_restored(saved, tmp_path):
    loaded = tmp_path / "loaded"
    shutil.copytree(resolve_model("mini"), loaded)
    with open_llm(str(loaded)) as llm:
        other = Path(with_other_weights(tmp_path)) / "model.safetensors"
        other.replace(loaded / "model.safetensors")
        with pytest.raises(KVFileError, match="have been replaced"):
            llm.save_kv(PROMPT, tmp_path / "prompt.kv")
        with pytest.raises(KVFileError, match="have been replaced"):
            llm.restore_kv(saved[0])
        assert not (tmp_path / "prompt.kv").exists()
        assert llm.stats().kv_connector.num_stored_blocks == 10, "of the prompt that was to be saved"


def damaged(path: Path, directory: Path, offset: int) -> Path:
    copy = directory / "damaged.kv"
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    copy.write_bytes(content)
    return copy


@pytest.mark.parametrize(
    ("offset", "reason"),
    [(2, "holds no saved KV"), (40, "header .* is damaged"), (-5000, "block 9 of 10 .* is damaged")],
)
def test_damage_is_refused(saved, tmp_path, offset, reason):
    path, right = saved
    with open_llm() as llm:
        with pytest.raises(KVFileError, match=reason):
            llm.restore_kv(damaged(path, tmp_path, offset))
        assert llm.stats().kv_connector.num_stored_blocks == (9 if offset == -5000 else 0)
        assert answer(llm) == right


def test_a_file_that_is_cut_off_is_refused(saved, tmp_path):
    content = saved[0].read_bytes()
    with open_llm() as llm:
        for size in (0, 10, 300, 5000, len(content) // 2):
            (tmp_path / "cut.kv").write_bytes(content[:size])
            with pytest.raises(KVFileError, match=r"holds no saved KV|is damaged"):
                llm.restore_kv(tmp_path / "cut.kv")


def test_without_a_tier_neither_works(saved, tmp_path):
    with open_llm(kv_tier="") as llm:
        with pytest.raises(KVFileError, match="this engine has none; set kv_tier"):
            llm.restore_kv(saved[0])
        with pytest.raises(KVFileError, match="this engine has none; set kv_tier"):
            llm.save_kv(PROMPT, tmp_path / "a.kv")


def test_a_tier_that_is_too_small_is_named(saved, tmp_path):
    with open_llm(kv_tier_size=4 * 32_768 / 1e9) as llm:
        with pytest.raises(
            KVFileError, match="only 64 of 160 tokens fit into the KV tier; raise kv_tier_size"
        ):
            llm.restore_kv(saved[0])
        with pytest.raises(
            KVFileError, match="stores only 64 of the prompt's 165 tokens; raise kv_tier_size"
        ):
            llm.save_kv(PROMPT, tmp_path / "a.kv")
    assert not list(tmp_path.iterdir())


def test_a_tier_that_another_engine_writes_is_named(saved, tmp_path):
    tier = {"kv_tier": "disk", "kv_tier_path": str(tmp_path)}
    with open_llm(**tier), open_llm(**tier) as llm:  # noqa: SIM117
        with pytest.raises(KVFileError, match="written by another engine"):
            llm.restore_kv(saved[0])


def test_a_prompt_shorter_than_a_block_has_nothing_to_save(tmp_path):
    with open_llm() as llm, pytest.raises(KVFileError, match=r"15 tokens, .* blocks of 16: there is nothing"):
        llm.save_kv(PROMPT[:15], tmp_path / "a.kv")


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with open_llm() as llm, pytest.raises(KVFileError, match=r"cannot be written to .*: No such file"):
        llm.save_kv(PROMPT, tmp_path / "nowhere" / "a.kv")


def test_only_regular_files_are_read_and_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open_llm() as llm:
        for call in (lambda: llm.save_kv(PROMPT, pipe), lambda: llm.restore_kv(pipe)):
            with pytest.raises(KVFileError, match="pipe is not a regular file"):
                call()
    assert pipe.is_fifo()


def test_a_disk_that_fails_is_named(saved, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    with open_llm() as llm:
        with pytest.raises(KVFileError, match="cannot be read from /proc/self/mem: Input/output error"):
            llm.restore_kv("/proc/self/mem")  # whose first page is never mapped
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(KVFileError, match=f"cannot be read from {saved[0]}: Input/output error"):
            llm.restore_kv(saved[0])


# -- the command line --------------------------------------------------------------------------------------


def test_the_command_line_saves_and_restores(tmp_path):
    file, tier = str(tmp_path / "a.kv"), ["--kv-tier-path", str(tmp_path / "tier"), "--num-kv-blocks", "64"]
    prompt = " ".join(["What is a KV block?"] * 8)
    result = CliRunner().invoke(app, ["kv", "save", file, prompt, "--raw", "--num-kv-blocks", "64"])
    assert result.exit_code == 0, result.output
    saved_tokens = int(result.stdout.split("the KV of ")[1].split()[0])
    assert saved_tokens >= 16
    result = CliRunner().invoke(app, ["kv", "restore", file, *tier])
    assert f"restored the KV of {saved_tokens} tokens from {file}" in result.stdout
    with open_llm(kv_tier="disk", kv_tier_path=str(tmp_path / "tier")) as llm:
        llm.generate([prompt], GREEDY)
        assert llm.stats().num_loaded_tokens == saved_tokens


@pytest.mark.parametrize("command", [["kv"], ["kv", "save"]], ids=" ".join)
def test_the_prompt_of_the_example_fills_a_block(command: list[str], tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = CliRunner().invoke(app, [*command, "--help"]).stdout
    example = next(line for line in page.splitlines() if line.startswith("  quire kv save"))
    _, *arguments = shlex.split(example)
    result = CliRunner().invoke(app, [*arguments, "--num-kv-blocks", "64"])
    assert result.exit_code == 0, result.output


def test_the_command_line_takes_one_prompt(tmp_path):
    (tmp_path / "two.txt").write_text("one\ntwo\n")
    result = CliRunner().invoke(app, ["kv", "save", "a.kv", "--input", str(tmp_path / "two.txt")])
    assert result.exit_code == 2
    assert "2 prompts; a file holds the KV of one" in result.output


def test_windows_that_the_prefix_cache_lacks_are_computed_to_be_saved(tmp_path):
    model = str(make_checkpoint("gemma3", tmp_path / "model", max_position_embeddings=512, vocab_size=1536))
    prompt = [5 + 7 * place % 80 for place in range(10 * 16 + 5)]
    options = {"dtype": "float32"}
    with open_llm(model, **options) as llm:
        right = answer(llm, prompt)  # what is seen before the window is not kept, and not stored yet
        assert llm.save_kv(prompt, tmp_path / "prompt.kv") == 160
    with open_llm(model, **options) as llm:
        assert llm.restore_kv(tmp_path / "prompt.kv") == prompt[:160]
        assert answer(llm, prompt) == right
        assert llm.stats().num_loaded_tokens == 160
