"""Find which machines hold the ranks of an engine, and which of them this machine is.

A list in the recipe defines the machines, or else the launcher that has started this process, by its
environment or by the file that it leaves. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from borders.addresses import is_address
from borders.numbers import PORTS, Range, integers
from borders.refusal import abbreviate
from recipes.cluster.rank_table import read_rank_table
from recipes.schema.parallel_section import LEADER_PORT, ParallelSection
from recipes.schema.recipe_error import RecipeError

HERE = "127.0.0.1"
RANK_TABLE = Path("/user/serverid/devindex/config/hccl.json")  # the Ascend Operator mounts it there
_HIDDEN_TABLE = "CONTINUOUS_BATCHING_RANK_TABLE"  # what RANK_TABLE_FILE was before it was hidden
_PORTS_OF_JOBS = 1000  # this many SLURM jobs that share a node use different ports
_NUMBERS, _COUNTS = integers(0, 2**31 - 1), integers(1, 2**31 - 1)
_NUMBERED = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOST = rf"(?:[^\s,\[\]]|{_NUMBERED})+"
_VOLCANOS = re.compile(r"VC_\w+_HOSTS")
_SLURM_LIST = re.compile(rf"{_HOST}(?:,{_HOST})*")

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


def ranks_here(parallel: ParallelSection, cluster: Cluster) -> int:
    """Return how many ranks of an engine share this host's memory; a host may be named several times."""
    names = parallel.nodes or (cluster.leader,)
    return len(cluster.ranks_of(0, parallel.ranks)) * names.count(names[0])


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
    ranks = parallel.ranks
    if ranks == 1:  # the launcher's numbers do not matter, since it may start many engines of one rank
        if len(parallel.nodes or ()) > 1:
            raise _too_many_nodes(parallel)
        return Cluster("this machine")
    found = named_cluster(parallel, environment, own_names, rank_table)
    if ranks % found.num_nodes:
        raise RecipeError(
            "parallel.tensor",
            f"{ranks} ranks cannot be shared evenly by {found.num_nodes} machines ({found.source})",
            f"make them a multiple of {found.num_nodes}",
            value=ranks,
        )
    # One machine needs no network, whatever its address is.
    return found if found.num_nodes > 1 else Cluster(found.source)


def _too_many_nodes(parallel: ParallelSection) -> RecipeError:
    """Return the refusal of several machines for one rank, each of which would hold an engine of its own."""
    named = len(parallel.nodes or ())
    return RecipeError(
        ("parallel.nodes", "parallel.tensor"),
        f"{named} machines are named, and the engine has one rank",
        f"set parallel.tensor to a multiple of {named}, or leave parallel.nodes out",
        value=parallel.nodes,
    )


def named_cluster(
    parallel: ParallelSection,
    environment: Environment,
    own_names: Callable[[], set[str]] | None = None,
    rank_table: Path = RANK_TABLE,
) -> Cluster:
    """Return the machines that the recipe or the launcher names, whatever the number of ranks."""
    names = own_names or names_of_this_machine
    found = (
        _listed(parallel, environment, names)
        or _by_torchrun(environment)
        or _by_ascend_operator(environment)
        or _in_rank_table(parallel, environment, names, rank_table)
        or _by_volcano(environment, names)
        or _by_slurm(environment)
    )
    if found is None:
        _check_alone(environment)
    return found or Cluster("this machine")


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
    node = _optional(environment, "NODE_RANK", integers(0, len(nodes) - 1))
    if node is None:
        node = _own_place(nodes, own_names())
    if node is None:
        raise RecipeError(
            "parallel.nodes",
            f"none of {', '.join(nodes)} is a name or an address of this machine",
            "correct them, or say which one this is by NODE_RANK=0, NODE_RANK=1, ...",
        )
    return Cluster("parallel.nodes", len(nodes), node, nodes[0], _leader_port(environment))


def _own_place(machines: Sequence[str], own: set[str]) -> int | None:
    """Return which of these machines has a name of this one, or else an address of any interface here."""
    found = next((at for at, name in enumerate(machines) if name in own), None)
    if found is None:
        found = next((at for at, name in enumerate(machines) if is_here(name)), None)
    return found


