"""A Ray cluster starts what a user would start on each node, or says in one line why it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.cluster import joining, ray_cluster
from recipes.cluster.ray_cluster import LaunchActor, check_reach, own_threads, ray_job
from recipes.cluster.ray_replica import ReplicaAgent
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from scripts.on_ray import main
from tests.patience import PATIENCE_S

TINY = "recipes/tiny/cpu.yaml"
NPU = ["recipes/tiny/npu.yaml", "parallel.tensor=8"]

CLUSTER = """
import os, subprocess, sys
from ray.cluster_utils import Cluster

options = {"num_cpus": 1, "object_store_memory": 10**8}
cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
try:
    cluster.add_node(**options)
    command = [sys.executable, "-m", "scripts.on_ray", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=os.environ | {"RAY_ADDRESS": cluster.address}).returncode)
finally:
    cluster.shutdown()
"""


@pytest.mark.parametrize(("nodes", "npus"), [(1, 8.0), (2, 4.0), (8, 1.0)])
def test_a_node_has_a_device_for_each_of_its_ranks(nodes: int, npus: float) -> None:
    arguments = ["serve", *NPU, "--port", "8001"]
    asked = ray_job(nodes, arguments)
    assert (asked.num_nodes, asked.devices, asked.arguments) == (nodes, {"NPU": npus}, tuple(arguments))


def test_ranks_on_processors_need_no_device() -> None:
    assert ray_job(2, ["generate", TINY, "parallel.tensor=2"]).devices == {}


@pytest.mark.parametrize(
    ("nodes", "arguments", "said"),
    [
        (3, ["serve", *NPU], "8 ranks cannot be shared evenly by 3 nodes; make them a multiple of 3"),
        (2, ["serve", TINY], "1 ranks cannot be shared evenly by 2 nodes"),
        (2, ["serve", *NPU, "parallel.nodes=[a,b]"], "parallel.nodes: Ray chooses the nodes; leave it out"),
        (2, ["serve"], "no recipe is among the arguments"),
    ],
)
def test_what_cannot_be_is_refused(nodes: int, arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        ray_job(nodes, arguments)


def test_without_ray_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"Ray is not installed; run bash scripts/setup\.sh ray"):
        main(["--nodes", "2", "generate", TINY, "parallel.tensor=2"])


def test_nodes_find_each_other_at_the_interface_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all interfaces are meant, they do so at the address under which Ray knows them."""
    monkeypatch.setattr(joining, "own_address", lambda: "192.0.2.7")
    ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "192.0.2.8"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    for interface, address in ((None, "192.0.2.7"), ("all", "192.0.2.8"), ("lo", "127.0.0.1")):
        assert LaunchActor().address(interface) == ReplicaAgent().where(interface)[0] == address


def test_a_node_runs_what_its_user_would(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dry-run", "generate", TINY, "parallel.tensor=2"]
    assert LaunchActor().run(arguments, 1, ["10.0.0.1", "10.0.0.2"], {}) == 0
    said = capfd.readouterr().err
    assert "'scripts.follow'" in said
    assert "rank 1: machine 1 of 2" in said
    assert "follows 10.0.0.1:29400" in said


@pytest.mark.parametrize("threads", [None, "6"])
def test_a_node_computes_with_the_users_threads_and_not_with_those_of_rays_actors(
    threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "x")
    monkeypatch.delenv("OMP_NUM_THREADS")
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    of_the_user = own_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray does in an actor
    inherited = list[str | None]()

    class Started:
        def __init__(self, *_: object, env: dict[str, str], **__: object) -> None:
            inherited.append(env.get("OMP_NUM_THREADS"))

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(ray_cluster.subprocess, "Popen", Started)
    LaunchActor().run(["generate", TINY], 0, ["10.0.0.1"], of_the_user)
    ReplicaAgent().start(["serve", TINY], of_the_user)
    assert inherited == [threads, threads]


@pytest.mark.parametrize(("threads", "of_the_user"), [("1", {}), ("6", {"OMP_NUM_THREADS": "6"})])
def test_the_thread_of_the_actor_that_runs_a_job_is_not_the_users(
    threads: str, of_the_user: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert own_threads() == {"OMP_NUM_THREADS": threads}
    job: dict[str, Any] = {"runtime_env": {}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    assert own_threads() == of_the_user
    job["runtime_env"]["env_vars"] = {"OMP_NUM_THREADS": threads}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    assert own_threads() == {"OMP_NUM_THREADS": threads}


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--nodes", "2", "generate", TINY, "--prompt", "12+7=", "parallel.tensor=2"], 0, " 19\n"),
        (
            ["--nodes", "3", "serve", TINY, "parallel.pipeline=3", "parallel.connect_timeout_s=2"],
            2,
            "parallel.connect_timeout_s: Ray found no 3 nodes",
        ),
    ],
)
def test_two_nodes_of_a_cluster_hold_one_engine(arguments: list[str], status: int, said: str) -> None:
    pytest.importorskip("ray", reason="bash scripts/setup.sh ray installs it")
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CLUSTER, *arguments]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (ended.returncode, said in ended.stdout + ended.stderr) == (status, True), ended.stderr[-4000:]


def test_a_cluster_that_others_may_reach_must_be_meant() -> None:
    def node(address: str, *, is_alive: bool = True) -> dict[str, object]:
        return {"NodeManagerAddress": address, "Alive": is_alive}

    here, there = node("127.0.0.1"), node("192.0.2.7")
    check_reach([here, node("192.0.2.7", is_alive=False)], None)
    check_reach([here, there], "all")
    with pytest.raises(RecipeError, match=r"127\.0\.0\.1, 192\.0\.2\.7 runs code there.*iptables -A INPUT"):
        check_reach([here, there], None)
    check_reach([here, there], "lo")
    with pytest.raises(RecipeError, match=r"ray start --node-ip-address=127\.0\.0\.1"):
        check_reach([there], "lo")
    assert ray_job(2, ["serve", TINY, "parallel.tensor=2", "parallel.interface=eth0"]).interface == "eth0"
