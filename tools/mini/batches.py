"""Batches of conversations for `mini`, and how many of their answers a model gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import data
import torch
from model import Mini
from tokenizer import ChatEncoder
from tool_data import row_example
from torch import Tensor


def fast_precision() -> torch.autocast:
    """bfloat16 where the processor computes in it; elsewhere float32, which takes a twentieth of the time."""
    return torch.autocast("cpu", torch.bfloat16, enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass
class Batch:
    """Rows of one length.  `where` are flat positions whose next token is an answer token `target`."""

    ids: Tensor  # [rows, length]
    where: Tensor  # [answer tokens]
    target: Tensor  # [answer tokens]
    span: Tensor  # [answer tokens], which answer a token belongs to
    tasks: list[str]  # task of each answer


def collate(examples: Iterable[data.Example], length: int, pad: int) -> Batch:
    """Pad conversations to `length` and list their answer tokens."""
    rows, where, target, span, tasks = [], [], [], [], []
    for row, example in enumerate(examples):
        rows.append(example.ids + [pad] * (length - len(example.ids)))
        for start, end, task in example.spans:
            where += range(row * length + start - 1, row * length + end - 1)
            target += example.ids[start:end]
            span += [len(tasks)] * (end - start)
            tasks.append(task)
    return Batch(*(torch.tensor(x) for x in (rows, where, target, span)), tasks)


def right_answers(logits: Tensor, batch: Batch) -> list[bool]:
    """For each answer, whether all its tokens are the most likely ones: what greedy decoding would give."""
    wrong = (logits.argmax(-1) != batch.target).to(torch.long)
    return (torch.bincount(batch.span, weights=wrong, minlength=len(batch.tasks)) == 0).tolist()


@torch.no_grad()
def evaluate(model: Mini, encoder: ChatEncoder, rows: list[dict]) -> dict[str, float]:
    """Share of exact answers by task, in batches of about 8,192 tokens of similar length."""
    examples = sorted((row_example(row, encoder) for row in rows), key=lambda e: len(e.ids))
    hits: dict[str, list[bool]] = {}
    while examples:
        length = len(examples[-1].ids)
        chunk = [examples.pop() for _ in range(min(len(examples), max(1, 8192 // length)))]
        batch = collate(chunk, length, encoder.pad)
        with fast_precision():
            logits = model.logits(model.hidden(batch.ids).flatten(0, 1)[batch.where])
        for task, right in zip(batch.tasks, right_answers(logits, batch), strict=True):
            hits.setdefault(task, []).append(right)
    return {task: sum(h) / len(h) for task, h in sorted(hits.items())}


def format_rates(rates: dict[str, float]) -> str:
    """Rates in per cent for the log."""
    return " ".join(f"{task}={100 * rate:.1f}" for task, rate in rates.items())
