"""The variables of every launcher give the same ranks on the same machines, or are refused in one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from recipes.cluster import cluster as cluster_module
from recipes.cluster import ranks
from recipes.cluster.cluster import Cluster, find_cluster, hosts, is_here, own_address
from recipes.cluster.launched import table
from recipes.schema.parallel_section import ParallelSection
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError
from tests.each_of import each_of

GOLDEN = Path(__file__).with_name("clusters.txt")
RANKS_A_NODE = 8
SIZES = (1, 2, 8)


def address(node: int) -> str:
    return f"10.0.0.{node + 1}"


def rank_table(num_nodes: int, version: str, **others: Any) -> dict[str, Any]:
    """As the Ascend Operator writes it, the servers in the order of their pods' names."""
    servers = [
        {
            "server_id": address(node),
            "device": [
                {"device_id": str(npu), "device_ip": "1.1.1.1", "rank_id": str(node * RANKS_A_NODE + npu)}
                | ({"super_device_id": "7"} if version == "1.2" else {})
                for npu in range(RANKS_A_NODE)
            ],
        }
        for node in reversed(range(num_nodes))
    ]
    pods = {"super_pod_list": [{"super_pod_id": "0", "server_list": []}]} if version == "1.2" else {}
    return {"status": "completed", "version": version, "server_list": servers} | pods | others


def servers(ranks: list[list[str | None]], address_of_all: str = "") -> str:
    """A table of servers with NPUs of these ranks; None: one that does not say its rank."""
    listed = [
        {
            "server_id": address_of_all or address(node),
            "device": [
                {"device_id": str(at)} | ({} if rank is None else {"rank_id": rank})
                for at, rank in enumerate(held)
            ],
        }
        for node, held in enumerate(ranks)
    ]
    return json.dumps({"status": "completed", "version": "1.0", "server_list": listed})


