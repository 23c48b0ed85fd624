"""Find which machines hold the ranks of an engine, and which of them this machine is.

A list in the recipe defines the machines, or else the launcher that has started this process, by its
environment or by the file that it leaves. Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from borders.numbers import integers
from recipes.schema.parallel_section import LEADER_PORT, ParallelSection
from recipes.schema.recipe_error import RecipeError

HERE = "127.0.0.1"
RANK_TABLE = Path("/user/serverid/devindex/config/hccl.json")  # the Ascend Operator mounts it there
_LOOKS_S = 1.0  # interval between checks whether the rank table is complete
_PORTS_OF_JOBS = 1000  # this many SLURM jobs that share a node use different ports

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines of an engine, of which this one is `node`, counted from 0.

    Each machine holds the same number of ranks.

    The first machine leads: the others find it at `leader`, where its store listens on `port`. Port 0 is any
    free port, which the leader announces.
    """

    source: str  # description of the source of these values
    num_nodes: int = 1
    node: int = 0
    leader: str = HERE
    port: int = 0

    def ranks_of(self, node: int, ranks: int) -> range:
        """Return which of all ranks a machine holds."""
        each = ranks // self.num_nodes
        return range(node * each, (node + 1) * each)


def find_cluster(
    parallel: ParallelSection,
    environment: Environment,
    own_names: Callable[[], set[str]] | None = None,
    rank_table: Path = RANK_TABLE,
) -> Cluster:
    """Return where the ranks are; raises RecipeError for inconsistent numbers.

    `own_names` returns the names and addresses of this machine; `rank_table` is read unless RANK_TABLE_FILE
    names another file.
    """
    names, ranks = own_names or names_of_this_machine, parallel.ranks
    if ranks == 1:  # the launcher's numbers do not matter, since it may start many engines of one rank
        return Cluster("this machine")
    found = (
        _listed(parallel, environment, names)
        or _by_torchrun(environment)
        or _by_ascend_operator(environment)
        or _in_rank_table(parallel, environment, names, rank_table)
        or _by_slurm(environment)
        or Cluster("this machine")
    )
    if ranks % found.num_nodes:
        raise RecipeError(
            "parallel.tensor",
            f"{ranks} ranks cannot be shared evenly by {found.num_nodes} machines ({found.source})",
            f"make them a multiple of {found.num_nodes}",
            value=ranks,
        )
    # One machine needs no network, whatever its address is.
    return found if found.num_nodes > 1 else Cluster(found.source)


def _listed(
    parallel: ParallelSection, environment: Environment, own_names: Callable[[], set[str]]
) -> Cluster | None:
    nodes = parallel.nodes
    if nodes is None:
        return None
    if len(set(nodes)) < len(nodes) and "NODE_RANK" not in environment:
        raise RecipeError(
            "parallel.nodes",
            f"{', '.join(nodes)} name a machine twice",
            "name each once, or say which one this is by NODE_RANK=0, NODE_RANK=1, ...",
        )
    node = _number(environment, "NODE_RANK", len(nodes))
    if node is None:
        own = own_names()
        node = next((at for at, name in enumerate(nodes) if name in own), None)
    if node is None:
        raise RecipeError(
            "parallel.nodes",
            f"none of {', '.join(nodes)} is a name or an address of this machine",
            "correct them, or say which one this is by NODE_RANK=0, NODE_RANK=1, ...",
        )
    port = _number(environment, "MASTER_PORT", 2**16) or LEADER_PORT
    return Cluster("parallel.nodes", len(nodes), node, nodes[0], port)


def _by_torchrun(environment: Environment) -> Cluster | None:
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    if _needed(environment, "LOCAL_WORLD_SIZE") != 1:
        raise RecipeError(
            (),
            "torchrun has started several processes on this machine, and one starts all ranks of a machine",
            "run it with --nproc-per-node 1",
        )
    num_nodes = _needed(environment, "WORLD_SIZE")
    port = _needed(environment, "MASTER_PORT") + 1  # torchrun itself listens on its own port
    return _checked(
        Cluster("torchrun", num_nodes, _needed(environment, "RANK"), environment["MASTER_ADDR"], port)
    )


