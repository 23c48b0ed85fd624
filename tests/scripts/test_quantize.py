"""A quantised checkpoint is whole, is what the loader makes itself, and says nearly the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint.files import INDEX, SINGLE, checkpoint_files
from models.decoder import Decoder
from recipes.assembly import int8_checkpoint, scoring
from recipes.assembly.families import config_in
from recipes.assembly.int8_checkpoint import quantize
from recipes.assembly.scoring import Score, score
from recipes.schema.recipe import ROOT
from recipes.tiny.corpus import held_out_sums
from scripts import quantize as quantize_verb
from scripts.quantize import main
from serving.text.tokenizer import Text
from tests.lazy import transformers
from tests.models.families import VARIANTS, make
from tests.models.recurrent_variants import RECURRENT_VARIANTS

TINY, TEXT = ROOT / "recipes/tiny/weights", ROOT / "recipes/tiny/held_out.txt"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("made") / "tiny"
    quantize(TINY, target)
    return target


def scored(path: Path, lines: list[str]) -> Score:
    text = Text.load(path)
    assert text is not None
    return score(path, [text.encode(line) for line in lines])


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(int8_checkpoint, "save_file", fail)
    with pytest.raises(OSError, match=rf"^{tmp_path}/a cannot be written: .*device; free some space"):
        quantize(ROOT / "recipes/tiny/weights", tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_the_text_is_of_sums_that_training_never_shows() -> None:
    assert TEXT.read_text().splitlines() == [f"{a}+{b}={a + b}" for a, b in held_out_sums(200)]


def test_a_score_is_that_of_transformers() -> None:
    lines = TEXT.read_text().splitlines()[:20]
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    model = transformers.LlamaForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    expected = []
    for line in lines:
        ids = torch.tensor([tokenizer.encode(line)])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        expected.append(logprobs.gather(1, ids[0, 1:, None])[:, 0])
    found = scored(TINY, lines)
    theirs = replace(found, logprobs=torch.cat(expected))
    assert found.distance(theirs) < 0.03
    assert found.mean_logprob == pytest.approx(theirs.mean_logprob, abs=0.01)
    assert found.agreement(found) == 1


def test_a_long_line_is_scored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a line at once could take more memory than the model."""
    line, taken, logits = ["One day Tom saw a whale."], list[int](), Decoder.logits

    def counted(decoder: Decoder, hidden: Tensor) -> Tensor:
        taken.append(len(hidden))
        return logits(decoder, hidden)

    whole = scored(TINY, line)
    monkeypatch.setattr(Decoder, "logits", counted)
    monkeypatch.setattr(scoring, "MOST_LOGITS", 3 * config_in(TINY).vocab_size)
    found = scored(TINY, line)
    assert max(taken) == 3
    assert sum(taken) == found.num_tokens == whole.num_tokens
    assert found.distance(whole) < 1e-3


@pytest.mark.slow
def test_held_out_sums_stay_nearly_as_likely(quantised: Path) -> None:
    lines = TEXT.read_text().splitlines()[:60]
    before, after = scored(TINY, lines), scored(quantised, lines)
    assert 0 < before.distance(after) < 0.06
    assert abs(after.mean_logprob - before.mean_logprob) < 0.03
    assert before.agreement(after) > 0.97


def test_all_else_is_copied(quantised: Path) -> None:
    before, after = load_file(TINY / SINGLE), load_file(quantised / SINGLE)
    linears = {name for name in before if "_proj" in name}
    assert set(after) == set(before) | {f"{name}_scale" for name in linears}
    for name, tensor in before.items():
        if name not in linears:
            assert torch.equal(after[name], tensor)
            assert after[name].dtype == tensor.dtype
        else:
            scale = after[f"{name}_scale"]
            assert (after[name].dtype, scale.dtype) == (torch.int8, torch.float32)
            assert ((after[name] * scale - tensor.float()).abs() <= scale * 0.5001).all()
    assert {file.name for file in quantised.iterdir()} == {file.name for file in TINY.iterdir()}
    assert (quantised / SINGLE).stat().st_mode == (TINY / SINGLE).stat().st_mode
    assert (quantised / "tokenizer.model").read_bytes() == (TINY / "tokenizer.model").read_bytes()
    said = json.loads((quantised / "config.json").read_text())
    assert said.pop("quantization_config")["format"] == "int-quantized"
    assert said == json.loads((TINY / "config.json").read_text())


