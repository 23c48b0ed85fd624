"""A real Prometheus that watches a server, with the files of serving/deploy."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
import yaml

from recipes.schema.recipe import ROOT
from tests.patience import PATIENCE_S
from tests.serving.server import Server

DEPLOY = ROOT / "serving/deploy"
EVERY_S = 1
RANGE = "60s"  # it replaces minutes and hours, so that a test need not wait for them
Value = TypeVar("Value")


class Prometheus:
    """Reads a server every second, by prometheus.yaml with this address and key, until it is closed."""

    def __init__(self, server: Server, folder: Path, key: str) -> None:
        if shutil.which("prometheus") is None:
            pytest.skip("there is no Prometheus here")
        (folder / "api-key").write_text(key)
        text = (DEPLOY / "prometheus.yaml").read_text(encoding="utf-8")
        text = re.sub(
            r"^(    )# ( *)(authorization|type|credentials_file)", r"\1\2\3", text, flags=re.MULTILINE
        )
        text = text.replace("/etc/prometheus/api-key", str(folder / "api-key")).replace("15s", f"{EVERY_S}s")
        config = yaml.safe_load(text)
        config["scrape_configs"][0]["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        rules = (DEPLOY / "alerts.yaml").read_text(encoding="utf-8")
        rules = re.sub(r"\[\d+[mh]\]", f"[{RANGE}]", re.sub(r"for: \d+[mh]", "for: 2s", rules))
        (folder / "alerts.yaml").write_text(rules, encoding="utf-8")
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stderr=self._log,
        )
        self._folder = folder
        port = self.until(
            lambda: re.search(r"address=127\.0\.0\.1:([1-9]\d*)", (folder / "log").read_text())
        )[1]
        self.url = f"http://127.0.0.1:{port}"

    def until(
        self,
        found: Callable[[], Value | None],
        timeout_s: float = 120,
        so_far: Callable[[], object] = lambda: None,
    ) -> Value:
        """What it finds, once it finds something; `so_far` says how near it is where it does not."""
        until_s = time.monotonic() + timeout_s
        while not (value := found()):
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < until_s, f"nothing was found: {so_far()}"
            time.sleep(0.2)
        return value

    def ask(self, expression: str) -> dict[str, float]:
        """The values of an expression now, by their labels as text."""
        response = httpx.get(
            f"{self.url}/api/v1/query", params={"query": expression}, timeout=PATIENCE_S
        ).json()
        assert response["status"] == "success", (expression, response)
        return {str(each["metric"]): float(each["value"][1]) for each in response["data"]["result"]}

    def firing(self) -> dict[str, dict[str, str]]:
        """The annotations of the alerts that fire now, by name."""
        alerts = httpx.get(f"{self.url}/api/v1/alerts", timeout=PATIENCE_S).json()["data"]["alerts"]
        return {
            each["labels"]["alertname"]: each["annotations"] for each in alerts if each["state"] == "firing"
        }

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self._log.close()
