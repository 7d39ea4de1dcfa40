"""The benchmark of sparse prefill, with the built-in model and short prompts."""

from __future__ import annotations

import sparse_prefill

from quire.cli.commands.evaluate import Case


def test_every_mode_is_measured_and_its_answers_are_counted(monkeypatch, capsys):
    case = Case("", [{"role": "user", "content": "Say yes."}], "no such answer")
    monkeypatch.setattr(sparse_prefill, "eval_cases", lambda task, count: [case] * count)
    sparse_prefill.report("mini", num_tokens=48, rounds=1, num_prompts=1)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [row.split("|")[1].strip() for row in rows] == list(sparse_prefill.MODES)
    # No answer is right, and so short a prompt leaves out no keys: all equal those of dense attention.
    assert all([cell.strip() for cell in row.split("|")[4:6]] == ["0%", "100%"] for row in rows)
