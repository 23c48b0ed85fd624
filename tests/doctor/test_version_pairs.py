"""The doctor accepts and refuses the pairs of CANN and torch_npu on eight 910B that their wheels do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from devices.present import Chip
from devices.torch_npu_releases import public
from doctor.diagnosis import diagnose
from doctor.facts import Node
from doctor.software import EXTRAS
from recipes.schema.recipe import ROOT
from tests.doctor.test_doctor import FIT
from tests.each_of import each_of

FILE = json.loads(Path(__file__).with_name("version_pairs.json").read_text(encoding="utf-8"))
EIGHT = replace(
    FIT,
    chips=tuple(Chip("910B3", "OK", 3000, 65536) for _ in range(8)),
    nodes=tuple(Node(f"/dev/davinci{number}", "HwHiAiUser", True) for number in range(8)),
    num_devices=8,
)
WORDS = {"too_old": "too old", "cann_apart": "apart", "unknown_pair": "unknown"}


@each_of("pair", FILE["pairs"])
def test_the_word_is_the_truth(pair: dict[str, Any]) -> None:
    version = pair["torch_npu"]
    torch = ".".join(version.partition("+")[0].split(".")[:3]) + "+cpu"
    driver = "25.2.0" if (pair["cann"] or "").startswith("8.2") else FIT.driver_version
    packages = {**FIT.packages, "torch": torch, "torch_npu": version}
    found = diagnose(replace(EIGHT, cann_version=pair["cann"], driver_version=driver, packages=packages))
    said = [word for name, word in WORDS.items() if name in found]
    assert (said or ["works"])[0] == pair["word"]
    absent = FILE["lacks"].get(public(version))
    assert (pair["word"] == "too old") == bool(absent)
    for operator in absent or ():
        assert operator in found["too_old"].problem
    if pair["word"] in ("too old", "apart"):
        assert any(finding.is_fatal for finding in found.values())
    else:
        assert not any(finding.is_fatal for finding in found.values())


def test_the_pairs_are_as_many_as_users_have() -> None:
    assert len(FILE["pairs"]) >= 14
    assert {pair["word"] for pair in FILE["pairs"]} == {"works", "too old", "unknown", "apart"}


def test_the_releases_that_setup_installs_are_those_of_the_doctor() -> None:
    for extra, version in EXTRAS.items():
        pins = (ROOT / f"requirements/{extra}.txt").read_text(encoding="utf-8").splitlines()[-2:]
        assert pins == [f"torch=={version.partition('.post')[0]}", f"torch-npu=={version}"]
        assert FILE["lacks"][version] == []
