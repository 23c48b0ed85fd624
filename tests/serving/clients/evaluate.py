"""Measure a server with lm-eval: `python evaluate.py URL` prints the figures as one line of JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "lm_eval"
WEIGHTS = Path(__file__).parents[3] / "recipes/tiny/weights"


def measured(model: str, url: str, tasks: list[str], **options: Any) -> dict[str, Any]:
    """Each task's figures, and what was answered to each of its documents."""
    found = simple_evaluate(
        model,
        model_args={"model": "tiny", "base_url": url, "max_retries": 1, "max_length": 2048, **options},
        tasks=tasks,
        batch_size=1 if "chat" in model else 4,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        apply_chat_template="chat" in model,
        bootstrap_iters=0,
    )
    samples = {
        task: [{"doc": each["doc"], "told": each["resps"]} for each in found["samples"][task]]
        for task in tasks
    }
    return {"results": found["results"], "samples": samples}


def main(url: str) -> None:
    """By a tokenizer of its own, by the server's, and without one."""
    os.chdir(TASKS)
    completions, tasks = f"{url}/v1/completions", ["tiny_sums", "tiny_answers"]
    tokenizer = {"tokenizer_backend": "huggingface", "tokenizer": str(WEIGHTS)}
    told = {
        "own": measured("local-completions", completions, tasks, num_concurrent=2, **tokenizer),
        "remote": measured("local-completions", completions, tasks, tokenizer_backend="remote"),
        "chats": measured("local-chat-completions", f"{url}/v1/chat/completions", ["tiny_chats"]),
    }
    print(json.dumps(told, default=str))


if __name__ == "__main__":
    main(sys.argv[1])