def _by_torchrun(environment: Environment) -> Cluster | None:
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    if _needed(environment, "LOCAL_WORLD_SIZE") != 1:
        raise RecipeError(
            (),
            "torchrun has started several processes on this machine, and one starts all ranks of a machine",
            "run it with --nproc-per-node 1",
        )
    num_nodes = _needed(environment, "WORLD_SIZE", _COUNTS)
    port = _needed(environment, "MASTER_PORT", integers(1, PORTS.most - 1))
    leader = _address(environment, "MASTER_ADDR")
    # torchrun itself listens on its own port, so the ranks meet on the next one
    return _checked(Cluster("torchrun", num_nodes, _needed(environment, "RANK"), leader, port + 1))


def _by_ascend_operator(environment: Environment) -> Cluster | None:
    """Read the Ascend Operator's variables.

    Its RANK is the machine's number, its LOCAL_RANK a list such as 0,1,2,3 or {0,1,2,3}, and its WORLD_SIZE
    the number of NPUs. The list of a single NPU looks like the number that other launchers set there, and is
    read only where there are other NPUs: what is left of another launcher must not hide the one of this job.
    """
    listed = environment.get("LOCAL_RANK", "")
    has_all = {"MASTER_ADDR", "MASTER_PORT", "RANK"} <= environment.keys()
    has_others = environment.get("WORLD_SIZE", "") not in ("", "1")
    is_single = listed != "" and environment.get("LOCAL_WORLD_SIZE") == "1" and has_all and has_others
    if not re.search(r"[{,]", listed) and not is_single:
        return None
    world, here = _needed(environment, "WORLD_SIZE", _COUNTS), _needed(environment, "LOCAL_WORLD_SIZE")
    if here < 1 or world % here:
        raise RecipeError(
            (), f"LOCAL_WORLD_SIZE is {here}, which does not divide WORLD_SIZE, {world}", "see the AscendJob"
        )
    if not re.fullmatch(r"\{?\d+(,\d+)*\}?", listed) or listed.count(",") + 1 != here:
        problem = f"LOCAL_RANK is {abbreviate(listed)}, and LOCAL_WORLD_SIZE says {here} NPUs"
        raise RecipeError((), problem, "see the AscendJob")
    port, node = _needed(environment, "MASTER_PORT", integers(1, PORTS.most)), _needed(environment, "RANK")
    return _checked(Cluster("AscendJob", world // here, node, _address(environment, "MASTER_ADDR"), port))


def _in_rank_table(
    parallel: ParallelSection, environment: Environment, own_names: Callable[[], set[str]], path: Path
) -> Cluster | None:
    """Read a rank table, which the environment names, or which is mounted."""
    named = environment.get("RANK_TABLE_FILE", environment.get(_HIDDEN_TABLE))
    if named is None and not path.exists():
        return None
    if named == "":
        raise RecipeError((), "RANK_TABLE_FILE is ''", "let it name the rank table, or unset it")
    path = path if named is None else Path(named)
    servers = read_rank_table(path, parallel.connect_timeout_s)
    addresses = [each.address for each in servers]
    own = own_names() | {environment[name] for name in ("POD_IP", "XDL_IP") if name in environment}
    node = _optional(environment, "NODE_RANK", integers(0, len(servers) - 1))
    if node is None:
        node = _own_place(addresses, own)
    if node is None:
        raise RecipeError(
            (),
            f"{path} names {', '.join(addresses)}, and none of them is this machine",
            "say which one this is by POD_IP, or by NODE_RANK=0, NODE_RANK=1, ...",
        )
    num_npus = sum(len(each.ranks) for each in servers)
    if parallel.ranks > num_npus:
        raise RecipeError(
            "parallel.tensor",
            f"{parallel.ranks} ranks take an NPU each, and {path} lists {num_npus}",
            "lower it, or let the table list more",
            value=parallel.ranks,
            limit=num_npus,
        )
    return Cluster(str(path), len(servers), node, addresses[0], _leader_port(environment))


def hide_rank_table(environment: MutableMapping[str, str]) -> None:
    """Let RANK_TABLE_FILE name nothing to torch_npu, and still the same to `find_cluster`.

    torch_npu makes communicators of all NPUs that the file lists, of which the ranks may be only some.
    """
    if "RANK_TABLE_FILE" in environment:
        environment[_HIDDEN_TABLE] = environment.pop("RANK_TABLE_FILE")


def _by_volcano(environment: Environment, own_names: Callable[[], set[str]]) -> Cluster | None:
    """Read what Volcano's plugins set in the pods of a job.

    Its svc names the pods of each task, as in VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job, and its env
    says which pod of its task this is. A master leads its workers.
    """
    tasks = {name: _hosts(environment, name) for name in sorted(environment) if _VOLCANOS.fullmatch(name)}
    if not tasks:
        return None
    if len(tasks) > 1 and set(tasks) != {"VC_MASTER_HOSTS", "VC_WORKER_HOSTS"}:
        raise RecipeError(
            (),
            f"{', '.join(tasks)} name the pods of {len(tasks)} tasks, and of several only a master and its"
            " workers hold one engine",
            "name the machines by parallel.nodes, and say which one this is by NODE_RANK=0, NODE_RANK=1, ...",
        )
    pods = [(host, name, at) for name, listed in tasks.items() for at, host in enumerate(listed)]
    node = _optional(environment, "NODE_RANK", integers(0, len(pods) - 1))
    if node is None:
        node = _pod_of(pods, environment, own_names())
    return _checked(Cluster("Volcano", len(pods), node, pods[0][0], _leader_port(environment)))


def _pod_of(pods: Sequence[tuple[str, str, int]], environment: Environment, own: set[str]) -> int:
    """Return which of the pods this is: by its name, or else by its index, which must not contradict it.

    A pod is a host, the variable that names it, and its place there.
    """
    named = "VC_TASK_INDEX" if "VC_TASK_INDEX" in environment else "VK_TASK_INDEX"  # its older name
    index = _optional(environment, named, _NUMBERS)
    found = (node for node, (host, *_) in enumerate(pods) if host in own or host.partition(".")[0] in own)
    node = next(found, None)
    if node is None and index is not None and len({name for _, name, _ in pods}) == 1:
        return index
    if node is None:
        raise RecipeError(
            (),
            f"{abbreviate(','.join(host for host, *_ in pods))} of Volcano's svc plugin names no machine that"
            " is this one",
            "say which one this is by NODE_RANK=0, NODE_RANK=1, ...",
        )
    host, name, at = pods[node]
    if index is not None and index != at:
        raise RecipeError(
            (),
            f"{named} is {index}, and this machine is {host}, which is number {at} of {name}",
            "set none of them by hand, or say which one this is by NODE_RANK=0, NODE_RANK=1, ...",
        )
    return node


def _by_slurm(environment: Environment) -> Cluster | None:
    if "SLURM_JOB_ID" not in environment:
        return None
    num_nodes = _optional(environment, "SLURM_NNODES", _COUNTS)
    # A shell of salloc has no SLURM_NODEID; a batch script has that of the first machine, and is alone there
    is_step = "SLURM_STEP_ID" in environment or "SLURM_STEP_NODELIST" in environment
    if num_nodes is not None and num_nodes > 1 and not ("SLURM_NODEID" in environment and is_step):
        missing = "SLURM_STEP_ID" if "SLURM_NODEID" in environment else "SLURM_NODEID"
        raise RecipeError(
            (),
            f"SLURM_NNODES is {num_nodes}, and {missing}, which srun sets on each of them, is not set",
            "start the command on each by srun, or allocate one machine",
        )
    if "SLURM_NODEID" not in environment:
        return None
    if environment.get("SLURM_LOCALID", "0") != "0":
        raise RecipeError(
            (),
            "SLURM has started several processes on this machine, and one starts all ranks of a machine",
            "run it with --ntasks-per-node 1",
        )
    node, num_nodes = _needed(environment, "SLURM_NODEID"), _needed(environment, "SLURM_NNODES", _COUNTS)
    port = LEADER_PORT + _needed(environment, "SLURM_JOB_ID") % _PORTS_OF_JOBS
    return _checked(Cluster("SLURM", num_nodes, node, _first_host(environment, num_nodes), port))


def _first_host(environment: Environment, num_nodes: int) -> str:
    """Return the first machine of SLURM's step, or of its job where the step is not named."""
    name = "SLURM_STEP_NODELIST" if environment.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    listed = environment.get(name)
    found = [] if listed is None else list(itertools.islice(hosts(listed), num_nodes))
    if len(found) < num_nodes:
        said = "is not set" if listed is None else f"is {abbreviate(listed)}"
        names = "no machine" if not found else f"only {len(found)}"
        raise RecipeError(
            (),
            f"{name} {said}, which names {names} of {num_nodes} (SLURM_NNODES)",
            "start the command by srun within the job, which sets it, as in n[1-2],m7",
        )
    return found[0]


def hosts(listed: str) -> Iterator[str]:
    """Yield the hosts of a list in SLURM's notation, n1,rack[1-2]n[01-03,7]; none of another."""
    if _SLURM_LIST.fullmatch(listed):
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


def _check_alone(environment: Environment) -> None:
    """Raise RecipeError where the environment says that there are other machines, in no way known here."""
    world = environment.get("WORLD_SIZE", "")
    if world not in ("", "1") and ("MASTER_ADDR" in environment or "RANK" in environment):
        raise RecipeError(
            (),
            f"WORLD_SIZE is {abbreviate(world)}: there are others, and no launcher known here has set it,"
            " neither torchrun (TORCHELASTIC_RUN_ID), nor an AscendJob (LOCAL_RANK=0,1,...), nor Volcano"
            " (VC_WORKER_HOSTS), nor SLURM",
            "name the machines by parallel.nodes, or unset WORLD_SIZE",
        )
    # Launchers of MPI, such as mpirun, set one of these.
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (number := environment.get(name, "1")) not in ("", "1"):
            raise RecipeError(
                (),
                f"{name} is {abbreviate(number)}: MPI has started other processes, and they would not know"
                " of each other",
                f"start one on each machine and name the machines by parallel.nodes, or unset {name}",
            )


def _checked(cluster: Cluster) -> Cluster:
    if not 0 <= cluster.node < cluster.num_nodes:
        raise RecipeError(
            (),
            f"{cluster.source} says that this is machine {cluster.node} of {cluster.num_nodes}",
            "count from 0",
        )
    return cluster


def _hosts(environment: Environment, name: str) -> list[str]:
    """Return the machines of a list, whose names commas part."""
    listed = [each.strip() for each in environment[name].split(",")]
    if not all(map(_is_address, listed)) or len(set(listed)) < len(listed):
        fix = "it must be different names or addresses, without ports, parted by commas"
        raise RecipeError((), f"{name} is {abbreviate(environment[name])}", fix)
    return listed


def _is_address(text: str) -> bool:
    return bool(text) and not re.search(r"[\s/,]", text) and not re.fullmatch(r"[^:]*:\d*", text)


def _address(environment: Environment, name: str) -> str:
    """Return the address of a machine, which a launcher of this kind sets."""
    address = environment.get(name)
    fix = "it must be the first machine's name or address, without a port"
    if not address:
        raise RecipeError((), f"{name} is {'not set' if address is None else repr(address)}", fix)
    if not _is_address(address):
        raise RecipeError((), f"{name} is {abbreviate(address)}", fix)
    # URLs have addresses of IPv6 in brackets, which sockets do not take.
    in_brackets = re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\]", address)
    return in_brackets[1] if in_brackets else address


def _leader_port(environment: Environment) -> int:
    return _optional(environment, "MASTER_PORT", PORTS) or LEADER_PORT


def _needed(environment: Environment, name: str, allowed: Range[int] = _NUMBERS) -> int:
    number = _optional(environment, name, allowed)
    if number is None:
        raise RecipeError((), f"{name} is not set, and a launcher of this kind sets it", "see its log")
    return number


def _optional(environment: Environment, name: str, allowed: Range[int]) -> int | None:
    """Return an integer of a range, or None if it is not set."""
    text = environment.get(name)
    number = None if text is None else allowed.parse(text)
    if text is not None and number is None:
        raise RecipeError((), f"{name} is {abbreviate(text)}", f"it must be {allowed}")
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


def is_here(address: str) -> bool:
    """Return whether an interface of this machine has this address; False for a name.

    What is sent to such an address is sent from it. That it can be bound says less: some systems let any
    address be bound (net.ipv4.ip_nonlocal_bind), and all of them 0.0.0.0.
    """
    if not is_address(address):
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # this sends nothing; the system only chooses an address
        except OSError:
            return False
        return ip_address(str(probe.getsockname()[0]).partition("%")[0]) == ip_address(address)


def own_address() -> str:
    """Return the address from which other machines see this one send."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # this sends nothing; the system only chooses an address
        except OSError:  # there is no network
            return HERE
        return str(probe.getsockname()[0])
