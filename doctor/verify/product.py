"""Name the product at hand, and print the overrides with which a recipe runs on it.

    python -m doctor.verify.product recipes/tiny/npu.yaml [key=value ...]

One recipe verifies every product, though some have no bfloat16 and some no fused attention: the other parts
of a verification run with the overrides that this part prints. Status 0: there is a product.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from devices.ascend_limits import AscendProduct
from models.layers.dtypes import TORCH_DTYPES
from recipes.assembly.families import model_config
from recipes.machine import Npu, start
from recipes.schema import verb
from recipes.schema.command_line import add_recipe, with_keys
from recipes.schema.reader import load
from recipes.schema.recipe import Recipe


@dataclass(frozen=True, slots=True)
class FoundProduct:
    """The device's own name, its product's name, and the overrides that fit a recipe to it."""

    chip: str
    product: str
    overrides: list[str]


def needed(recipe: Recipe, product: AscendProduct) -> list[str]:
    """Return the overrides with which a recipe runs on the product; none where it runs as it is."""
    overrides = []
    dtype = TORCH_DTYPES[model_config(recipe).dtype]
    try:
        product.check_dtype(dtype)
    except ValueError:
        overrides.append(f"model.dtype={product.dtypes[0]}")
    if not (product.is_fused or product.is_atb) and recipe.device.attention == "fused":
        overrides += ["device.attention=reference", "device.graphs=0"]
    return overrides


def main(argv: list[str]) -> int:
    """Print the product and the overrides that it needs, as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m doctor.verify.product",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add_recipe(parser)
    options = parser.parse_intermixed_args(with_keys(argv))
    recipe = load(options.recipe, options.overrides, options.profile)
    machine = start(recipe.device)
    if not isinstance(machine, Npu):
        parser.error(f"device.kind is {recipe.device.kind}; only an NPU has products: set it to npu")
    found = FoundProduct(machine.chip, machine.product.name, needed(recipe, machine.product))
    print(json.dumps(asdict(found), indent=2))
    return 0


if __name__ == "__main__":
    verb.run(main)
