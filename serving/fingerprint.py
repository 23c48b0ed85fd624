"""Identify the model and its configuration by a digest, so that answers can be compared.

`system_fingerprint` is a digest of what the tokens of an answer may depend on: the recipe without its paths
and without how clients are served, the files of the model and of the recipe's adapters, and the versions of
the software that computes. It is the same on every start and on every machine with the same inputs, and
reveals none of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kv_cache.exchange.messages import NO_DRAFTS
from recipes.assembly import versions
from recipes.schema.keys import keys_of
from recipes.schema.recipe import ROOT, Recipe


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What identifies the weights that compute an answer."""

    version: str
    fingerprint: str  # the `system_fingerprint` of their answers


_PLACES = (  # They say where things are and who may read them, as do the keys that are a path
    *("cache.tier", "cache.events", "cache.events_topic", "cache.events_open"),
    *("parallel.nodes", "parallel.interface"),
)
_FILES = ("*.json", "*.model", "*.safetensors")
_PIECE_BYTES = 2**16
_MOST_PIECES = 64  # pieces of a file, evenly spaced; weights are too large to be read twice


def of(recipe: Recipe, server_version: str) -> str:
    """Return the fingerprint of a server."""
    keys = {
        each.name: recipe.value(each.name)
        for each in keys_of(Recipe)
        if not each.name.startswith("server.") and each.kind is not Path and each.name not in _PLACES
    }
    folders = recipe.adapters.folders or {}
    keys["adapters.folders"] = sorted(folders)
    digest = hashlib.sha256(json.dumps([server_version, versions.installed(), keys], default=str).encode())
    _add_files(digest, recipe.model.path)
    for name in sorted(folders):
        _add_files(digest, ROOT / folders[name])
    return f"fp_{digest.hexdigest()[:16]}"


def of_weights(recipe: Recipe) -> str:
    """Return the version of a recipe's weights, by which their users can tell them from others."""
    digest = hashlib.sha256(json.dumps([recipe.model.weights, recipe.model.seed]).encode())
    _add_files(digest, recipe.model.path)
    return f"w_{digest.hexdigest()[:16]}"


def beside(recipe: Recipe, server_version: str, sha256: str) -> str:
    """Return the fingerprint of a server whose weights have this digest, and not those of its recipe."""
    digest = hashlib.sha256(f"{of(recipe, server_version)} {sha256}".encode())
    return f"fp_{digest.hexdigest()[:16]}"


def of_tensors(folder: Path) -> str:
    """Return a digest of a checkpoint's tensors alone, whatever else is written beside them."""
    digest = hashlib.sha256()
    _add_files(digest, folder, ("*.safetensors",))
    return digest.hexdigest()


def of_pages(recipe: Recipe) -> str:
    """Return the fingerprint of what a page of keys and values depends on, besides its tokens and its layout.

    Engines with the same `PageIdentity`, of which this is a part, may exchange pages.
    """
    keys = {
        each.name: recipe.value(each.name)
        for each in keys_of(Recipe)
        if each.name.startswith("model.") and each.name != "model.pooling" and each.kind is not Path
    }
    if recipe.device.batch_invariant:  # pages of who does not promise it have other bits
        keys["device.batch_invariant"] = True
    digest = hashlib.sha256(json.dumps([keys, recipe.cache.dtype], default=str).encode())
    _add_files(digest, recipe.model.path)
    return f"kv_{digest.hexdigest()[:16]}"


def of_drafts(recipe: Recipe) -> str:
    """Return what an engine keeps of a prompt beside the model's layers: the kind, and a digest of weights.

    An MTP layer is in the model's own files, and so in `of_pages`.
    """
    asked = recipe.speculation
    if asked.kind not in ("draft", "eagle3", "mtp"):
        return NO_DRAFTS
    digest = hashlib.sha256(json.dumps([asked.kind, asked.draft_dtype, asked.draft_quantization]).encode())
    _add_files(digest, asked.draft_path)
    return f"{asked.kind} {digest.hexdigest()[:16]}"


def of_continuations(recipe: Recipe, server_version: str) -> dict[bool, str]:
    """Return the fingerprint of what the rest of an answer depends on, given its tokens so far.

    Answers may go on between servers with the same one: of the same weights and type, on the same kind of
    device with the same software, which read calls and thoughts alike. How many slots and pages each has does
    not matter. There are two, by `EngineFacts.long_factors`, which is not known before an engine is ready.
    """
    names = "device.kind", "server.tool_format", "server.reasoning", "server.logits_processors"
    software = [server_version, versions.installed(), *map(recipe.value, names)]
    digest = hashlib.sha256(json.dumps(software, default=str).encode())
    digest.update(of_pages(recipe).encode())
    short, long = digest, digest.copy()
    long.update(b" long factors")
    return {False: f"go_{short.hexdigest()[:16]}", True: f"go_{long.hexdigest()[:16]}"}


def _add_files(digest: hashlib._Hash, folder: Path | None, patterns: Sequence[str] = _FILES) -> None:
    """Add the files of a checkpoint; there are none where the recipe defines the model itself."""
    if folder is None:
        return
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}):
        digest.update(f"\n{file.name} {file.stat().st_size}\n".encode())
        for piece in _pieces(file):
            digest.update(piece)


def _pieces(file: Path) -> Iterator[bytes]:
    """Yield the beginning of a file, its end, and pieces between; a small file is yielded whole."""
    size = file.stat().st_size
    last = max(0, size - _PIECE_BYTES)
    step = max(_PIECE_BYTES, -(-last // (_MOST_PIECES - 1)))
    with file.open("rb") as data:
        for at in [*range(0, last, step), last]:
            data.seek(at)
            yield data.read(_PIECE_BYTES)
