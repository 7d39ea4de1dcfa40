"""Train `mini` from scratch: `python tools/mini/train.py --out DIR`, then with tools: `--out NEW --from DIR`.

One step takes two micro-batches: short tasks in rows of 256 tokens, and lists with questions about them in
rows of up to 1,536 tokens.  Only answers have a loss, and the output matrix is applied to their rows only.
Lists get longer: when nine in ten answers at the current level are correct, the next level starts; the last
level emphasizes the short tasks.  Tasks with more errors are drawn more often.  With `--from`, a third
micro-batch has conversations with tools in rows of 384 tokens.

The run continues from DIR/checkpoint.pt if that is there, and ends with DIR/model.safetensors and
DIR/tokenizer.json.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # no spinning between parallel regions, which would take time from other processes

import data
import tokenizer as tok
import torch
import torch.nn.functional as F
from batches import Batch, collate, evaluate, fast_precision, format_rates, right_answers
from model import Mini, MiniConfig
from muon import Muon
from safetensors.torch import load_file, save_file
from tool_data import evaluation_set, tool_conversation
from tool_needs import ToolSampler

SHORT_LENGTH = 256
TOOL_LENGTH = 384
SHORT_TASKS = {"qa": 2.0, "add": 1.0, "copy": 0.6, "reverse": 1.0}  # share of turns at equal accuracy
MUON_LR, ADAM_LR = 0.02, 3e-3
WARMUP_STEPS = 100
REOPEN_STEP, REOPEN_SHARE = 1400, 0.35  # from this step on, this share of the questions gets another opening
LOG_STEPS, SAVE_STEPS, EVAL_STEPS = 25, 100, 250


@dataclass(frozen=True)
class RetrievalShape:
    """`rows` conversations of `length` tokens, whose lists take `tokens` = (least, most) tokens."""

    length: int
    rows: int
    tokens: tuple[int, int]


SHAPES = (
    RetrievalShape(256, 12, (24, 100)),
    RetrievalShape(384, 10, (60, 250)),
    RetrievalShape(768, 5, (150, 640)),
    RetrievalShape(1536, 3, (500, 1440)),
)


@dataclass(frozen=True)
class Level:
    """The composition of a step at one level of list lengths."""

    chances: tuple[float, ...]  # of each of SHAPES
    short_rows: int = 5
    tool_rows: int = 0
    list_rows: float = 1.0  # share of the rows of the shape that are used
    colon_share: float = 0.4  # of lists; a colon between key and value makes the key harder to match


LEVELS = (
    Level((1.0,), colon_share=0.0),
    Level((0.3, 0.7)),
    Level((0.15, 0.25, 0.6)),
    Level((0.15, 0.2, 0.25, 0.4)),
    Level((0.15, 0.2, 0.25, 0.4), short_rows=16, list_rows=0.5),
)
TOOL_LEVEL = Level((0.15, 0.2, 0.25, 0.4), short_rows=4, tool_rows=15, list_rows=0.25)
PROMOTION = 0.9  # share of correct answers that starts the next level


@dataclass
class Progress:
    """What a checkpoint keeps besides weights and optimizer."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    level: int = 0
    accuracy: dict[str, float] = field(default_factory=dict)  # running share of correct answers, by task

    def note(self, task: str, right: int, total: int) -> None:
        """Update the running accuracy of `task`; a batch with more answers counts more."""
        keep = 0.99**total
        self.accuracy[task] = keep * self.accuracy.get(task, 0.0) + (1 - keep) * right / total

    def weights(self) -> dict[str, float]:
        """Weight of each short task: tasks with more errors are drawn more often."""
        return {t: base * (1.15 - self.accuracy.get(t, 0.0)) for t, base in SHORT_TASKS.items()}

    def promote(self) -> None:
        """Start the next level of list lengths once the current one is nearly solved."""
        longest = len(LEVELS[self.level].chances) - 1
        if self.level + 1 < len(LEVELS) and self.accuracy.get(f"retrieval-{longest}", 0.0) > PROMOTION:
            self.level += 1


