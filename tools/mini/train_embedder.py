"""Train `mini-embed` from scratch: `python tools/mini/train_embedder.py --to src/quire/mini-embed`.

Pairs of texts that belong together get similar rows, and each query other rows than the other passages of
its batch (van den Oord et al. 2018, "Representation learning with contrastive predictive coding"; both ways).
The loss also counts for the first numbers of the rows, so that those can be used by themselves (Kusupati et
al. 2022, "Matryoshka representation learning").

The folder holds config.json, model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json, what
sentence-transformers reads (modules.json and the files that it names), and pairs.jsonl, the held-out pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import time
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # no spinning between parallel regions, which would take time from other processes

import torch
import torch.nn.functional as F
from batches import fast_precision
from export import write_json
from pairs import Pair, PairSampler, evaluation_pairs, training_texts
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import ModernBertConfig, ModernBertModel

VOCAB_SIZE = 4096
PAD, UNKNOWN, START, END = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
DIMENSIONS = (192, 64)  # of the rows, and the first numbers that are trained to stand alone
MAX_LENGTH = 512  # of texts; rotary positions reach beyond those that are trained
TRAINED_LENGTH = 48
PAIRS, CHUNK = 192, 64  # in a batch; texts of similar length that are computed together
TEMPERATURE = 0.05
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY = 2e-3, 50, 0.05
LOG_STEPS = 25


def build_tokenizer() -> Tokenizer:
    """A WordPiece tokenizer of lower-case words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}",
        pair=f"{START} $A {END} $B {END}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (START, END)],
    )
    return tokenizer


def model_config() -> ModernBertConfig:
    """The sizes of the network; each layer sees the whole text."""
    config = ModernBertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=DIMENSIONS[0],
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=MAX_LENGTH,
        global_attn_every_n_layers=1,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        cls_token_id=SPECIAL_TOKENS.index(START),
        sep_token_id=SPECIAL_TOKENS.index(END),
        bos_token_id=SPECIAL_TOKENS.index(START),
        eos_token_id=SPECIAL_TOKENS.index(END),
    )
    config.matryoshka_dimensions = list(DIMENSIONS)
    return config


class Trainer:
    """Trains the weights; the seed determines pairs and first weights."""

    def __init__(self, tokenizer: Tokenizer, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.tokenizer = tokenizer
        self.steps = steps
        self.model = ModernBertModel(model_config())
        self.sampler = PairSampler(random.Random(seed))
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
            lr=LEARNING_RATE,
            betas=(0.9, 0.98),
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)

    def _rate(self, step: int) -> float:
        return min((step + 1) / WARMUP_STEPS, (self.steps - step) / (self.steps - WARMUP_STEPS))

    def run(self) -> None:
        """Take all steps, with a line of the log for some."""
        began = time.monotonic()
        losses = []
        for step in range(1, self.steps + 1):
            losses.append(self._step([self.sampler.pair() for _ in range(PAIRS)]))
            if step % LOG_STEPS == 0:
                mean = sum(losses[-LOG_STEPS:]) / LOG_STEPS
                print(f"step {step} loss {mean:.3f} {time.monotonic() - began:.0f} s", flush=True)

    def _step(self, pairs: list[Pair]) -> float:
        rows = self._rows([one.query for one in pairs] + [one.passage for one in pairs])
        loss = sum(
            contrastive_loss(rows[: len(pairs), :size], rows[len(pairs) :, :size], pairs)
            for size in DIMENSIONS
        )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def _rows(self, texts: list[str]) -> Tensor:
        """Means over the states of each text [texts, hidden size], not normalized."""
        ids = [one.ids[:TRAINED_LENGTH] for one in self.tokenizer.encode_batch(texts)]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        parts = []
        for start in range(0, len(order), CHUNK):
            chunk = [ids[i] for i in order[start : start + CHUNK]]
            mask = torch.tensor([[1] * len(one) + [0] * (len(chunk[-1]) - len(one)) for one in chunk])
            padded = torch.tensor([one + [0] * (len(chunk[-1]) - len(one)) for one in chunk])
            with fast_precision():
                states = self.model(input_ids=padded, attention_mask=mask).last_hidden_state
            parts.append((states.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return torch.cat(parts)[torch.tensor(order).argsort()]


def contrastive_loss(queries: Tensor, passages: Tensor, pairs: list[Pair]) -> Tensor:
    """Cross-entropy of finding each query's passage [pairs, size] in the batch, and the reverse.

    Pairs with the same passage do not count as wrong for each other.
    """
    logits = F.normalize(queries, dim=-1) @ F.normalize(passages, dim=-1).T / TEMPERATURE
    numbers: dict[str, int] = {}
    which = torch.tensor([numbers.setdefault(one.passage, len(numbers)) for one in pairs])
    same = (which[:, None] == which) & ~torch.eye(len(pairs), dtype=torch.bool)
    logits = logits.masked_fill(same, -torch.inf)
    target = torch.arange(len(pairs))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def save(model: ModernBertModel, tokenizer: Tokenizer, to: Path) -> None:
    """Write the folder of the model."""
    model.to(torch.bfloat16).save_pretrained(to)
    (to / "model.safetensors").chmod(0o644)
    tokenizer.save(str(to / "tokenizer.json"))
    write_json(
        to / "tokenizer_config.json",
        {
            "cls_token": START,
            "model_max_length": MAX_LENGTH,
            "pad_token": PAD,
            "sep_token": END,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": UNKNOWN,
        },
    )
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    write_json(to / "modules.json", modules)
    write_json(to / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH, "do_lower_case": False})
    (to / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": DIMENSIONS[0], "pooling_mode_mean_tokens": True}
    write_json(to / "1_Pooling" / "config.json", pooling)
    rows = [json.dumps(dataclasses.asdict(pair)) + "\n" for pair in evaluation_pairs()]
    (to / "pairs.jsonl").write_text("".join(rows))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="folder of the model")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trainer = Trainer(build_tokenizer(), args.steps, args.seed)
    trainer.run()
    save(trainer.model, trainer.tokenizer, args.to)


if __name__ == "__main__":
    main()
