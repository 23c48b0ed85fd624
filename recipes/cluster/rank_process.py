"""Start and end a rank that does not lead; follower_process.py is what runs in it."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from borders.files import read_bounded
from models.parallel.placement import MOST_BYTES
from recipes.schema.keys import NAMES, keys_of
from recipes.schema.reader import made
from recipes.schema.recipe import ROOT, Recipe
from recipes.schema.recipe_error import RecipeError

# The variable by which a process sees some devices alone, by the kind of device
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
RECORDING = "recording"  # key under which the leader's store holds the address of its recording
SECRET = "secret"  # key of the secret that the other ranks prove when they join
FAILED = 3  # status of a rank that has lost its leader, or has told it why it ends
ALONE = 4  # status of a rank that has found no leader in time
WAIT_S = "wait_s"  # key of the time that a collective may wait
RECIPE = "recipe"  # key of the leader's `common` settings
OF_A_MACHINE = (
    "model.path",
    "speculation.draft_path",
    "scheduler.record",
    "parallel.nodes",
    "parallel.interface",
)
LENGTH = struct.Struct("<Q")  # length of the recipe that a rank reads first
FOLLOWER = "recipes.assembly.follower_process"


def common(recipe: Recipe) -> dict[str, Any]:
    """Return what the recipes of all ranks must agree on.

    That is everything except paths and what only the leader reads; a placement counts by the content of its
    file.
    """
    sections = recipe.described()
    if recipe.parallel.placement is not None:
        digest = sha256(read_bounded(recipe.parallel.placement, MOST_BYTES)).hexdigest()
        sections["parallel"]["placement"] = digest
    del sections["server"]
    for name in OF_A_MACHINE:
        section, _, key = name.partition(".")
        del sections[section][key]
    return sections


def adopted(recipe: Recipe, leaders: dict[str, Any]) -> Recipe:
    """Return the recipe with the leader's `common` settings, but with its own section parallel."""
    sections = recipe.described()
    for section, values in leaders.items():
        if section != "parallel":
            sections[section] |= values
    return restored(json.dumps(sections).encode())


def restored(text: bytes) -> Recipe:
    """Return the recipe that a `RankProcess` has sent."""
    described, values = json.loads(text), dict[str, Any]()
    for key in keys_of(Recipe):
        section, _, name = key.name.partition(".")
        value = described[section][name]
        if value is not None and key.kind in (Path, NAMES):
            value = ROOT / value if key.kind is Path else tuple(value)
        values[key.name] = value
    return made(Recipe, values)


def named_devices(kind: str, environment: Mapping[str, str]) -> list[str] | None:
    """Return the devices that the environment names as visible; None where it leaves all visible."""
    said = environment.get(VISIBLE[kind])
    return said.split(",") if said else None


def too_few(kind: str, ranks: int, there: int) -> RecipeError:
    """Return the refusal of more ranks on this machine than it lets a process see devices."""
    return RecipeError(
        "parallel.tensor",
        f"{ranks} ranks of this machine take a device each, and this process sees {there}",
        f"lower it, or let it see more by {VISIBLE[kind]}",
        value=ranks,
        limit=there,
    )


class RankProcess:
    """A rank, as seen by the process that has started it.

    `device` is the device that it may use, if any; with `adopts` it takes its settings from the leader.
    """

    def __init__(
        self, recipe: Recipe, rank: int, leader: str, device: str | None, *, adopts: bool = False
    ) -> None:
        self.rank = rank
        chosen = {} if device is None else {VISIBLE[recipe.device.kind]: device}
        self._process = subprocess.Popen(
            [sys.executable, "-m", FOLLOWER, "--leader", leader, "--rank", str(rank)] + ["--adopt"] * adopts,
            cwd=ROOT,
            env=os.environ | chosen,
            stdin=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        text = json.dumps(recipe.described()).encode()
        with contextlib.suppress(BrokenPipeError):  # the process has already ended, which `ended` reports
            self._process.stdin.write(LENGTH.pack(len(text)) + text)
            self._process.stdin.flush()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    @property
    def ended(self) -> str | None:
        """How it has ended; None while it runs."""
        status = self.status
        if status is None:
            return None
        return f"by signal {-status}" if status < 0 else f"with status {status}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, within_s: float = 0.0) -> None:
        """Let the process end by itself within this time, then kill it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