def launched(launcher: str, num_nodes: int, node: int, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The recipe's keys and the environment that a launcher gives a process of this machine."""
    world = str(num_nodes * RANKS_A_NODE)
    match launcher:
        case "parallel.nodes":
            return {"nodes": tuple(map(address, range(num_nodes)))}, {}
        case "torchrun":
            found = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(num_nodes)}
            master = {"MASTER_ADDR": address(0), "MASTER_PORT": "29500"}
            return {}, {**found, **master, "RANK": str(node), "LOCAL_RANK": "0", "GROUP_RANK": str(node)}
        case "AscendJob":
            found = {"MASTER_ADDR": address(0), "MASTER_PORT": "2222", "WORLD_SIZE": world, "RANK": str(node)}
            return {}, {**found, "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0,1,2,3,4,5,6,7"}
        case "hccl.json 1.0" | "hccl.json 1.2":
            path = folder / "hccl.json"
            path.write_text(json.dumps(rank_table(num_nodes, launcher[-3:])))
            return {}, {"RANK_TABLE_FILE": str(path), "POD_IP": address(node)}
        case "Volcano":
            listed = ",".join(map(address, range(num_nodes)))
            task = {"VC_WORKER_NUM": str(num_nodes), "VC_TASK_INDEX": str(node)}
            return {}, {"VC_WORKER_HOSTS": listed, **task}
        case "SLURM":
            listed = "10.0.0.1" if num_nodes == 1 else f"10.0.0.[1-{num_nodes}]"
            job = {"SLURM_JOB_ID": "31007", "SLURM_NNODES": str(num_nodes), "SLURM_JOB_NODELIST": listed}
            return {}, {**job, "SLURM_NODEID": str(node), "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
        case "Ray":
            return {"nodes": tuple(map(address, range(num_nodes)))}, {"NODE_RANK": str(node)}
    raise AssertionError(launcher)


LAUNCHERS = (
    *("parallel.nodes", "torchrun", "AscendJob", "hccl.json 1.0", "hccl.json 1.2", "Volcano", "SLURM", "Ray"),
)


def found(launcher: str, num_nodes: int, node: int, folder: Path) -> Cluster:
    keys, environment = launched(launcher, num_nodes, node, folder)
    parallel = ParallelSection(tensor=num_nodes * RANKS_A_NODE, **keys)
    return find_cluster(parallel, environment, lambda: {address(node)}, folder / "none")


def lines(folder: Path) -> Iterator[str]:
    """For each launcher and number of machines, what each machine is, and where the ranks are."""
    recipe = "recipes/tiny/npu.yaml"
    for launcher in LAUNCHERS:
        for num_nodes in SIZES:
            clusters = [found(launcher, num_nodes, node, folder) for node in range(num_nodes)]
            yield f"{launcher}, {num_nodes} machines"
            for each in clusters:
                source = each.source.replace(str(folder), "")
                yield f"  machine {each.node} of {each.num_nodes}, leader {each.leader}:{each.port}, {source}"
            asked = load(recipe, [f"parallel.tensor={num_nodes * RANKS_A_NODE}"])
            rows = [list(table(asked, each, {})) for each in clusters]
            assert all(each == rows[0] for each in rows), "all machines agree"
            shown = rows[0] if num_nodes < 8 else [rows[0][0], *rows[0][-2:]]
            yield from (f"    {row}" for row in shown)


def test_every_launcher_places_the_same_ranks(tmp_path: Path) -> None:
    assert list(lines(tmp_path)) == GOLDEN.read_text().splitlines()


def test_the_devices_of_this_machine_are_those_that_are_visible() -> None:
    recipe = load("recipes/tiny/npu.yaml", ["parallel.tensor=4"])
    cluster = Cluster("parallel.nodes", 2, 1, "a", 77)
    rows = list(table(recipe, cluster, {"ASCEND_RT_VISIBLE_DEVICES": "4, 6,7"}))
    assert [row.rpartition("; ")[2] for row in rows] == [
        f"ASCEND_RT_VISIBLE_DEVICES={number}" for number in (0, 1, 4, 6)
    ]
    assert "npu 6, follows" in rows[3]
    words = r"2 ranks of this machine take a device each, and this process sees 1"
    with pytest.raises(RecipeError, match=words):
        list(table(recipe, cluster, {"ASCEND_RT_VISIBLE_DEVICES": "5"}))
    virtual = load("recipes/tiny/npu.yaml", ["parallel.tensor=4", "device.virtual=true"])
    assert "npu, leads" in next(table(virtual, cluster, {"ASCEND_RT_VISIBLE_DEVICES": "5"}))


def test_npus_are_counted_by_their_library_though_torch_has_not_loaded_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, recipe = "models.ops.npu.ops", load("recipes/tiny/npu.yaml", ["parallel.tensor=2"])
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda _: pytest.fail("torch may know no NPU"))
    monkeypatch.setitem(sys.modules, library, SimpleNamespace(num_npus=lambda: 3))
    assert list(ranks.devices_of(recipe, 2)) == ["0", "1"]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RecipeError, match="no NPU can be used here"):
        ranks.devices_of(recipe, 2)


def test_an_address_in_brackets_is_the_one_within() -> None:
    environment = TORCHRUN | {"MASTER_ADDR": "[fd00::1]"}
    assert find_cluster(ParallelSection(tensor=16), environment, set, Path("none")).leader == "fd00::1"


