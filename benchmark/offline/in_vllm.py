"""Serve requests that come at once with vLLM, in this process: `python in_vllm.py ASKED.json FOUND.json`.

`benchmark.offline.beside_vllm` starts it in vLLM's own environment, where no package of this project is
installed; so it imports nothing of this project, and speaks by files, since vLLM logs to its output. ASKED
holds `engine`, the keywords of `vllm.LLM`, and `requests`, lines of a trace. All are served twice, and FOUND
says how long the second time took and how many tokens each answer had.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any


def served(engine: Any, requests: list[dict[str, Any]], sampling: type[Any]) -> dict[str, Any]:
    """Serve all requests; returns the seconds from the first to the last answer, and their tokens."""
    prompts = [{"prompt_token_ids": each["prompt_token_ids"]} for each in requests]
    params = [
        sampling(
            max_tokens=each["max_tokens"],
            temperature=each["temperature"],
            ignore_eos=each["ignore_eos"],
            detokenize=False,
        )
        for each in requests
    ]
    began_s = time.perf_counter()
    answers = engine.generate(prompts, params, use_tqdm=False)
    duration_s = time.perf_counter() - began_s
    return {"duration_s": duration_s, "output_tokens": [len(each.outputs[0].token_ids) for each in answers]}


def main(asked: str, found: str) -> None:
    """Read what is asked, serve it, and write what was found."""
    said = json.loads(Path(asked).read_text(encoding="utf-8"))
    vllm = import_module("vllm")
    engine = vllm.LLM(**said["engine"])
    served(engine, said["requests"], vllm.SamplingParams)  # warms up: what it compiles is not counted
    result = served(engine, said["requests"], vllm.SamplingParams)
    Path(found).write_text(json.dumps({**result, "version": vllm.__version__}), encoding="utf-8")


if __name__ == "__main__":  # vLLM starts processes that read this module again
    main(*sys.argv[1:])
