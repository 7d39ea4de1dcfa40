"""lm-eval: sums as a task for chat completions, and, with the server's tokenizer, for completions."""

import json
import tempfile
from pathlib import Path

from checks import BASE_URL, MODEL, report, same
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

SUMS = [{"question": f"What is {a}+{b}?", "sum": a + b} for a, b in ((47, 38), (12, 34), (56, 21))]
CHAT = "{{question}}"
TEXT = "<|user|>{{question}}<|end|><|assistant|>"  # completions have no chat template, here either
ANSWERED = {
    "output_type": "generate_until",
    "doc_to_target": "{{sum}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16},
    "metric_list": [{"metric": "exact_match", "higher_is_better": True}],
}
CHOSEN = {
    "output_type": "multiple_choice",
    "doc_to_choice": ["{{sum + 7}}", "{{sum}}", "{{sum - 2}}"],
    "doc_to_target": 1,
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "higher_is_better": True}],
}


def evaluate(model, path, task, **options):
    """Run a task with a model class of lm-eval's; fail unless the answers to all questions are right."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "sums.jsonl")
        data.write_text("".join(json.dumps(one) + "\n" for one in SUMS))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        whole_task = {"task": "sums", "test_split": "test", **source, **task}
        Path(folder, "sums.yaml").write_text(json.dumps(whole_task))  # which YAML includes
        found = simple_evaluate(
            model,
            model_args={"model": MODEL, "base_url": f"{BASE_URL}/{path}", "num_concurrent": 2},
            tasks=["sums"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            bootstrap_iters=0,
            **options,
        )
    metric = task["metric_list"][0]["metric"]
    same(found["results"]["sums"][f"{metric},none"], 1.0)


def text():
    chat = {"doc_to_text": CHAT, **ANSWERED}
    evaluate("local-chat-completions", "chat/completions", chat, apply_chat_template=True)
    for task in (ANSWERED, CHOSEN):
        evaluate("local-completions", "completions", {"doc_to_text": TEXT, **task})


report(text=text)