def test_a_step_of_slurms_has_machines_of_its_own() -> None:
    step = SLURM | {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[3-4]"}
    assert find_cluster(ParallelSection(tensor=16), step, set, Path("none")).leader == "n3"


def test_one_rank_asks_no_launcher() -> None:
    environment = {"SLURM_JOB_ID": "1", "SLURM_NODEID": "3", "SLURM_LOCALID": "3"}
    assert find_cluster(ParallelSection(), environment, set, Path("none")) == Cluster("this machine")


def test_the_list_of_the_recipe_is_heard_first() -> None:
    parallel = ParallelSection(tensor=4, nodes=("a", "b"))
    environment = {"SLURM_JOB_ID": "1", "SLURM_NODEID": "0", "NODE_RANK": "1", "MASTER_PORT": "77"}
    assert find_cluster(parallel, environment, set, Path("none")) == Cluster("parallel.nodes", 2, 1, "a", 77)


def test_a_machine_is_known_by_an_address_any_interface(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Names come first: an address of this machine may also be one that every machine has."""
    monkeypatch.setattr(cluster_module, "is_here", lambda each: each in (address(1), address(2)))
    parallel = ParallelSection(tensor=3, nodes=tuple(map(address, range(3))))
    assert find_cluster(parallel, {}, set, Path("none")).node == 1
    assert find_cluster(parallel, {}, lambda: {address(2)}, Path("none")).node == 2
    (tmp_path / "hccl.json").write_text(json.dumps(rank_table(2, "1.0")))
    environment = {"RANK_TABLE_FILE": str(tmp_path / "hccl.json")}
    assert find_cluster(ParallelSection(tensor=16), environment, set, Path("none")).node == 1


def test_a_rank_table_is_hidden_from_torch_npu_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of an engine join, and so do those of the next one of its process."""
    keys, environment = launched("hccl.json 1.0", 2, 1, tmp_path)
    monkeypatch.setenv("CONTINUOUS_BATCHING_RANK_TABLE", "")
    monkeypatch.delenv("CONTINUOUS_BATCHING_RANK_TABLE")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "join", lambda *_: None)
    parallel = ParallelSection(tensor=4, **keys)
    first = find_cluster(parallel, os.environ, set, Path("none"))
    assert first.num_nodes == 2
    for _ in range(2):
        ranks.joined(load("recipes/tiny/npu.yaml"), HashStore(), 0, 1.0)
        assert "RANK_TABLE_FILE" not in os.environ
        assert find_cluster(parallel, os.environ, set, Path("none")) == first


def test_an_address_is_here_where_what_is_sent_to_it_comes_from_it() -> None:
    assert is_here("127.0.0.1")
    assert is_here(own_address())
    others = "203.0.113.7", "2001:db8::7", "0.0.0.0", "255.255.255.255", "224.0.0.1", "localhost", ""
    assert not any(map(is_here, others))


@each_of(
    "listed, expected",
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("rack[1-2]n[9-10],x", ["rack1n9", "rack1n10", "rack2n9", "rack2n10", "x"]),
        ("n[08-11].site", ["n08.site", "n09.site", "n10.site", "n11.site"]),
    ],
)
def test_a_list_of_slurms_is_expanded(listed: str, expected: list[str]) -> None:
    assert list(hosts(listed)) == expected


