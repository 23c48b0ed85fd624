"""Train the tiny model, its draft model, or the tiny agent.

`python -m recipes.tiny.train [--output DIR] [--draft | --agent]` writes a tokenizer and a model in the
Hugging Face layout. The tokenizer is trained first, on the same corpus and from the same seed, so that the
model and its draft model (`--draft`) share it; the agent (`--agent`) has a corpus of its own. The layers'
matrices are trained with Muon (momentum, orthogonalised; Jordan 2024), embeddings and norms with AdamW.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.schema.numbers import MOST_SEED, whole
from recipes.tiny import agent_corpus, corpus
from recipes.tiny.corpus import ASSISTANT, BOS, EOS, SYSTEM, USER, Document
from recipes.tiny.evaluate import agent_report, report

HERE = Path(__file__).parent
PAD, UNK, BOS_ID, EOS_ID = 3, 0, 1, 2
IGNORED = -100


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """A part of the training, with `rows` rows of `length` tokens in each step."""

    steps: int
    rows: int
    length: int
    long: bool


@dataclass(frozen=True, slots=True)
class Language:
    """A model's corpus, and how its tokenizer writes it.

    `documents` are drawn from a seed, `long` or not. Two kinds of symbols are one token each: `roles` begin a
    turn and are never part of a text, and `words` are part of texts.
    """

    documents: Callable[..., Iterator[Document]]
    chat_template: str
    roles: tuple[str, ...]
    words: tuple[str, ...]
    vocab_size: int


CHAT = Language(corpus.documents, corpus.CHAT_TEMPLATE, (SYSTEM, USER, ASSISTANT), ("\n",), 1024)
AGENT_CHAT = Language(
    agent_corpus.documents,
    agent_corpus.CHAT_TEMPLATE,
    (SYSTEM, USER, ASSISTANT, agent_corpus.TOOL),
    (agent_corpus.THINK, agent_corpus.THOUGHT, agent_corpus.CALL, agent_corpus.CALLED, "\n"),
    512,
)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A model's shape and its training."""

    language: Language
    hidden_size: int
    num_layers: int
    intermediate_size: int
    stages: tuple[TrainingStage, ...]
    matrix_rate: float = 0.015
    other_rate: float = 2e-3


MODEL = TrainingPlan(
    CHAT, 192, 4, 512, (TrainingStage(2800, 16, 128, False), TrainingStage(600, 6, 512, True))
)
DRAFT = TrainingPlan(CHAT, 64, 2, 96, (TrainingStage(2000, 16, 128, False), TrainingStage(600, 6, 512, True)))
AGENT = TrainingPlan(
    AGENT_CHAT, 128, 4, 256, (TrainingStage(4500, 8, 256, False), TrainingStage(900, 5, 512, True))
)


def train_tokenizer(target: Path, language: Language, *, seed: int = 0, num_documents: int = 20_000) -> None:
    """Write `target`/tokenizer.model.

    Any text survives a round trip, since rare characters are spelt as bytes.
    """
    pieces = (
        line
        for document in itertools.islice(language.documents(seed, long=True), num_documents)
        for text, _ in document
        for line in _without_markers(text, language)
    )
    model = io.BytesIO()  # a file would record its own path
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=pieces,
        model_writer=model,
        model_type="bpe",
        vocab_size=language.vocab_size,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        max_sentencepiece_length=8,
        # Markers are plain symbols, so that a rendered chat template is encoded as text.
        user_defined_symbols=[*language.roles, *language.words],
        unk_id=UNK,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        pad_id=PAD,
        num_threads=1,
        minloglevel=2,
    )
    (target / "tokenizer.model").write_bytes(model.getvalue())


def _without_markers(text: str, language: Language) -> Iterator[str]:
    for marker in (BOS, EOS, *language.roles, *language.words):
        text = text.replace(marker, "\n")
    return (line for line in text.split("\n") if line)


