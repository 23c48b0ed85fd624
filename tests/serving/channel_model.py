"""A small gpt-oss of random weights, with a tokenizer of bytes and the marks of its channels."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from serving.tools.channels import HARMONY
from tests.serving.conftest import write_settings

# What of gpt-oss' own template depends on how thoughts and calls are handed to it
TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' and 'tool_calls' in m -%}{%- set call = m.tool_calls[0].function -%}"
    "{%- if m.content and m.thinking -%}{{- raise_exception('Cannot pass both') -}}"
    "{%- elif m.content or m.thinking -%}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' -}}"
    "{%- endif -%}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>'"
    " + call.arguments|tojson + '<|call|>' -}}"
    "{%- elif m.role == 'assistant' -%}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}"
    "{%- elif m.role == 'tool' -%}"
    "{{- '<|start|>functions.x to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' -}}"
    "{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if reasoning_effort is defined -%}"
    "{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '<|end|>' -}}{%- endif -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"
)
END_OF_TEXT = "<|endoftext|>"


def tokenizer() -> Tokenizer:
    """256 bytes, the words of heads, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={sign: index for index, sign in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, normalized=False) for each in (END_OF_TEXT, *HARMONY.marks)])
    return made


def write_model(folder: Path) -> Path:
    """All of its files, but the weights, which a recipe draws."""
    made = tokenizer()
    made.save(str(folder / "tokenizer.json"))
    write_settings(folder, eos_token="<|return|>", add_bos_token=False, chat_template=TEMPLATE)
    ends = [made.token_to_id(each) for each in ("<|return|>", "<|call|>", END_OF_TEXT)]
    config = {
        "model_type": "gpt_oss", "vocab_size": made.get_vocab_size(), "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 128,
        "max_position_embeddings": 2048, "eos_token_id": ends[0], "torch_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    return folder