def test_an_ascend_job_is_known_by_its_list_in_braces_or_not_and_of_a_single_npu() -> None:
    """The Ascend Operator writes no braces; torchrun, too, numbers a single process of a machine 0."""
    told = {
        "MASTER_ADDR": "a",
        "MASTER_PORT": "2222",
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    parallel = ParallelSection(tensor=2)
    for listed in ("0", "{0}"):
        cluster = find_cluster(parallel, told | {"LOCAL_RANK": listed}, set, Path("none"))
        assert cluster == Cluster("AscendJob", 2, 1, "a", 2222)
    both = told | {"LOCAL_RANK": "0,1", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
    assert find_cluster(parallel, both, set, Path("none")).source == "AscendJob"
    by_torchrun = told | {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    assert find_cluster(parallel, by_torchrun, set, Path("none")).source == "torchrun"


def test_what_a_launcher_has_left_behind_is_no_ascend_job() -> None:
    """The variables of one process, as a script for torch sets them, hide no launcher and are none."""
    parallel, slurm = ParallelSection(tensor=2), launched("SLURM", 2, 1, Path())[1]
    left = {"MASTER_ADDR": "a", "MASTER_PORT": "2222", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    of_one = left | {"RANK": "0", "WORLD_SIZE": "1"}
    for stray in (left, of_one):
        found = find_cluster(parallel, slurm | stray, set, Path("none"))
        assert (found.source, found.num_nodes, found.node) == ("SLURM", 2, 1)
        assert find_cluster(parallel, stray, set, Path("none")) == Cluster("this machine")


def without(environment: dict[str, str], name: str) -> dict[str, str]:
    return {each: value for each, value in environment.items() if each != name}


TORCHRUN = launched("torchrun", 2, 1, Path())[1]
ASCEND = launched("AscendJob", 2, 1, Path())[1]
SLURM = launched("SLURM", 2, 1, Path())[1]
VOLCANO = launched("Volcano", 2, 1, Path())[1]
MASTERED = {"VC_MASTER_HOSTS": "job-master-0.job", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job"}


@each_of(
    "keys, environment, words",
    [
        ({"tensor": 3}, TORCHRUN, "3 ranks cannot be shared evenly by 2 machines (torchrun); make them a"),
        ({}, TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, "run it with --nproc-per-node 1"),
        ({}, TORCHRUN | {"RANK": "2"}, "torchrun says that this is machine 2 of 2; count from 0"),
        ({}, ASCEND | {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE is 5, which does not divide WORLD_SIZE"),
        ({}, ASCEND | {"LOCAL_RANK": "0,1"}, "LOCAL_RANK is '0,1', and LOCAL_WORLD_SIZE says 8 NPUs"),
        ({}, {"LOCAL_RANK": "{0}", "WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE is not set, and a launcher of this"),
        ({}, SLURM | {"SLURM_LOCALID": "1"}, "run it with --ntasks-per-node 1"),
        ({"nodes": ("a", "b")}, {}, "parallel.nodes: none of a, b is a name or an address of this machine"),
        ({"nodes": ("a", "b"), "tensor": 1}, {}, "2 machines are named, and the engine has one"),
        ({"nodes": ("a", "a")}, {}, "parallel.nodes: a, a name a machine twice"),
        ({"nodes": ("a", "b")}, {"NODE_RANK": "2"}, "NODE_RANK is '2'; it must be an integer from 0 to 1"),
        ({}, without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set; it must be the first machine's"),
        ({}, TORCHRUN | {"MASTER_ADDR": "tcp://a"}, "MASTER_ADDR is 'tcp://a'; it must be the first"),
        ({}, ASCEND | {"MASTER_ADDR": "a:29500"}, "MASTER_ADDR is 'a:29500'; it must be the first machine's"),
        ({}, TORCHRUN | {"MASTER_PORT": "65535"}, "MASTER_PORT is '65535'; it must be an integer from 1 to"),
        ({}, ASCEND | {"LOCAL_RANK": "{0,1"}, "LOCAL_RANK is '{0,1', and LOCAL_WORLD_SIZE says 8"),
        ({}, SLURM | {"SLURM_JOB_NODELIST": "n[2-1]"}, "'n[2-1]', which names no machine of 2"),
        ({}, SLURM | {"SLURM_JOB_NODELIST": "n7"}, "'n7', which names only 1 of 2 (SLURM_NNODES)"),
        ({}, SLURM | {"SLURM_STEP_NODELIST": "x["}, "SLURM_STEP_NODELIST is 'x['"),
        ({}, without(SLURM, "SLURM_NODEID"), "start the command on each by srun, or allocate one machine"),
        (
            {},
            without(SLURM, "SLURM_STEP_ID"),
            "SLURM_NNODES is 2, and SLURM_STEP_ID, which srun sets on each",
        ),
        ({}, VOLCANO | {"VC_TASK_INDEX": "2"}, "Volcano says that this is machine 2 of 2; count from 0"),
        ({}, VOLCANO | {"VC_WORKER_HOSTS": ""}, "VC_WORKER_HOSTS is ''; it must be different names"),
        ({}, VOLCANO | {"VC_WORKER_HOSTS": "a:1,b:1"}, "is 'a:1,b:1'; it must be different names or"),
        ({}, without(VOLCANO, "VC_TASK_INDEX"), "names no machine that is this one; say which one this is"),
        ({}, MASTERED | {"VC_TASK_INDEX": "0"}, "names no machine that is this one; say which one this is"),
        ({}, VOLCANO | {"VC_PS_HOSTS": "c"}, "VC_PS_HOSTS, VC_WORKER_HOSTS name the pods of 2 tasks, and of"),
        ({}, {"OMPI_COMM_WORLD_SIZE": "2"}, "MPI has started other processes"),
        ({}, {"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE is '2': there are others, and no launcher known"),
        ({}, {"RANK_TABLE_FILE": "/no/such"}, "RANK_TABLE_FILE: /no/such: no such file or directory; name"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], environment: dict[str, str], words: str) -> None:
    parallel = ParallelSection(**({"tensor": 16} | keys))
    with pytest.raises(RecipeError) as refused:
        find_cluster(parallel, environment, set, Path("none"))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@each_of(
    "environment, own, node",
    [
        (MASTERED | {"VC_TASK_INDEX": "0"}, "job-master-0", 0),
        (MASTERED | {"VC_TASK_INDEX": "0"}, "job-worker-0", 1),
        (MASTERED | {"VK_TASK_INDEX": "1"}, "job-worker-1.job", 2),
        (MASTERED, "job-worker-1", 2),
        (MASTERED | {"NODE_RANK": "1", "VC_TASK_INDEX": "0"}, "elsewhere", 1),
        # Its plugin for torch, too, says which pod of all this is, and how many there are
        (MASTERED | {"MASTER_ADDR": "job-master-0.job", "RANK": "2", "WORLD_SIZE": "3"}, "job-worker-1", 2),
        (VOLCANO, "elsewhere", 1),
        (without(VOLCANO, "VC_TASK_INDEX") | {"VK_TASK_INDEX": "1"}, "elsewhere", 1),
    ],
)
def test_a_pod_of_volcanos_is_known_by_its_name_or_its_index(
    environment: dict[str, str], own: str, node: int
) -> None:
    cluster = find_cluster(ParallelSection(tensor=6), environment, lambda: {own}, Path("none"))
    num_pods, leader = (3, "job-master-0.job") if "VC_MASTER_HOSTS" in environment else (2, address(0))
    assert cluster == Cluster("Volcano", num_pods, node, leader, 29400)


def test_what_contradicts_volcanos_names_is_told_and_what_goes_before_them_is_taken() -> None:
    parallel, own = ParallelSection(tensor=6), {"job-worker-1"}
    with pytest.raises(
        RecipeError, match=r"VC_TASK_INDEX is 0, and this machine is job-worker-1\.job"
    ) as told:
        find_cluster(parallel, MASTERED | {"VC_TASK_INDEX": "0"}, lambda: own, Path("none"))
    assert "number 1 of VC_WORKER_HOSTS" in str(told.value)
    listed = ParallelSection(tensor=6, nodes=("a", "job-worker-1"))
    found = find_cluster(listed, MASTERED | {"VC_TASK_INDEX": "0"}, lambda: own, Path("none"))
    assert (found.source, found.node) == ("parallel.nodes", 1)
    alone = find_cluster(parallel, {"VC_TASK_INDEX": "1"}, lambda: own, Path("none"))
    assert alone == Cluster("this machine"), "without the svc plugin, pods are engines of their own"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is no rank table"),
        (json.dumps(rank_table(2, "3")), "its version is 3, and 1.0 and 1.2 can be read"),
        (json.dumps(rank_table(2, "1.0")), "names 10.0.0.1, 10.0.0.2, and none of them is this machine"),
        (json.dumps(rank_table(2, "1.0", status="initializing")), "is not completed after 1 s"),
        (json.dumps(rank_table(2, "1.0", server_count="3")), "server_count is '3'; server_list has 2"),
        (servers([["0"], ["1", None]]), "server_list[1].device[1].rank_id is not there; it must be an"),
        (servers([["0", "1"], ["1", "2"]]), "rank_id is 1; 2 NPUs have this rank"),
        (servers([["0", "1"]]).replace('"device_id": "1"', '"device_id": "0"'), "server_list[0].device is"),
        (servers([["0"], ["7"]]), "rank_id is 7; 2 NPUs have the ranks from 0 to 1"),
        (servers([["0", "1", "2"], ["3"]]), "10.0.0.2 has 1'; each server must have the same number of NPUs"),
        (servers([["0"], ["1"]], "10.0.0.1"), "server_list is '10.0.0.1'; 2 servers have this address"),
        (servers([["0"], ["1"]], "a b"), "server_list[0].server_id is 'a b'; it must be the server's"),
        (servers([["0"], ["1"]]), "parallel.tensor: 16 ranks take an NPU each, and"),
    ],
)
def test_a_rank_table_that_says_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setattr(cluster_module, "is_here", lambda _: False)
    (tmp_path / "hccl.json").write_text(text)
    parallel = ParallelSection(tensor=16, connect_timeout_s=1)
    environment = {"RANK_TABLE_FILE": str(tmp_path / "hccl.json")}
    is_first = "an NPU each" in words
    with pytest.raises(RecipeError) as refused:
        find_cluster(parallel, environment, lambda: {address(0)} if is_first else set())
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


if __name__ == "__main__":  # run this after a change that is meant
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text("\n".join(lines(Path(folder))) + "\n")
