"""Write a trained `mini` as a Hugging Face folder: `python tools/mini/export.py --run DIR --to DIR`.

The folder holds config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json,
tokenizer_config.json and eval.jsonl, the held-out prompts with their correct answers.  `--check` then loads
the folder with `transformers`: logits must equal those of the training code, and each evaluation prompt is
answered greedily, token by token.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import tokenizer as tok
import torch
from batches import format_rates
from model import Mini, MiniConfig
from safetensors.torch import load_file
from tool_data import answer_text, evaluation_set

MAX_ANSWER_TOKENS = 160
CHECK_ROWS = 32  # prompts of similar length answered together
LOGIT_TOLERANCE = 1e-3  # float32 on both sides; only the order of additions differs


def tokenizer_config(tokenizer_file: Path) -> dict:
    """The content of tokenizer_config.json."""
    added = json.loads(tokenizer_file.read_text())["added_tokens"]
    return {
        "added_tokens_decoder": {str(token.pop("id")): token for token in added},
        "bos_token": None,
        "chat_template": tok.CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": tok.END,
        "model_max_length": MiniConfig().max_position_embeddings,
        "pad_token": tok.END_OF_TEXT,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def generation_config() -> dict:
    """The content of generation_config.json: greedy, ends at <|end|> or <|endoftext|>."""
    return {"do_sample": False, "eos_token_id": [1, 0], "pad_token_id": 0}


def write_json(path: Path, content: dict) -> None:
    """A JSON file as Hugging Face writes it."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def export(run: Path, to: Path) -> None:
    """Write the folder `to` from the newest weights in `run`."""
    to.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "tokenizer.json"):
        # Copy and rename: processes that are reading the old file keep it.
        shutil.copyfile(run / name, to / f"{name}.tmp")
        (to / f"{name}.tmp").replace(to / name)
    write_json(to / "config.json", MiniConfig().to_hf())
    write_json(to / "generation_config.json", generation_config())
    write_json(to / "tokenizer_config.json", tokenizer_config(to / "tokenizer.json"))
    rows = evaluation_set(tok.load(to / "tokenizer.json"))
    (to / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@torch.no_grad()
def check_logits(folder: Path, reference: torch.nn.Module) -> float:
    """Largest difference of logits between the training code and `transformers`, both in float32."""
    mini = Mini(MiniConfig())
    mini.load_state_dict({n: w.float() for n, w in load_file(folder / "model.safetensors").items()})
    ids = torch.randint(5, MiniConfig().vocab_size, (2, 300), generator=torch.Generator().manual_seed(0))
    return (mini.logits(mini.hidden(ids)) - reference(ids).logits).abs().max().item()


@torch.no_grad()
def answer(model: torch.nn.Module, tokenizer: object, rows: list[dict]) -> list[str]:
    """Greedy answers of `model` to evaluation rows of similar prompt length."""
    prompts = [
        tokenizer.apply_chat_template(
            r["messages"], tools=r.get("tools"), add_generation_prompt=True, tokenize=False
        )
        for r in rows
    ]
    inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    tokens = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    return tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def check(folder: Path, dtype: torch.dtype, misses: int) -> None:
    """Load the folder with `transformers`, compare logits, answer every prompt and print the accuracy."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    difference = check_logits(folder, reference)
    print(f"largest difference of logits: {difference:.2e}")
    if difference > LOGIT_TOLERANCE:
        raise SystemExit("the exported model does not compute what the training code computes")
    model, tokenizer = reference.to(dtype), AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    rows.sort(key=lambda r: (r["task"], len(r["messages"][-1]["content"])))
    hits: dict[str, list[bool]] = {}
    for start in range(0, len(rows), CHECK_ROWS):
        chunk = rows[start : start + CHECK_ROWS]
        for row, text in zip(chunk, answer(model, tokenizer, chunk), strict=True):
            expected = answer_text(row)
            hits.setdefault(row["task"], []).append(text == expected)
            if text != expected and misses > 0:
                misses -= 1
                question = row["messages"][-1]["content"][-80:]
                print(f"  {row['task']}: {question!r} -> {text!r}, not {expected!r}")
    print({task: len(h) for task, h in hits.items()})
    print(format_rates({task: sum(h) / len(h) for task, h in hits.items()}))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="output folder of train.py; omit to check only")
    parser.add_argument("--to", type=Path, required=True, help="folder of the model")
    parser.add_argument("--check", action="store_true", help="load and answer with transformers")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the check")
    parser.add_argument("--misses", type=int, default=20, help="maximum number of wrong answers to print")
    args = parser.parse_args()
    if args.run:
        export(args.run, args.to)
    if args.check:
        check(args.to, getattr(torch, args.dtype), args.misses)


if __name__ == "__main__":
    main()