class Trainer:
    """Model, optimizers, data source and progress of one run.

    Args:
        out: folder for the checkpoint and the result.
        start: folder with the weights to begin with, and to learn tools from there; None: begin with none.
        total_steps: after which the run ends.
        decay_steps: last steps, in which the learning rate decays to zero.
        seed: of weights and data.
    """

    def __init__(self, out: Path, start: Path | None, total_steps: int, decay_steps: int, seed: int) -> None:
        self.out, self.total_steps, self.decay_steps = out, total_steps, decay_steps
        self.has_tools = start is not None
        torch.manual_seed(seed)
        self.rng = random.Random(seed)
        self.encoder = self._encoder()
        self.sampler = data.TaskSampler(self.rng)
        self.tool_sampler = ToolSampler(self.sampler)
        self.model = Mini(MiniConfig())
        if start is not None:
            weights = load_file(start / "model.safetensors")
            self.model.load_state_dict({name: weight.float() for name, weight in weights.items()})
        self.compiled = torch.compile(self.model.hidden, dynamic=False)
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.optimizers = [
            Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.base_lrs = (MUON_LR, ADAM_LR)
        self.progress = Progress()
        self._resume()

    def _encoder(self) -> tok.ChatEncoder:
        """The tokenizer of this run, trained on first use."""
        path = self.out / "tokenizer.json"
        if not path.exists():
            tok.build(data.tokenizer_corpus()).save(str(path))
        return tok.load(path)

    def _resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        path = self.out / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        self.rng.setstate(state["rng"])
        torch.set_rng_state(state["torch_rng"])

    def save(self) -> None:
        """Write the checkpoint and the weights; a crash in between leaves the old files."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "progress": vars(self.progress),
            "rng": self.rng.getstate(),
            "torch_rng": torch.get_rng_state(),
        }
        torch.save(state, self.out / "checkpoint.tmp")
        os.replace(self.out / "checkpoint.tmp", self.out / "checkpoint.pt")
        weights = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in self.model.state_dict().items()}
        save_file(weights, self.out / "model.tmp", metadata={"format": "pt"})
        os.replace(self.out / "model.tmp", self.out / "model.safetensors")

    def learning_rate(self) -> float:
        """Factor for both learning rates: a short warm-up, a plateau, then linear decay to zero."""
        step = self.progress.step
        return min(1.0, (step + 1) / WARMUP_STEPS, (self.total_steps - step) / self.decay_steps)

    @property
    def level(self) -> Level:
        """What steps are composed of at present."""
        return TOOL_LEVEL if self.has_tools else LEVELS[self.progress.level]

    def short_batch(self) -> Batch:
        """Rows of short tasks."""
        weights = self.progress.weights()
        rows = [
            data.short_conversation(self.sampler, self.encoder, weights, SHORT_LENGTH)
            for _ in range(self.level.short_rows)
        ]
        return collate(rows, SHORT_LENGTH, self.encoder.pad)

    def tool_batch(self) -> Batch:
        """Rows of conversations with tools."""
        rows = [
            tool_conversation(self.tool_sampler, self.encoder, TOOL_LENGTH)
            for _ in range(self.level.tool_rows)
        ]
        return collate(rows, TOOL_LENGTH, self.encoder.pad)

    def retrieval_batch(self) -> tuple[int, Batch]:
        """Rows with lists, of a shape drawn by level, and the index of that shape."""
        level = self.level
        self.sampler.colon_share = level.colon_share
        index = self.rng.choices(range(len(level.chances)), level.chances)[0]
        shape, rows = SHAPES[index], []
        for _ in range(max(1, round(shape.rows * level.list_rows))):
            share = 1.0 if level is LEVELS[0] else self.rng.uniform(0.4, 1.0)
            tokens = self.rng.randint(*shape.tokens)
            rows.append(data.retrieval_conversation(self.sampler, self.encoder, tokens, shape.length, share))
        return index, collate(rows, shape.length, self.encoder.pad)

    def backward(self, batch: Batch, suffix: str = "") -> float:
        """Add the gradients of one micro-batch, note its accuracy, return its loss."""
        # Compiling takes half a minute per shape: only worth it for those that every step uses.
        run = self.compiled if batch.ids.shape[1] in (SHORT_LENGTH, TOOL_LENGTH) else self.model.hidden
        with fast_precision():
            hidden = run(batch.ids).flatten(0, 1)[batch.where]
            logits = self.model.logits(hidden)
        losses = F.cross_entropy(logits.float(), batch.target, reduction="none")
        # If every token had the same weight, long answers would dominate.
        weight = torch.bincount(batch.span)[batch.span].rsqrt()
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        right = right_answers(logits, batch)
        for task in sorted(set(batch.tasks)):
            hits = [r for r, t in zip(right, batch.tasks, strict=True) if t == task]
            self.progress.note(task + suffix, sum(hits), len(hits))
        self.progress.tokens += batch.ids.numel()
        return loss.item()

    def step(self) -> tuple[float, float]:
        """One optimizer step; returns the loss of short tasks and of retrieval."""
        factor = self.learning_rate()
        reopens = self.has_tools or self.progress.step >= REOPEN_STEP
        self.sampler.reopen = REOPEN_SHARE if reopens else 0.0
        for optimizer, lr in zip(self.optimizers, self.base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = lr * factor
        short = self.backward(self.short_batch())
        index, batch = self.retrieval_batch()
        retrieval = self.backward(batch, f"-{index}")
        if self.level.tool_rows:
            self.backward(self.tool_batch())
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        if not self.has_tools:
            self.progress.promote()
        return short, retrieval

    def run(self) -> None:
        """Train to the last step."""
        rows = evaluation_set(self.encoder) if self.has_tools else data.evaluation_set(self.encoder)
        while self.progress.step < self.total_steps:
            started = time.monotonic()
            losses = self.step()
            self.progress.seconds += time.monotonic() - started
            step = self.progress.step
            if step % LOG_STEPS == 0:
                self._log(losses)
            if step % EVAL_STEPS == 0:
                whole = (
                    step % (4 * EVAL_STEPS) == 0
                )  # long prompts are the most expensive, so they are evaluated less often
                subset = [r for r in rows if whole or r["task"] != "retrieval-1400"]
                print("  eval", format_rates(evaluate(self.model, self.encoder, subset)), flush=True)
            if step % SAVE_STEPS == 0 or step == self.total_steps:
                self.save()
        self.save()

    def _log(self, losses: tuple[float, float]) -> None:
        """One line of progress."""
        p = self.progress
        rates = format_rates(dict(sorted(p.accuracy.items())))
        speed = p.tokens / p.seconds
        print(
            f"{time.strftime('%H:%M:%S')} step {p.step} tokens {p.tokens / 1e6:.2f}M {speed:.0f}/s"
            f" level {p.level} lr {self.learning_rate():.2f} loss {losses[0]:.3f} {losses[1]:.3f} | {rates}",
            flush=True,
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and the result")
    parser.add_argument(
        "--from", dest="start", type=Path, help="folder with the weights that learn to call tools"
    )
    parser.add_argument("--steps", type=int, default=2300, help="optimizer steps in all")
    parser.add_argument(
        "--decay-steps",
        type=int,
        default=1850,
        help="number of last steps, in which the learning rate decays to zero",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    Trainer(args.out, args.start, args.steps, args.decay_steps, args.seed).run()


if __name__ == "__main__":
    main()