def encode(
    tokenizer: sentencepiece.SentencePieceProcessor, document: Document
) -> tuple[list[int], list[int]]:
    """Return a document's token ids, and its labels: the same ids where the model is to learn them."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learned in document:
        starts, ends = text.startswith(BOS), text.endswith(EOS)
        piece = tokenizer.encode(text.removeprefix(BOS).removesuffix(EOS))
        piece = [BOS_ID] * starts + piece + [EOS_ID] * ends
        ids += piece
        labels += piece if learned else [IGNORED] * len(piece)
    return ids, labels


def batches(
    tokenizer: sentencepiece.SentencePieceProcessor, language: Language, stage: TrainingStage, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and labels, [rows, length] each: whole documents packed into rows, then padding."""
    source = (encode(tokenizer, document) for document in language.documents(seed, long=stage.long))
    waiting = next(source)
    for _ in range(stage.steps):
        ids = torch.full((stage.rows, stage.length), PAD)
        labels = torch.full((stage.rows, stage.length), IGNORED)
        for row in range(stage.rows):
            start = 0
            while start == 0 or start + len(waiting[0]) <= stage.length:
                stop = min(start + len(waiting[0]), stage.length)
                ids[row, start:stop] = torch.tensor(waiting[0][: stop - start])
                labels[row, start:stop] = torch.tensor(waiting[1][: stop - start])
                start, waiting = stop, next(source)
        yield ids, labels


def optimizers(model: LlamaForCausalLM, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, and AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    return [
        torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=plan.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    plan: TrainingPlan, tokenizer: sentencepiece.SentencePieceProcessor, seed: int = 0
) -> LlamaForCausalLM:
    """Return a model trained by `plan`; the rates rise for 50 steps and then fall linearly to zero."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(_config(plan, tokenizer.vocab_size()))
    steppers = optimizers(model, plan)
    rates = [stepper.param_groups[0]["lr"] for stepper in steppers]
    total = sum(stage.steps for stage in plan.stages)
    stream = (
        batch
        for number, stage in enumerate(plan.stages)
        for batch in batches(tokenizer, plan.language, stage, seed + 1 + number)
    )
    started = time.monotonic()
    for step, (ids, labels) in enumerate(stream):
        for stepper, rate in zip(steppers, rates):
            stepper.param_groups[0]["lr"] = rate * min((step + 1) / 50, (total - step) / total)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            targets = labels[:, 1:]
            learned = targets != IGNORED
            logits = model.lm_head(hidden[learned])
        loss = torch.nn.functional.cross_entropy(logits.float(), targets[learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        if step % 100 == 99 or step + 1 == total:
            right = (logits.argmax(-1) == targets[learned]).float().mean().item()
            seconds = time.monotonic() - started
            print(
                f"step {step + 1}/{total}  loss {loss.item():.4f}  right {right:.4f}  {seconds:.0f} s",
                flush=True,
            )
    model.eval()
    return model


def _config(plan: TrainingPlan, vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=plan.hidden_size,
        intermediate_size=plan.intermediate_size,
        num_hidden_layers=plan.num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD,
    )


def save(model: LlamaForCausalLM, language: Language, target: Path) -> None:
    """Write the Hugging Face layout into `target`, beside tokenizer.model, with weights in bfloat16."""
    model.bfloat16().save_pretrained(target)
    special = {
        str(number): {
            "content": content,
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, content in enumerate(("<unk>", BOS, EOS, "<pad>", *language.roles))
    }
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "added_tokens_decoder": special,
        "chat_template": language.chat_template,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="default: recipes/tiny/weights, draft or agent")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--draft", action="store_true", help="train the smaller sibling")
    which.add_argument("--agent", action="store_true", help="train the one that calls tools")
    parser.add_argument("--seed", type=whole(0, MOST_SEED), default=0)
    arguments = parser.parse_args()
    name, plan = "weights", MODEL
    if arguments.draft or arguments.agent:
        name, plan = ("draft", DRAFT) if arguments.draft else ("agent", AGENT)
    target = arguments.output or HERE / name
    target.mkdir(parents=True, exist_ok=True)
    if "OMP_NUM_THREADS" not in os.environ:  # torch itself follows the variable
        torch.set_num_threads(2)

    train_tokenizer(target, plan.language, seed=arguments.seed)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(target / "tokenizer.model"))
    model = train(plan, tokenizer, arguments.seed)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    save(model, plan.language, target)
    print(agent_report(target) if arguments.agent else report(target))


if __name__ == "__main__":
    main()
