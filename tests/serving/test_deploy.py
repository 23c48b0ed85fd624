"""The files that put the server into service agree with the server."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from doctor.device import CONTAINER, MOUNTS
from doctor.facts import CONTROL_NODES
from recipes.assembly.families import share_of
from recipes.assembly.sizing import plan_memory
from recipes.cluster.cluster import Cluster, find_cluster
from recipes.cluster.launched import Launched
from recipes.machine import ANSWERS
from recipes.schema.reader import load
from recipes.schema.server_section import ServerSection
from scripts.serve import parser
from serving.api.access import OPEN_PATHS
from tests.patience import PATIENCE_S
from tests.recipes import published
from tests.scripts.test_setup import READ
from tests.test_imports import ROOT

FOLDER = ROOT / "serving/deploy"
PORT = parser().get_default("port")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def test_the_cluster_probes_what_answers_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, service = documents("kubernetes.yaml")
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {each["httpGet"]["path"] for each in probes.values()} <= set(OPEN_PATHS)
    assert probes["liveness"]["httpGet"]["path"] == "/health"
    assert probes["readiness"]["httpGet"]["path"] == "/ready"
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": PORT}
    assert {each["targetPort"] for each in service["spec"]["ports"]} <= set(ports)
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    limits, defaults = container["resources"]["limits"], ServerSection()
    assert limits["huawei.com/Ascend910"] == container["resources"]["requests"]["huawei.com/Ascend910"]
    assert pod["terminationGracePeriodSeconds"] > 5 + defaults.drain_s
    startup = probes["startup"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= defaults.start_timeout_s
    for each in container["env"]:
        if "value" in each:
            monkeypatch.setenv(each["name"], each["value"])
    assert load(*container["args"]).device.kind == "npu"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published.write(tmp_path)
    monkeypatch.setenv("MODELS", str(tmp_path))


def placed(arguments: list[str], environment: dict[str, str], ranks_a_machine: int) -> Cluster:
    """Where a machine of a job finds itself; the recipe must fit the devices that it asks for."""
    recipe = Launched.of(arguments).recipe
    assert recipe is not None
    cluster = find_cluster(recipe.parallel, environment, set, Path("none"))
    assert len(cluster.ranks_of(0, recipe.parallel.ranks)) == ranks_a_machine
    config, share = share_of(recipe, 0)
    assert recipe.device.memory_gib is not None
    plan_memory(recipe, config, int(recipe.device.memory_gib * 2**30), share=share)
    return cluster


@pytest.mark.parametrize("name", ["ascendjob", "volcano"])
def test_a_machine_that_pulls_its_image_later_is_waited_for(name: str) -> None:
    """A machine that gives up ends its pod, and with it the job."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    (within_s,) = re.findall(r" parallel\.connect_timeout_s=(\d+)", text)
    assert int(within_s) >= 1800
    (start_s,) = re.findall(r" server\.start_timeout_s=(\d+)", text)
    assert int(start_s) >= int(within_s) + ServerSection().start_timeout_s, "the wait is a part of the start"


def npus(container: dict[str, Any]) -> int:
    asked = container["resources"]
    assert asked["limits"]["huawei.com/Ascend910"] == asked["requests"]["huawei.com/Ascend910"]
    return int(asked["limits"]["huawei.com/Ascend910"])


@pytest.mark.usefixtures("models")
def test_an_ascend_job_holds_one_engine() -> None:
    (job,) = documents("ascendjob.yaml")
    specs = job["spec"]["replicaSpecs"]
    machines = sum(each["replicas"] for each in specs.values())
    assert job["spec"]["runPolicy"]["schedulingPolicy"]["minAvailable"] == machines == 2
    for node, role in enumerate(("Master", "Worker")):
        (container,) = specs[role]["template"]["spec"]["containers"]
        assert container["name"] == "ascend"
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        told = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": str(ports["ascendjob-port"]), "RANK": str(node)}
        npus_here = npus(container)
        told |= {
            "WORLD_SIZE": str(machines * npus_here),
            "LOCAL_WORLD_SIZE": str(npus_here),
            "LOCAL_RANK": ",".join(map(str, range(npus_here))),
        }
        cluster = placed(container["args"], told, npus_here)
        assert cluster == Cluster("AscendJob", machines, node, "10.0.0.1", ports["ascendjob-port"])
        assert ports["http"] == PORT


