"""lm-eval: its local-completions model on a task of held-out questions and on a text.

The last line of the output has the results, which the test compares with those of `genai eval`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from common import SERVER
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

NUMBER = {"function": "regex", "regex_pattern": r"(-?\d+)", "group_select": -1}
QUESTIONS = {
    "task": "questions",
    "output_type": "generate_until",
    # With the tokenizer of a server, apply_chat_template sends messages as texts, so the task has the template's text.
    "doc_to_text": "<|im_start|>user\n{{messages[0].content}}<|im_end|>\n<|im_start|>assistant\n",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": [], "max_gen_toks": 32},
    "filter_list": [{"name": "number", "filter": [NUMBER, {"function": "take_first"}]}],
    "metric_list": [{"metric": "exact_match"}],
}
TEXT = {
    "task": "text",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
}


def main() -> None:
    for task in (QUESTIONS, TEXT):
        name = task["task"]
        files = {"test": os.environ[f"{name}_FILE".upper()]}
        whole = {**task, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        Path(f"{name}.yaml").write_text(json.dumps(whole))
    settings = {"model": "pebble", "base_url": f"{SERVER}/v1/completions", "num_concurrent": 4, "max_length": 1024}
    manager = TaskManager(include_path=".", include_defaults=False)
    found: dict[str, Any] = {}
    for name in ("questions", "text"):
        results = simple_evaluate(
            model="local-completions",
            model_args=settings,
            tasks=[name],
            task_manager=manager,
            bootstrap_iters=0,
        )
        found |= results["results"][name]
        if name == "questions":
            samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
            found["replies"] = [sample["resps"][0][0] for sample in samples]
    print(json.dumps(found))


main()
