"""The count of Python calls: its figures, and that a chat and a decode step have few of them."""

from __future__ import annotations

import calls

from quire.kernels import has_native_kernels


def test_a_chat_and_a_decode_step_are_counted_by_folder_file_and_function():
    chat, step = calls.chat_and_step("mini", num_kv_blocks=16)
    assert chat["front/llm.py", "LLM.chat"] == step["scheduling/scheduler.py", "Scheduler.schedule"] == 1
    assert chat.total() <= 155
    if has_native_kernels():
        assert step.total() <= 260
    text = calls.report("step", step, with_files=True, with_functions=True)
    assert f"step: {step.total()} calls" in text
    assert "  kernels\n" in text
    assert "    scheduling/scheduler.py\n" in text
    assert "    1    scheduling/scheduler.py Scheduler.schedule\n" in text
