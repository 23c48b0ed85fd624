"""The page's files load nothing from elsewhere, make no markup of text, and have colours for all eyes."""

from __future__ import annotations

import itertools
import re
from typing import Any

import httpx
import numpy as np
import pytest

from serving.api import page_files
from serving.metrics.history import NUM_COLOURS
from tests.each_of import each_of
from tests.patience import PATIENCE_S
from tests.serving.server import Server
from tests.test_imports import ROOT

FOLDER = ROOT / "serving/api/page"
FILES = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir())}
STYLE = FILES["style.css"]
# What would read text as markup, a script or a style
SINKS = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|createContextualFragment"
    r"|\beval\(|new Function|setTimeout\(\s*['\"]|javascript:|\.setAttribute\(['\"]on"
)


@each_of("name", FILES)
def test_a_file_loads_nothing_from_elsewhere_and_makes_no_markup_of_text(name: str) -> None:
    text = FILES[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?:|//\w+\.|@import|\burl\(['\"#]", text)
    assert not re.findall(SINKS, text)
    assert not re.findall(r"<(?:script|style)\b(?![^>]*\bsrc=)|\sstyle=|\son\w+=", text), (
        "the policy forbids it"
    )
    assert "localStorage" not in text
    assert "document.cookie" not in text
    links = re.findall(r'(?:src|href)="(page/[^"]+)"', text) + re.findall(r'from "\./([^"]+)"', text)
    assert {f"/page/{link.removeprefix('page/')}" for link in links} <= {*page_files.PATHS}


def test_the_page_comes_with_a_policy_and_its_files_with_their_types(shared: Server) -> None:
    with httpx.Client(base_url=shared.url, timeout=PATIENCE_S) as http:
        page = http.get("/")
        directives = page.headers["content-security-policy"].split(";")
        policy = dict(each.strip().partition(" ")[::2] for each in directives)
        for path in page_files.PATHS:
            file = http.get(path)
            kind = "javascript" if path.endswith(".js") else "css"
            assert file.headers["content-type"] == f"text/{kind}; charset=utf-8"
            assert file.headers["x-content-type-options"] == "nosniff"
            assert file.text == FILES[path.rpartition("/")[2]]
        for path in ("/page/", "/page/page.html", "/page/../page_files.py", "/page/%2e%2e/page_files.py"):
            assert http.get(path).status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert policy.pop("connect-src") == policy.pop("script-src") == policy.pop("style-src") == "'self'"
    assert policy.pop("img-src") == "data:"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert set(policy.values()) == {"'none'"}
    assert set(policy) == {"default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"}


# Linear RGB as people see it who lack one kind of cone: Machado, Oliveira and Fernandes (2009), severity 1
SIGHTS = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
LIGHT, DARK = STYLE.split("@media (prefers-color-scheme: dark)")[:2]


def colours(text: str) -> dict[str, str]:
    """The colours of a part of the style sheet, by name, as six digits."""
    found = re.findall(r"--([\w-]+): (#[0-9a-f]+);", text)
    return {
        name: each if len(each) == 7 else "#" + "".join(2 * sign for sign in each[1:]) for name, each in found
    }


def linear(colour: str) -> Any:
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: Any) -> Any:
    """CIELAB, in which a distance of 2.3 is just seen (CIE 1976)."""
    relative = XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(relative > 216 / 24389, np.cbrt(relative), (24389 / 27 * relative + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    """WCAG's."""
    dim, bright = sorted(float(XYZ[1] @ linear(each)) for each in (one, other))
    return (bright + 0.05) / (dim + 0.05)


@each_of("sight", SIGHTS)
@each_of("scheme", ["light", "dark"])
def test_neighbouring_colours_can_be_told_apart(scheme: str, sight: str) -> None:
    names = colours(LIGHT.split("{")[1].split("}")[0]) | (colours(DARK) if scheme == "dark" else {})
    requests = [f"request-{number}" for number in range(NUM_COLOURS)]
    groups = [*requests, "free", "others"], ["free", "cached", "held", "shared"], ["line-0", "line-1", "back"]
    for group in groups:
        seen = {name: lab(SIGHTS[sight] @ linear(names[name])) for name in group}
        for one, other in itertools.combinations(group, 2):
            assert np.linalg.norm(seen[one] - seen[other]) > 15, (one, other)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme: str) -> None:
    names = colours(LIGHT.split("{")[1].split("}")[0]) | (colours(DARK) if scheme == "dark" else {})
    for text, back in itertools.product(("fore", "dim", "accent", "bad"), ("back", "soft")):
        assert contrast(names[text], names[back]) >= 4.5, (text, back)
