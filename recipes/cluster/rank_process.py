"""Start and end a rank that does not lead; follower_process.py is what runs in it.

Its process may be started long before it is known what it computes: it then imports what a rank needs, at low
priority, and reads from its standard input which rank it becomes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from borders.files import read_bounded
from models.parallel.placement import MOST_BYTES
from recipes.cluster.spare_process import restore_priority
from recipes.schema.keys import NAMES, keys_of
from recipes.schema.reader import made
from recipes.schema.recipe import ROOT, Recipe
from recipes.schema.recipe_error import RecipeError

log = logging.getLogger(__name__)

# The variable by which a process sees some devices alone, by the kind of device
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
RECORDING = "recording"  # key under which the leader's store holds the address of its recording
SECRET = "secret"  # key of the secret that the other ranks prove when they join
FAILED = 3  # status of a rank that has lost its leader, or has told it why it ends
ALONE = 4  # status of a rank that has found no leader in time
WAIT_S = "wait_s"  # key of the time that a collective may wait
GATHERED = "gathered"  # key that is there once all ranks have joined
RANKS_HERE = "ranks_here"  # key of the number of ranks that each machine holds
RECIPE = "recipe"  # key of the leader's `common` settings
OF_A_MACHINE = (
    "model.path",
    "device.threads",
    "speculation.draft_path",
    "scheduler.record",
    "parallel.nodes",
    "parallel.interface",
)
LENGTH = struct.Struct("<Q")  # length of the `RankStart` that follows it
SPARE, FOLLOWER = "recipes.cluster.spare_process", "recipes.assembly.follower_process"


def common(recipe: Recipe) -> dict[str, Any]:
    """Return what the recipes of all ranks must agree on.

    That is everything except paths, what a machine has for itself, as the threads of its cores, and what only
    the leader reads; a placement counts by the content of its file.
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


def restored(text: str) -> Recipe:
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


class RankStart(msgspec.Struct, frozen=True):
    """What the process of a rank reads first: which rank it is, and of which engine."""

    rank: int
    leader: str  # host and port of the leader's store
    environment: dict[str, str]  # variables that it sets
    recipe: str  # JSON, as the recipe describes itself


class SpareRank:
    """A process that imports what a rank needs, beside an engine that serves, and waits for a `RankStart`.

    It ends when its parent does.
    """

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.process = subprocess.Popen(
            [sys.executable, "-m", SPARE, FOLLOWER], cwd=ROOT, env=self.environment, stdin=subprocess.PIPE
        )

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None


class SpareRanks:
    """Spare processes of the further ranks of an engine on this machine, each of which is taken once."""

    def __init__(self, num_ranks: int) -> None:
        self._waiting = [SpareRank() for _ in range(num_ranks)]

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> SpareRank | None:
        """Return one that runs, or None where there is none."""
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.is_running:
                return spare
            log.info("a spare rank has ended, and another process is started in its place")
            _end(spare.process)
        return None

    def close(self) -> None:
        """End those that were not taken."""
        while self._waiting:
            _end(self._waiting.pop().process)


class RankProcess:
    """A rank, as seen by the process that has started it.

    `device` is the device that it may use, if any. A `spare` process becomes the rank, where there is one.
    """

    def __init__(
        self,
        recipe: Recipe,
        rank: int,
        leader: str,
        device: str | None,
        *,
        spare: SpareRank | None = None,
    ) -> None:
        self.rank = rank
        wanted = os.environ | ({} if device is None else {VISIBLE[recipe.device.kind]: device})
        if spare is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", FOLLOWER], cwd=ROOT, env=wanted, stdin=subprocess.PIPE
            )
            changed = dict[str, str]()
        else:
            self._process = spare.process
            changed = {name: value for name, value in wanted.items() if spare.environment.get(name) != value}
        assert self._process.stdin is not None
        text = msgspec.json.encode(RankStart(rank, leader, changed, json.dumps(recipe.described())))
        with contextlib.suppress(BrokenPipeError):  # the process has already ended, which `ended` reports
            self._process.stdin.write(LENGTH.pack(len(text)) + text)
            self._process.stdin.flush()
        if spare is not None:
            restore_priority(spare.process.pid)

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
        _end(self._process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
