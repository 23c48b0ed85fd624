"""The files that put the server into service agree with the server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.schema.reader import load
from recipes.schema.server_section import ServerSection
from scripts.serve import parser
from serving.api.access import OPEN_PATHS
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


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.ascend"])
def test_an_image_holds_what_it_starts(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    copied = re.findall(r"^COPY ((?!\.).+) \S+$", text, re.MULTILINE)
    assert all((ROOT / each).is_file() for line in copied for each in line.split())
    assert all(
        f"requirements-{each}.txt" in text for each in re.findall(r"setup.sh ([a-z ]+?) &&", text)[0].split()
    )
    assert re.findall(r"^EXPOSE (\d+)", text, re.MULTILINE) == [str(PORT)]
    assert set(re.findall(rf"http://127.0.0.1:{PORT}(/\w+)", text)) <= set(OPEN_PATHS)
    recipe = re.findall(r'^CMD \["([^"]+)"', text, re.MULTILINE)
    assert (ROOT / recipe[0]).is_file()


def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    text = (FOLDER / "continuous-batching.service").read_text(encoding="utf-8")
    assert float(re.findall(r"TimeoutStopSec=(\d+)", text)[0]) > ServerSection().drain_s
    unit = tmp_path / "continuous-batching.service"
    unit.write_text(text.replace("/opt/continuous-batching", str(ROOT)), encoding="utf-8")
    told = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True,
        text=True,
    )
    assert "continuous-batching.service" not in told.stderr