def _by_ascend_operator(environment: Environment) -> Cluster | None:
    """Read the Ascend Operator's variables.

    Its RANK is the machine's number, its LOCAL_RANK a list such as {0,1,2,3}, and its WORLD_SIZE the number
    of NPUs.
    """
    if not environment.get("LOCAL_RANK", "").startswith("{"):
        return None
    world, here = _needed(environment, "WORLD_SIZE"), _needed(environment, "LOCAL_WORLD_SIZE")
    if here < 1 or world % here:
        raise RecipeError(
            (), f"LOCAL_WORLD_SIZE is {here}, which does not divide WORLD_SIZE, {world}", "see the AscendJob"
        )
    port, node = _needed(environment, "MASTER_PORT"), _needed(environment, "RANK")
    return _checked(Cluster("AscendJob", world // here, node, environment["MASTER_ADDR"], port))


def _in_rank_table(
    parallel: ParallelSection, environment: Environment, own_names: Callable[[], set[str]], path: Path
) -> Cluster | None:
    """Read a rank table of version 1.0 (910, 910B) or 1.2 (910C), once it is complete."""
    path = Path(environment.get("RANK_TABLE_FILE", path))
    if not path.exists():
        return None
    until_s = time.monotonic() + parallel.connect_timeout_s
    while (table := _table(path)).get("status", "completed") != "completed":
        if time.monotonic() > until_s:
            raise RecipeError(
                "parallel.connect_timeout_s",
                f"{path} is not completed after {parallel.connect_timeout_s:g} s",
                "see why the operator cannot place all pods, or raise it",
            )
        time.sleep(_LOOKS_S)
    servers = sorted(
        table["server_list"], key=lambda each: min(int(npu["rank_id"]) for npu in each["device"])
    )
    addresses = [str(each.get("container_ip") or each["server_id"]) for each in servers]
    own = own_names() | {environment[name] for name in ("POD_IP", "XDL_IP") if name in environment}
    node = _number(environment, "NODE_RANK", len(servers))
    if node is None:
        node = next((at for at, address in enumerate(addresses) if address in own), None)
    if node is None:
        raise RecipeError(
            (),
            f"{path} names {', '.join(addresses)}, and none of them is this machine",
            "say which one this is by POD_IP, or by NODE_RANK=0, NODE_RANK=1, ...",
        )
    port = _number(environment, "MASTER_PORT", 2**16) or LEADER_PORT
    return Cluster(str(path), len(servers), node, addresses[0], port)


def _table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        version, servers = table.get("version", "1.0"), table.get("server_list", [])
        is_complete = table.get("status", "completed") == "completed"
        if version in ("1.0", "1.2") and (not is_complete or all(each["device"] for each in servers)):
            return dict(table)
        problem = f"its version is {version}, and 1.0 and 1.2 can be read"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"it is no rank table ({error!r})"
    raise RecipeError((), f"{path}: {problem}", "let RANK_TABLE_FILE name another")


def _by_slurm(environment: Environment) -> Cluster | None:
    if "SLURM_JOB_ID" not in environment or "SLURM_NODEID" not in environment:
        return None
    if environment.get("SLURM_LOCALID", "0") != "0":
        raise RecipeError(
            (),
            "SLURM has started several processes on this machine, and one starts all ranks of a machine",
            "run it with --ntasks-per-node 1",
        )
    node, num_nodes = _needed(environment, "SLURM_NODEID"), _needed(environment, "SLURM_NNODES")
    leader = next(hosts(environment["SLURM_JOB_NODELIST"]))
    port = LEADER_PORT + _needed(environment, "SLURM_JOB_ID") % _PORTS_OF_JOBS
    return _checked(Cluster("SLURM", num_nodes, node, leader, port))


def hosts(listed: str) -> Iterator[str]:
    """Yield the hosts of a list in SLURM's notation: n1,rack[1-2]n[01-03,7]."""
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        yield from _expanded(name)


def _expanded(name: str) -> Iterator[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    ranges, _, after = rest.partition("]")
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for end in _expanded(after):
                yield f"{before}{number:0{len(first)}}{end}"


def _checked(cluster: Cluster) -> Cluster:
    if not 0 <= cluster.node < cluster.num_nodes:
        raise RecipeError(
            (),
            f"{cluster.source} says that this is machine {cluster.node} of {cluster.num_nodes}",
            "count from 0",
        )
    return cluster


def _needed(environment: Environment, name: str) -> int:
    number = _number(environment, name, 2**31)
    if number is None:
        raise RecipeError((), f"{name} is not set, and a launcher of this kind sets it", "see its log")
    return number


def _number(environment: Environment, name: str, end: int) -> int | None:
    """Return an integer from 0 to `end` - 1, or None if it is not set."""
    text, allowed = environment.get(name), integers(0, end - 1)
    number = None if text is None else allowed.parse(text)
    if text is not None and number is None:
        raise RecipeError((), f"{name} is {text!r}", f"it must be {allowed}")
    return number


def names_of_this_machine() -> set[str]:
    """Return all names and addresses by which other machines may know this one."""
    name = socket.gethostname()
    names = {name, name.partition(".")[0], socket.getfqdn(), "localhost", HERE}
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            found = socket.getaddrinfo(name, None, family)
        except OSError:  # this machine has no address of this family
            continue
        names |= {str(each[4][0]) for each in found}
    return names | {own_address()}


def own_address() -> str:
    """Return the address from which other machines see this one send."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # this sends nothing; the system only chooses an address
        except OSError:  # there is no network
            return HERE
        return str(probe.getsockname()[0])
