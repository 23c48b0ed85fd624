"""Read HCCL's rank table, which says in which servers an engine's NPUs are.

The Ascend Operator or hccl_tools writes it. Every field that is read is checked first, and a table that
cannot be used is refused in one line with the file, the field, its value and the fix.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from borders.files import MOST_JSON_BYTES, read_bounded
from borders.numbers import integers
from borders.refusal import abbreviate
from recipes.schema.recipe_error import RecipeError

VERSIONS = ("1.0", "1.2")  # 910 and 910B; 910C
FIX = "let the operator or hccl_tools write the table again, or let RANK_TABLE_FILE name another"
_RANKS = integers(0, 2**20)
_LOOKS_S = 1.0  # interval between checks whether the rank table is complete


@dataclass(frozen=True, slots=True)
class RankServer:
    """A server of a rank table: its address, and the ranks of its NPUs."""

    address: str
    ranks: tuple[int, ...]


def read_rank_table(path: Path, wait_s: float) -> tuple[RankServer, ...]:
    """Return the servers of a table, by their lowest rank, once its status is completed.

    Raises RecipeError for a table that cannot be used, and for one that is not completed within `wait_s`.
    """
    until_s = time.monotonic() + wait_s
    while (status := (table := _parsed(path)).get("status", "completed")) != "completed":
        if time.monotonic() > until_s:
            raise RecipeError(
                "parallel.connect_timeout_s",
                f"{path} is not completed after {wait_s:g} s; its status is {abbreviate(status)}",
                "see why the operator cannot place all pods, or raise it",
            )
        time.sleep(_LOOKS_S)
    listed = table.get("server_list")
    if not isinstance(listed, list) or not listed:
        raise refused(path, "server_list", listed, "it must list the servers")
    servers = tuple(_server(path, number, each) for number, each in enumerate(listed))
    for field, value, problem in _contradictions(table, servers):
        raise refused(path, field, value, problem)
    return tuple(sorted(servers, key=lambda each: min(each.ranks)))


def refused(path: Path, field: str, value: object, problem: str) -> RecipeError:
    """Return the error for a field of a table."""
    said = "is not there" if value is None else f"is {abbreviate(value)}"
    return RecipeError((), f"{path}: {field} {said}; {problem}", FIX)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(read_bounded(path, MOST_JSON_BYTES))
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        raise RecipeError((), f"RANK_TABLE_FILE: {path}: {reason}", "name the table, or unset it") from error
    except (ValueError, RecursionError) as error:
        raise RecipeError((), f"{path}: it is no rank table ({error})", FIX) from error
    if not isinstance(table, dict):
        raise RecipeError((), f"{path}: it is no rank table, but {abbreviate(table)}", FIX)
    version = str(table.get("version", VERSIONS[0]))
    if version not in VERSIONS:
        problem = f"its version is {version[:60]}, and {' and '.join(VERSIONS)} can be read"
        raise RecipeError((), f"{path}: {problem}", FIX)
    return table


def _server(path: Path, number: int, server: object) -> RankServer:
    field = f"server_list[{number}]"
    if not isinstance(server, dict):
        raise refused(path, field, server, "it must be a server")
    name = "container_ip" if server.get("container_ip") else "server_id"
    address = server.get(name)
    if not isinstance(address, str) or not address or any(each.isspace() or each == "/" for each in address):
        raise refused(path, f"{field}.{name}", address, "it must be the server's address")
    devices = server.get("device")
    if not isinstance(devices, list) or not devices:
        raise refused(path, f"{field}.device", devices, "it must list the server's NPUs")
    ranks = []
    known = [str(each["device_id"]) for each in devices if isinstance(each, dict) and "device_id" in each]
    npu, times = Counter(known).most_common(1)[0] if known else ("", 1)
    if times > 1:
        raise refused(path, f"{field}.device", f"device_id {npu}", f"{times} ranks would take this NPU")
    for at, device in enumerate(devices):
        given = device.get("rank_id") if isinstance(device, dict) else None
        rank = _RANKS.parse(given) if isinstance(given, str) else _RANKS.read(given)
        if rank is None:
            raise refused(path, f"{field}.device[{at}].rank_id", given, f"it must be {_RANKS}")
        ranks.append(rank)
    return RankServer(address, tuple(ranks))


def _contradictions(
    table: dict[str, Any], servers: tuple[RankServer, ...]
) -> Iterator[tuple[str, object, str]]:
    """Yield a field, its value and the problem where fields, each in range, contradict each other."""
    count = table.get("server_count")
    if count is not None and str(count) != str(len(servers)):
        yield "server_count", count, f"server_list has {len(servers)}"
    address, times = Counter(each.address for each in servers).most_common(1)[0]
    if times > 1:
        yield "server_list", address, f"{times} servers have this address"
    ranks = [rank for each in servers for rank in each.ranks]
    rank, times = Counter(ranks).most_common(1)[0]
    if times > 1:
        yield "rank_id", rank, f"{times} NPUs have this rank"
    if max(ranks) >= len(ranks):
        yield "rank_id", max(ranks), f"{len(ranks)} NPUs have the ranks from 0 to {len(ranks) - 1}"
    sizes = sorted({len(each.ranks) for each in servers})
    if len(sizes) > 1:
        counts = ", ".join(f"{each.address} has {len(each.ranks)}" for each in servers[:8])
        yield "server_list", counts, "each server must have the same number of NPUs"
