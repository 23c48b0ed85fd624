"""The files that put several replicas into service agree with server, router and the command on Ray."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.cluster import ray_fleet
from recipes.schema.reader import load
from recipes.schema.server_section import ServerSection
from scripts import on_ray, route, serve
from serving.api.access import OPEN_PATHS
from serving.metrics.exposition import NAMESPACE
from serving.metrics.prometheus_names import OURS
from tests.recipes import published
from tests.serving.test_deploy import FOLDER, PORT, ROOT, documents

ROUTER = "continuous-batching-router"
REPLICA = "continuous-batching-replica"
Document = dict[str, Any]


def by_kind(name: str) -> dict[tuple[str, str], Document]:
    """The documents of a file by kind and name, each of which is there once."""
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents(name)}
    assert len(found) == len(documents(name))
    return found


def container_of(pod: Document) -> Document:
    (container,) = pod["spec"]["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod["spec"]["volumes"]
    }
    probes = {key: each["httpGet"] for key, each in container.items() if key.endswith("Probe")}
    ports = {each["name"] for each in container["ports"]}
    assert {each["path"] for each in probes.values()} <= {*OPEN_PATHS}
    assert {each["port"] for each in probes.values()} <= ports
    assert {name: each["path"] for name, each in probes.items()}.get("livenessProbe", "/health") == "/health"
    assert isinstance(container, dict)
    return container


def port_of(container: Document, name: str) -> int:
    (found,) = [each["containerPort"] for each in container["ports"] if each["name"] == name]
    return int(found)


def environment(container: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in container["env"]:
        if "value" in each:
            monkeypatch.setenv(each["name"], each["value"])
    assert "API_KEY" in {each["name"] for each in container["env"]}, "also the router asks with it"


def routed(document: Document, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the router's pod asks for, and its recipe."""
    pod = document["spec"]["template"]
    assert document["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    container = container_of(pod)
    environment(container, monkeypatch)
    assert container["command"] == [".venv/bin/python", "-m", "scripts.route"]
    options = route.parser().parse_intermixed_args(container["args"])
    assert options.host == "0.0.0.0"
    assert options.port == port_of(container, "http")
    assert pod["spec"]["terminationGracePeriodSeconds"] > 5 + options.drain_s
    return options


def test_a_fleet_of_kubernetes_finds_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of the headless Service, at the port where they listen, with the recipe that they serve."""
    found = by_kind("fleet.yaml")
    replicas, service = found["StatefulSet", REPLICA], found["Service", f"{REPLICA}s"]
    pod = replicas["spec"]["template"]
    container, labels = container_of(pod), pod["metadata"]["labels"]
    environment(container, monkeypatch)
    options = routed(found["Deployment", ROUTER], monkeypatch)
    assert options.discover == [f"http://{service['metadata']['name']}:{PORT}"]
    assert port_of(container, "http") == PORT == service["spec"]["ports"][0]["port"]
    assert service["spec"]["clusterIP"] == "None"
    assert replicas["spec"]["serviceName"] == service["metadata"]["name"]
    for selector in (service["spec"]["selector"], replicas["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    asked_for = serve.parser().parse_intermixed_args(container["args"])
    served = load(asked_for.recipe, asked_for.overrides)
    assert served.device.kind == "npu"
    assert served.cache.page_size == load(options.recipe).cache.page_size
    assert served.cache.events == f"tcp://0.0.0.0:{port_of(container, 'events')}"
    assert port_of(container, "events-again") == port_of(container, "events") + 1
    assert pod["spec"]["terminationGracePeriodSeconds"] > ServerSection().drain_s
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= ServerSection().start_timeout_s
    asked = container["resources"]
    assert asked["limits"]["huawei.com/Ascend910"] == asked["requests"]["huawei.com/Ascend910"]
    entry = found["Service", ROUTER]["spec"]
    assert (entry["selector"], entry["ports"][0]["port"]) == ({"app": ROUTER}, options.port)


SECRET = re.compile(r"kubectl create secret generic \S+(.*?)kubectl apply -f (\S+)", re.DOTALL)


def secret_keys(node: object) -> Iterator[str]:
    """The keys of a Secret that a document names, for variables and for files."""
    for name, each in node.items() if isinstance(node, dict) else ():
        if name == "secretKeyRef":
            yield each["key"]
        if name == "secret":
            yield from (item["key"] for item in each["items"])
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from secret_keys(each)


def test_a_command_makes_every_secret_that_its_manifest_names() -> None:
    """A pod whose Secret lacks a key is never created."""
    told = [*(ROOT / "docs").glob("*.md"), *FOLDER.glob("*.yaml")]
    commands = [each for path in told for each in SECRET.findall(path.read_text(encoding="utf-8"))]
    made = {ROOT / name for _, name in commands}
    assert {path for path in FOLDER.glob("*.yaml") if "secretKeyRef" in path.read_text()} == made
    for options, name in commands:
        keys = re.findall(r"--from-literal=([\w-]+)=", options)
        assert {*secret_keys(documents(Path(name).name))} == {*keys}, name


def test_the_autoscaler_asks_for_a_metric_that_there_is() -> None:
    """In the same numbers as `scripts.on_ray`, through a rule of prometheus-adapter's."""
    found = by_kind("fleet.yaml")
    scaler = found["HorizontalPodAutoscaler", REPLICA]["spec"]
    target = scaler["scaleTargetRef"]
    assert (target["kind"], target["name"]) in found
    assert "replicas" not in found["StatefulSet", REPLICA]["spec"], "the autoscaler would be undone"
    (metric,) = [each["pods"] for each in scaler["metrics"]]
    name = metric["metric"]["name"]
    assert name in {NAMESPACE + each.name for each in OURS}
    assert int(metric["target"]["averageValue"]) == on_ray.parser().get_default("queued_tokens")
    (rule,) = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]
    assert rule["seriesQuery"].startswith(f"{name}{{")
    assert re.fullmatch(rule["name"]["matches"], name)
    assert rule["name"]["as"] == name
    for label, resource in rule["resources"]["overrides"].items():
        assert (label, f'{label}!=""' in rule["seriesQuery"]) == (resource["resource"], True)
    pod = found["StatefulSet", REPLICA]["spec"]["template"]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(PORT)


