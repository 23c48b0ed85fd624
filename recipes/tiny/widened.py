"""Write the tiny model with heads for many tensor ranks.

    python -m recipes.tiny.widened DIR --ranks 8

Every rank gets a copy of the tiny model's heads, and the output projection adds up the copies, each with
its share, so that the model computes what the tiny model does. The copies differ in what cancels out:
queries are larger as keys are smaller, and the channels of values stand in another order. A head that
meets another copy's is therefore seen in the tokens. All factors are powers of two, and no weight is
rounded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoint.files import SINGLE, open_checkpoint, saving
from recipes.schema import verb
from recipes.schema.numbers import whole

WEIGHTS = Path(__file__).parent / "weights"
CONFIG = "config.json"
NUM_RANKS = (2, 4, 8, 16, 32, 64)  # powers of two, which divide the vocabulary and the intermediate size


def widened(name: str, weight: Tensor, ranks: int, head_dim: int) -> Tensor:
    """Return a weight of the tiny model for `ranks` copies of its heads; others stay as they are."""
    copies = []
    for copy in range(ranks):
        scale, shift = 2.0 ** (copy % 3 - 1), copy * head_dim // ranks
        if ".q_proj." in name:
            copies.append(weight * scale)
        elif ".k_proj." in name:
            copies.append(weight / scale)
        elif ".v_proj." in name:
            copies.append(weight.unflatten(0, (-1, head_dim)).roll(shift, 1).flatten(0, 1))
        elif ".o_proj." in name:
            copies.append(weight.unflatten(1, (-1, head_dim)).roll(shift, 2).flatten(1, 2) / ranks)
        else:
            return weight
    return torch.cat(copies, dim=int(".o_proj." in name))


def widen(target: Path, ranks: int) -> None:
    """Write the checkpoint into `target`, which appears whole or not at all.

    Raises ValueError for a target that is there and not an empty directory, and OSError for a full disk.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there and not empty; name a new directory")
    config = json.loads((WEIGHTS / CONFIG).read_text(encoding="utf-8"))
    file = open_checkpoint(WEIGHTS / SINGLE)
    weights = {
        name: widened(name, file.get_tensor(name), ranks, config["head_dim"]).contiguous()
        for name in file.keys()  # noqa: SIM118 - it is no mapping
    }
    for name in ("num_attention_heads", "num_key_value_heads"):
        config[name] *= ranks
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as room:
        made = Path(room) / target.name
        shutil.copytree(WEIGHTS, made)
        with saving(target):
            save_file(weights, made / SINGLE, metadata={"format": "pt"})
        shutil.copymode(WEIGHTS / SINGLE, made / SINGLE)
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        made.replace(target)


def main(argv: list[str]) -> None:
    """Write the checkpoint; raises ValueError for a directory that is not empty."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.tiny.widened",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("target", type=Path, metavar="DIR", help="a directory that is new or empty")
    parser.add_argument(
        "--ranks",
        type=whole(min(NUM_RANKS), max(NUM_RANKS)),
        choices=NUM_RANKS,
        required=True,
        help="parallel.tensor",
    )
    options = parser.parse_args(argv)
    widen(options.target, options.ranks)
    print(f"{options.target}: the tiny model with heads for {options.ranks} ranks")


if __name__ == "__main__":
    verb.run(main)