@pytest.mark.usefixtures("models")
def test_a_volcano_job_holds_one_engine() -> None:
    job, _ = documents("volcano.yaml")
    (task,) = job["spec"]["tasks"]
    (container,) = task["template"]["spec"]["containers"]
    (line,) = container["args"]
    words = shlex.split(line)
    assert words[:4] == ["exec", "bash", "scripts/launch.sh", "serve"]
    told = {"VC_TASK_INDEX": "1", f"VC_{task['name'].upper()}_HOSTS": "a-0.a,a-1.a"}
    cluster = placed(words[4:], told, npus(container))
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert cluster == Cluster("Volcano", task["replicas"], 1, "a-0.a", ports["ranks"])
    assert job["spec"]["minAvailable"] == task["replicas"]
    assert parser().parse_intermixed_args(words[4:]).port == ports["http"] == PORT


def test_clients_reach_the_pods_of_a_volcano_job() -> None:
    """The policy that Volcano itself makes, by the job's name, lets in only the job's own pods."""
    job, policy = documents("volcano.yaml")
    (task,) = job["spec"]["tasks"]
    assert policy["kind"] == "NetworkPolicy"
    assert policy["metadata"]["name"] != job["metadata"]["name"]
    assert policy["spec"]["podSelector"]["matchLabels"] == task["template"]["metadata"]["labels"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": PORT}]}]


def test_a_volcano_job_is_started_again_whatever_ends_a_pod_and_however_often() -> None:
    job, _ = documents("volcano.yaml")
    restarted = {each["event"] for each in job["spec"]["policies"] if each["action"] == "RestartJob"}
    assert restarted == {"PodFailed", "PodEvicted"}
    assert job["spec"]["maxRetry"] >= 1000, "3 where it is not said"


@pytest.mark.usefixtures("models")
def test_a_slurm_job_holds_one_engine() -> None:
    path = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"
    (before_s,) = re.findall(r"^TERM@(\d+)$", asked["signal"])  # With B: it would be for the shell alone.
    assert int(before_s) > 5 + ServerSection().drain_s
    words = shlex.split(re.findall(r"launch.sh serve (.*) \"\$@\"", text)[0])
    told = {"SLURM_JOB_ID": "7", "SLURM_NNODES": asked["nodes"], "SLURM_JOB_NODELIST": "n[1-2]"}
    cluster = placed(words, told | {"SLURM_NODEID": "1", "SLURM_STEP_ID": "0"}, 8)
    assert cluster == Cluster("SLURM", 2, 1, "n1", 29407)
    assert parser().parse_intermixed_args(words).port == PORT


# The step of a job: its server lets its requests end at the first SIGTERM, and does not wait at the second
STEP = """
trap 'echo TERM >> told; [[ $(wc -l < told) == 1 ]] || exit 1' TERM
echo $$ > step; touch started
until [[ -f told && -f answered ]]; do sleep 0.05; done
exit 7
"""
# As srun does, at SIGTERM it kills its step
SRUN = """
trap 'kill -KILL $task 2>/dev/null; exit 143' TERM
bash -c "$STEP" & task=$!
while kill -0 $task 2>/dev/null; do wait $task; done
wait $task
"""


def slurm_job(folder: Path, key: str = "a") -> subprocess.Popen[str]:
    """Start slurm.sbatch in a folder that holds a stand-in for srun, and what its step tells."""
    (folder / "srun").write_text(f"#!/bin/bash\ncd {folder}{SRUN}")
    (folder / "srun").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    job = {"PATH": path, "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "31", "STEP": STEP, "API_KEY": key}
    return subprocess.Popen(
        ["bash", FOLDER / "slurm.sbatch"], env=os.environ | job, stderr=subprocess.PIPE, text=True
    )


def wait_for_file(path: Path, job: subprocess.Popen[str]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert job.poll() is None
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.parametrize("is_shell_signalled", [False, True], ids=["time limit", "scancel"])
def test_a_slurm_job_ends_when_its_step_does(tmp_path: Path, is_shell_signalled: bool) -> None:
    """At the time limit SLURM signals the step's tasks alone, and for a plain scancel the shell, too."""
    with slurm_job(tmp_path) as job:
        wait_for_file(tmp_path / "started", job)
        if is_shell_signalled:
            job.terminate()
        os.kill(int((tmp_path / "step").read_text()), signal.SIGTERM)
        wait_for_file(tmp_path / "told", job)
        (tmp_path / "answered").touch()
        assert job.wait(PATIENCE_S) == 7
    assert (tmp_path / "told").read_text() == "TERM\n"


def test_a_slurm_job_without_a_key_starts_nothing(tmp_path: Path) -> None:
    with slurm_job(tmp_path, key="") as job:
        _, told = job.communicate(timeout=PATIENCE_S)
    assert job.returncode != 0
    assert "API_KEY: set API_KEY, the key that clients must send" in told
    assert not (tmp_path / "started").exists()


def test_composed_services_find_each_other() -> None:
    (composed,) = documents("compose.yaml")
    server = composed["services"]["server"]
    assert (FOLDER / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    assert all(
        each.startswith("127.0.0.1:")
        for service in composed["services"].values()
        for each in service["ports"]
    )
    assert float(server["stop_grace_period"].removesuffix("s")) > ServerSection().drain_s
    assert load(server["command"][0]).device.kind == "cpu"
    files = [each["file"] for each in composed["configs"].values() if "file" in each]
    assert {name for name in files if not (FOLDER / name).is_file()} == set()
    named = {
        each["source"] for service in composed["services"].values() for each in service.get("configs", ())
    }
    assert named == set(composed["configs"])


def test_a_composed_prometheus_asks_the_server_with_its_key() -> None:
    """As prometheus.yaml says for a server at this machine, but for the address and the key."""
    (composed,) = documents("compose.yaml")
    service = composed["services"]["prometheus"]
    told = yaml.safe_load(composed["configs"]["prometheus"]["content"])
    (job,) = told["scrape_configs"]
    assert job.pop("static_configs") == [{"targets": [f"server:{PORT}"]}]
    (secret,) = service["secrets"]
    assert job.pop("authorization") == {"type": "Bearer", "credentials_file": f"/run/secrets/{secret}"}
    variable = composed["secrets"][secret]["environment"]
    assert composed["services"]["server"]["environment"] == {variable: f"${{{variable}:?set {variable}}}"}
    (alone,) = documents("prometheus.yaml")
    (other,) = alone["scrape_configs"]
    del other["static_configs"]
    assert told == alone
    targets = {each["source"]: Path(each["target"]) for each in service["configs"]}
    assert f"--config.file={targets['prometheus']}" in service["command"]
    assert [targets["alerts"].relative_to(targets["prometheus"].parent)] == [*map(Path, told["rule_files"])]


def test_a_machine_that_follows_is_started_again_after_the_leader_has_closed_its_engine() -> None:
    """It ends with status 0 then, and the leader's next engine needs it."""
    unit = (FOLDER / "continuous-batching.service").read_text(encoding="utf-8")
    assert re.findall(r"^Restart=(.+)$", unit, re.MULTILINE) == ["always"]
    (composed,) = documents("compose.ascend.yaml")
    assert [each["restart"] for each in composed["services"].values()] == ["unless-stopped"]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.ascend"])
def test_an_image_holds_what_it_starts(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    copied = re.findall(r"^COPY ((?!\.).+) \S+$", text, re.MULTILINE)
    assert all((ROOT / each).exists() for line in copied for each in line.split())
    (extras,) = re.findall(r"setup.sh (.+?) &&", text)
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    for extra in shlex.split(re.sub(r"\$(\w+)", lambda found: arguments[found[1]], extras)):
        wanted = ["requirements-npu.txt"] if extra.startswith("npu") else []
        wanted += [] if extra == "npu" else [f"requirements/{extra}.txt"]
        assert {*wanted} <= {each for line in copied for each in line.split()}
    assert re.findall(r"^EXPOSE (\d+)", text, re.MULTILINE) == [str(PORT)]
    assert set(re.findall(rf"http://127.0.0.1:{PORT}(/\w+)", text)) <= set(OPEN_PATHS)
    recipe = re.findall(r'^CMD \["([^"]+)"', text, re.MULTILINE)
    assert (ROOT / recipe[0]).is_file()


def test_the_image_for_npus_has_all_that_its_setup_reads() -> None:
    """The base image's CANN is the one that the torch_npu installed over it was made with."""
    text = (FOLDER / "Dockerfile.ascend").read_text(encoding="utf-8")
    before, _, _ = text.partition("RUN bash scripts/setup.sh")
    copied = {each for line in re.findall(r"^COPY (.+) \S+$", before, re.MULTILINE) for each in line.split()}
    assert {*READ, "requirements/npu-2.10.txt", "requirements/npu-2.9.txt"} <= copied
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    (cann,) = re.findall(r"/cann:(\d+\.\d+)\.\d+-910b-", arguments["CANN_IMAGE"])
    said = (ROOT / f"requirements/{arguments['NPU']}.txt").read_text(encoding="utf-8")
    assert re.search(rf"made with CANN {re.escape(cann)}\b", said)


def pods(node: object) -> Iterator[dict[str, Any]]:
    """Each part of a document that has containers."""
    if isinstance(node, dict) and "containers" in node:
        yield node
    if isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            yield from pods(each)


@pytest.mark.parametrize("name", ["ascendjob", "fleet", "kuberay", "kubernetes", "volcano"])
def test_the_answers_of_a_machines_probes_reach_the_engines_of_its_pods(name: str) -> None:
    """ANSWERS lies in the folder that the machine keeps."""
    found = [each for each in pods(documents(f"{name}.yaml")) if "Ascend910" in str(each["containers"])]
    assert found
    for pod in found:
        (container,), (volume,) = (
            pod["containers"],
            (each for each in pod["volumes"] if each["name"] == "out"),
        )
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert volume["hostPath"]["type"] == "DirectoryOrCreate"
        assert mounts["out"] == f"/srv/continuous-batching/{ANSWERS.parent.relative_to(ROOT)}"


@pytest.mark.parametrize("name", ["ascendjob", "fleet", "kuberay", "kubernetes", "volcano"])
def test_who_listens_at_all_addresses_has_a_key(name: str) -> None:
    """The images' entry point does, as do the commands that manifests give in its place."""
    for pod in pods(documents(f"{name}.yaml")):
        for container in pod["containers"]:
            keys = [each["valueFrom"] for each in container["env"] if each["name"] == "API_KEY"]
            assert keys == [{"secretKeyRef": {"name": "continuous-batching", "key": "api-key"}}]


@pytest.mark.usefixtures("models")
def test_a_container_of_eight_npus_has_what_the_doctor_asks_for() -> None:
    (composed,) = documents("compose.ascend.yaml")
    (server,) = composed["services"].values()
    assert (FOLDER / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    recipe = load(*server["command"])
    chips = [f"/dev/davinci{number}" for number in range(recipe.parallel.ranks)]
    assert server["devices"] == [*chips, *CONTROL_NODES]
    assert len(chips) == 8
    mounts = {target: source for source, target, *_ in (each.rsplit(":", 2) for each in server["volumes"])}
    assert {place: mounts.get(place) for place in MOUNTS} == {place: place for place in MOUNTS}
    assert f"--network {server['network_mode']}" in CONTAINER
    assert f"--shm-size {server['shm_size']}" in CONTAINER
    assert float(server["stop_grace_period"].removesuffix("s")) > ServerSection().drain_s
    assert mounts["/models"].startswith("${MODELS:?")
