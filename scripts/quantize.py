"""How does a checkpoint become one of int8 weights, and what does that change?

    python -m scripts.quantize MODEL_DIR OUT_DIR [--evaluate TEXT_FILE]

OUT_DIR gets the same model in compressed-tensors' format int-quantized (W8A8): int8 weights with a scale for
each output channel, activations quantised token by token while serving. Embedding, norms and the head stay as
they are. --evaluate tells how both models score each line of a text.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from models.ops.int8 import quantize_rows
from models.quantization import KEY, Quantization
from models.weights import INDEX, checkpoint_files, open_checkpoint
from recipes.build.families import decoder_config, read
from scripts import verb
from scripts.score import Score, score

LEFT_OUT = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # weights in whatever form; ours are written anew


def quantize(source: Path, target: Path) -> tuple[int, int]:
    """Write the quantised checkpoint and tell the bytes of all weights before and after.

    `target` appears whole or not at all. Raises ValueError for a target that is not empty, and
    for a source that is quantised or not supported.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there and not empty; name a new directory")
    config = decoder_config(read(source))
    if config.quantization is not None:
        raise ValueError(f"{source} is quantised already; name the original checkpoint")
    scheme = Quantization()
    names = {f"{name}.weight" for name, *_ in config.linears() if scheme.covers(name)}
    files = checkpoint_files(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as room:
        made = Path(room) / target.name
        made.mkdir()
        places: dict[str, str] = {}
        sizes = {"before": 0, "after": 0}
        for file in files:
            tensors = dict(_quantized(file, names, sizes))
            save_file(tensors, made / file.name, metadata={"format": "pt"})
            shutil.copymode(file, made / file.name)
            places |= dict.fromkeys(tensors, file.name)
            del tensors
        absent = sorted(names - set(places))
        if absent:
            raise ValueError(f"{source} lacks {', '.join(absent[:3])}{' ...' * (len(absent) > 3)}")
        if (source / INDEX).is_file():
            index = {"metadata": {"total_size": sizes["after"]}, "weight_map": places}
            (made / INDEX).write_text(json.dumps(index, indent=2))
        _copy_the_rest(source, made, scheme)
        if target.exists():
            target.rmdir()
        os.replace(made, target)
    return sizes["before"], sizes["after"]


def _quantized(file: Path, names: set[str], sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file as they are to be written."""
    with open_checkpoint(file) as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            tensor = opened.get_tensor(name)
            sizes["before"] += tensor.nbytes
            made = {name: tensor}
            if name in names:
                weight, scale = quantize_rows(tensor)
                made = {name: weight, f"{name}_scale": scale}
            sizes["after"] += sum(each.nbytes for each in made.values())
            yield from made.items()


def _copy_the_rest(source: Path, target: Path, scheme: Quantization) -> None:
    """Tokenizer, chat template and whatever else lies beside the weights; config.json tells the scheme."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix not in LEFT_OUT and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    said = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(said | {KEY: scheme.in_json()}, indent=2, ensure_ascii=False)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")


def comparison(before: Score, after: Score) -> str:
    """Two scores of one text as a table, and how far they are apart."""
    rows = [
        ("log-probability a token", f"{before.mean_logprob:.4f}", f"{after.mean_logprob:.4f}"),
        ("perplexity", f"{before.perplexity:.4f}", f"{after.perplexity:.4f}"),
    ]
    lines = [f"{'':26}{'before':>12}{'after':>12}"]
    lines += [f"{name:26}{one:>12}{other:>12}" for name, one, other in rows]
    lines.append(
        f"{before.num_tokens} tokens; a log-probability moves by {before.distance(after):.4f} in the mean"
    )
    lines.append(f"the likeliest token is the same at {before.agreement(after):.1%} of them")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Quantise, and score both where that is asked for; raises ValueError or OSError."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.quantize", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, metavar="MODEL_DIR", help="a checkpoint in the Hugging Face layout"
    )
    parser.add_argument(
        "target", type=Path, metavar="OUT_DIR", help="a directory that is not there yet, or empty"
    )
    parser.add_argument(
        "--evaluate", type=Path, metavar="TEXT_FILE", help="a text of which each line is scored"
    )
    options = parser.parse_args(argv)
    lines = options.evaluate.read_text(encoding="utf-8").splitlines() if options.evaluate else []
    before, after = quantize(options.source, options.target)
    print(f"{options.target}: {after / 2**20:,.1f} MiB of weights, from {before / 2**20:,.1f}")
    if options.evaluate:
        print(comparison(score(options.source, lines), score(options.target, lines)))


if __name__ == "__main__":
    verb.run(main)