def test_shards_stay_shards(tmp_path: Path) -> None:
    variant = next(each for each in VARIANTS if each.name == "llama_biased")
    _, path = make(variant, tmp_path)
    quantize(path, tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    shards = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
    assert len(shards) > 1
    assert index["weight_map"] == {name: shard for shard, tensors in shards.items() for name in tensors}
    held = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == held


def test_a_target_is_whole_or_not_there(quantised: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is there and not empty; name a new directory"):
        quantize(TINY, quantised)
    with pytest.raises(ValueError, match="is quantised already; name the original"):
        quantize(quantised, tmp_path / "twice")
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((TINY / "config.json").read_bytes())
    save_file({"model.norm.weight": torch.ones(192)}, source / SINGLE)
    with pytest.raises(ValueError, match=r"lacks lm_head|lacks model.layers.0"):
        quantize(source, tmp_path / "half")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    (tmp_path / "empty").mkdir()
    quantize(TINY, tmp_path / "empty")
    assert (tmp_path / "empty" / SINGLE).is_file()


def test_what_cannot_be_quantised_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_checkpoint, "save_file", lambda *_, **__: pytest.fail("it was written first"))
    variant = next(each for each in RECURRENT_VARIANTS if each.name == "qwen3_5_moe")
    _, path = make(variant, tmp_path)
    (file,) = checkpoint_files(path)
    tensors, block = load_file(file), "model.layers.0.mlp.experts"
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{block}.")}
    stack = {f"{block}.gate_up_proj": torch.ones(8, 48, 48), f"{block}.down_proj": torch.ones(8, 48, 24)}
    for more, words in ((stack, "stores experts joined; set model.quantization"), ({}, f"lacks {block}.0.d")):
        save_file(kept | more, file)
        with pytest.raises(ValueError, match=words):
            quantize(path, tmp_path / "out")


def test_the_command_tells_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("".join(TEXT.read_text().splitlines(keepends=True)[:10]))
    main([str(TINY), str(tmp_path / "out"), "--evaluate", str(tmp_path / "text")])
    lines = capsys.readouterr().out.splitlines()
    assert "2.1 MiB of weights, from 3.8" in lines[0]
    first = [line.split()[0] for line in lines[1:]]
    assert first[:3] + first[4:] == ["before", "log-probability", "perplexity", "the"]


def test_a_damaged_weight_is_not_quantised(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(TINY, source)
    tensors = load_file(source / SINGLE)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, source / SINGLE)
    with pytest.raises(ValueError, match=r"up_proj\.weight holds NaN"):
        quantize(source, target)
    assert not target.exists()


@pytest.mark.parametrize(
    ("role", "dtype"),
    [
        ("mlp.up_proj", torch.int8),
        ("mlp.up_proj", torch.float8_e4m3fn),
        ("input_layernorm", torch.float8_e4m3fn),
    ],
)
def test_numbers_that_config_json_does_not_describe_are_not_quantised(
    role: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(TINY, source)
    name, tensors = f"model.layers.0.{role}.weight", load_file(source / SINGLE)
    save_file(tensors | {name: (100 * tensors[name]).to(dtype)}, source / SINGLE)
    with pytest.raises(
        ValueError, match=rf"{role}\.weight is {str(dtype)[6:]}, and config\.json says nothing"
    ):
        quantize(source, target)
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "left_out", "words"),
    [
        ("12+7=19\n", "tokenizer.model", "has no tokenizer, so that no text can be scored"),
        ("1" * 5000 + "\n", "", "a line has .* tokens; the model reaches"),
        ("\n", "", "has no line that can be scored"),
    ],
)
def test_a_text_that_cannot_be_scored_is_refused_before_anything_is_quantised(
    text: str, left_out: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for file in TINY.iterdir():
        if file.name != left_out:
            (source / file.name).symlink_to(file)
    (tmp_path / "text").write_text(text)
    monkeypatch.setattr(quantize_verb, "quantize", lambda *_: pytest.fail("it was quantised first"))
    with pytest.raises(ValueError, match=words):
        main([str(source), str(target), "--evaluate", str(tmp_path / "text")])
    assert not target.exists()


@pytest.mark.parametrize("name", ["qwen2_moe_sparse", "deepseek_v3", "ernie4_5_moe"])
def test_config_json_names_every_linear_that_stays_as_it_is(name: str, tmp_path: Path) -> None:
    """A reader that takes all linears for quantised, but those, finds a scale for each."""
    _, path = make(next(each for each in VARIANTS if each.name == name), tmp_path)
    quantize(path, tmp_path / "made")
    scheme = config_in(tmp_path / "made").quantization
    assert scheme is not None
    tensors = {
        each: tensor
        for file in checkpoint_files(tmp_path / "made")
        for each, tensor in load_file(file).items()
    }
    linears = [
        each.removesuffix(".weight")
        for each, tensor in tensors.items()
        if each.endswith(".weight") and tensor.dim() == 2 and "embed_tokens" not in each
    ]
    assert len(linears) > 20
    assert [each for each in linears if scheme.covers(each) != (f"{each}.weight_scale" in tensors)] == []
