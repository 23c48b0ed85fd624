"""Apply what verify_npu.sh found out about an Ascend product to its limits.

Where no source says what a product does, probes of that script test it and write the answers to a file for
each product and version of CANN; the product's limits follow the file from then on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from borders.files import whole_file
from devices.ascend_limits import AscendProduct

log = logging.getLogger(__name__)

PROBED = (
    *("keeps_nan", "packs_float16", "tiles_weights", "slices_tiles", "captures_draws", "prefetches"),
    *("exact_angles", "unmasks_decodes", "joins_latents", "sums_products", "dispatches"),
)
assert {each.name for each in fields(AscendProduct)} >= set(PROBED), "the answers are facts of a product"
# Answers in files of earlier versions that no longer count, each with the reason
WITHDRAWN = {"bares_decodes": "it was asked outside of graphs alone, where wrong answers were not seen"}


def answers_file(folder: Path, name: str, cann: str, *, virtual: bool) -> Path:
    """Return the path of the answers for a product and a version of CANN.

    Those of a stand-in are kept apart.
    """
    return folder / f"{'virtual-' * virtual}{name}-cann-{cann or 'unknown'}.json"


def write_answers(path: Path, found: Mapping[str, bool]) -> None:
    """Write the answers of the probes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(json.dumps(dict(found), indent=2) + "\n")


def answered(product: AscendProduct, path: Path) -> AscendProduct:
    """Return the product with the answers of the file, which are logged.

    It is unchanged if there is no such file.
    """
    if not path.is_file():
        return product
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} holds no JSON ({error}): {AGAIN}") from error
    if not isinstance(found, dict) or not all(isinstance(each, bool) for each in found.values()):
        raise ValueError(f"{path} holds no answers of yes and no by their names: {AGAIN}")
    for name in sorted(WITHDRAWN.keys() & found.keys()):
        log.warning(
            "device: the answer %s in %s no longer counts, since %s: run `bash scripts/verify_npu.sh` again",
            name,
            path,
            WITHDRAWN[name],
        )
        del found[name]
    if unknown := sorted(set(found) - set(PROBED)):
        raise ValueError(f"{path} answers {', '.join(unknown)}, which nothing asks: {AGAIN}")
    changed = [
        f"{name} {'yes' if found[name] else 'no'} (was {'yes' if getattr(product, name) else 'no'})"
        for name in found
        if found[name] != getattr(product, name)
    ]
    log.info("device: follows the answers of verify_npu.sh in %s: %s", path, "; ".join(changed) or "as known")
    if not found.get("exact_angles", True):
        log.warning("device: cosines of large angles are not exact here, which dynamic rope computes")
    return replace(product, **found)


AGAIN = "remove it, or run `bash scripts/verify_npu.sh` again"