def test_a_ray_job_keeps_replicas_and_tells_the_router(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """What a worker offers is what one replica needs; the cluster grows as far as the command may."""
    found = by_kind("kuberay.yaml")
    job = found["RayJob", "continuous-batching"]["spec"]
    assert found["RayJob", "continuous-batching"]["metadata"]["labels"]["ray.io/scheduler-name"] == "volcano"
    options = routed(found["Deployment", ROUTER], monkeypatch)
    published.write(tmp_path)
    monkeypatch.setenv("MODELS", str(tmp_path))
    line = job["entrypoint"]
    words = shlex.split(line)
    assert words[2:5] == [".venv/bin/python", "-m", "scripts.on_ray"]
    asked = on_ray.fleet(on_ray.parser().parse_args(words[5:]))
    assert asked.router == f"http://{ROUTER}:{options.port}"
    assert f"serve {options.recipe} " in line
    assert (asked.job.host, asked.job.has_events) == ("0.0.0.0", True)
    cluster = job["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    least, most = workers["minReplicas"], workers["maxReplicas"]
    assert (least, most) == (asked.bounds.least, asked.bounds.most)
    assert asked.job.num_nodes == 1
    (worker,) = workers["template"]["spec"]["containers"]
    npus = worker["resources"]["limits"]["huawei.com/Ascend910"]
    assert npus == worker["resources"]["requests"]["huawei.com/Ascend910"]
    assert json.loads(json.loads(workers["rayStartParams"]["resources"])) == asked.job.devices
    assert asked.job.devices == {"NPU": float(npus)}
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    (stop,) = [each for each in head["env"] if each not in worker["env"]]
    assert [each for each in head["env"] if each != stop] == worker["env"]
    assert stop["name"] == "RAY_JOB_STOP_WAIT_TIME_S"
    assert int(stop["value"]) > load(options.recipe).server.drain_s + ray_fleet.ENDS_S
    assert "API_KEY" in {each["name"] for each in worker["env"]}
    pinned = (ROOT / "requirements/ray.txt").read_text(encoding="utf-8")
    assert f"ray=={cluster['rayVersion']}\n" in pinned
    image = (FOLDER / "Dockerfile.ray").read_text(encoding="utf-8")
    assert f'"ray[default]=={cluster["rayVersion"]}"' in image
    assert "readinessProbe" not in container_of(found["Deployment", ROUTER]["spec"]["template"])


def test_the_command_of_a_ray_job_is_whole_behind_the_shells_of_kuberay_and_ray(tmp_path: Path) -> None:
    """KubeRay 1.4 pastes it into a line of bash, and Ray's job runs the words that arrive there by sh."""
    submitter, python = tmp_path / "submitter", tmp_path / ".venv/bin/python"
    for stand_in in (submitter / "ray", python):
        stand_in.parent.mkdir(parents=True)
        stand_in.write_text(
            f'#!/bin/bash\nprintf \'%s\\0\' "$PWD" "$@" >> {stand_in}.told\n'
            f"echo >> {stand_in}.told\n[[ $2 != status ]]\n"
        )
        stand_in.chmod(0o755)
    entrypoint = by_kind("kuberay.yaml")["RayJob", "continuous-batching"]["spec"]["entrypoint"]
    entrypoint = entrypoint.replace("/srv/continuous-batching", str(tmp_path))
    line = (
        "if ! ray job status --address http://a 7 >/dev/null 2>&1 ; then ray job submit --address http://a"
        f" --no-wait --submission-id 7 -- {entrypoint} ; fi ; ray job logs --address http://a --follow 7"
    )
    path = {"PATH": str(submitter)}  # any other command would fail
    subprocess.run(["/bin/bash", "-ce", "--", line], cwd=submitter, env=path, check=True)
    asked = [each.split("\0")[1:-1] for each in (submitter / "ray.told").read_text().splitlines()]
    assert [words[1] for words in asked] == ["status", "submit", "logs"]
    words = asked[1][asked[1].index("--") + 1 :]
    assert words == shlex.split(entrypoint)
    subprocess.run(["/bin/sh", "-c", subprocess.list2cmdline(words)], cwd=submitter, check=True)
    folder, *arguments, _ = Path(f"{python}.told").read_text().split("\0")
    assert (folder, arguments) == (str(tmp_path), words[3:])
