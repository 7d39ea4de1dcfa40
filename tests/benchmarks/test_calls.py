"""The count of Python calls: its figures, and that a decode step of the built-in model has few."""

from __future__ import annotations

import calls

from quire.kernels import has_native_kernels


def test_a_chat_and_a_decode_step_are_counted_by_folder_and_file():
    chat, step = calls.chat_and_step("mini", num_kv_blocks=16)
    assert chat["front/llm.py", "LLM.chat"] == step["scheduling/scheduler.py", "Scheduler.schedule"] == 1
    if has_native_kernels():
        assert step.total() <= 330
    text = calls.report("step", step, with_files=True)
    assert f"step: {step.total()} calls" in text
    assert "  kernels\n" in text
    assert "    scheduling/scheduler.py\n" in text
