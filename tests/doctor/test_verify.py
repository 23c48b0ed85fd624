"""A report of a hardware day is whole whatever breaks, and says what did."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devices.ascend_limits import PRODUCTS, product
from doctor.verify import report as reporting
from doctor.verify import tokens
from doctor.verify.collectives import collectives_of
from doctor.verify.product import needed
from doctor.verify.report import PartOutcome, VerifyPart, needed_overrides
from models.parallel.group import ALONE, Alone
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from recipes.tiny.corpus import held_out_sums
from recipes.tiny.widened import widen
from scripts import verify
from serving.offline import Record
from tests.device_kinds import settings, stand_in_alone
from tests.serving.warm import completed
from tests.thorough import cases

ON_CPU = ["recipes/tiny/npu.yaml", "device.kind=cpu", "device.graphs=0", "device.compile=false"]
WELL = VerifyPart("tokens", "are they?", ("scripts.doctor", "--help"))
BROKEN = VerifyPart("operators", "do they?", ("scripts.nothing",))
COLLECTIVES = ["all_reduce", "all_gather", "broadcast"]
UNFIT = VerifyPart("environment", "is it?", ("scripts.nothing",), counts=False)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def report(
    parts: list[VerifyPart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, dict, list[str]]:
    monkeypatch.setattr(verify, "parts", lambda *_, **__: parts)
    status = verify.main([*ON_CPU, "--output", str(tmp_path)])
    (packed,) = tmp_path.glob("verify-cpu-*.tar.gz")
    with tarfile.open(packed) as file:
        names = sorted(Path(each.name).name for each in file.getmembers() if each.isfile())
        opened = file.extractfile(next(each for each in file.getmembers() if each.name.endswith(".json")))
        assert opened is not None
        return status, json.load(opened), names


def test_what_breaks_is_told_and_the_rest_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told, names = report([BROKEN, WELL], tmp_path, monkeypatch)
    assert status == 1
    assert names == ["report.json", "report.txt"]
    assert [part["is_right"] for part in told["parts"]] == [False, True]
    assert (told["is_right"], told["is_virtual"]) == (False, False)
    assert told["machine"]["torch"]
    printed = capsys.readouterr().out
    assert "No module named scripts.nothing" in printed
    assert "NOT RIGHT; the report to send back: " in printed


def test_an_environment_that_does_not_count_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told, _ = report([UNFIT, WELL], tmp_path, monkeypatch)
    assert (status, told["is_right"]) == (0, True)
    assert re.search(r"^environment +not fit ", capsys.readouterr().out, re.MULTILINE)


def test_the_doctors_problems_and_the_wrong_operators_are_told() -> None:
    findings = {"a": {"problem": "no CANN", "is_fatal": True}, "b": {"problem": "slow", "is_fatal": False}}
    wrong = [{"operator": "npu_swiglu", "is_right": False}, {"operator": "npu_rms_norm", "is_right": True}]
    outcomes = [
        PartOutcome("environment", "?", 1, 0.1, True, {"findings": findings}, ""),
        PartOutcome("operators", "?", 1, 0.1, True, wrong, ""),
    ]
    text = reporting.in_words(outcomes, virtual=False)
    assert "no CANN" in text
    assert "npu_swiglu" in text
    assert "slow" not in text
    assert "npu_rms_norm" not in text


def test_a_benchmark_that_the_gate_refuses_is_not_right() -> None:
    refused = {"verdict": {"outcome": "refused", "refused": {"clocks": "one stood still"}}}
    outcome = PartOutcome("benchmark", "?", 0, 0.1, True, refused, "")
    assert not reporting.is_right([outcome])
    assert "    clocks: one stood still" in reporting.in_words([outcome], virtual=False)
    on_stand_in = replace(outcome, result=refused | {"computed_on": {"virtual": True}})
    assert reporting.is_right([on_stand_in]), "of few requests, whose speed means nothing"


@pytest.mark.parametrize("result", [{"tokens": 1}, [{"operator": "npu_swiglu", "is_right": True}], [], 3])
def test_a_crash_after_a_result_is_told(result: object) -> None:
    crashed = PartOutcome("benchmark", "?", -11, 0.1, True, result, "a\nb\nc\nSegmentation fault\n")
    lines = [line.strip() for line in reporting.in_words([crashed], virtual=False).splitlines()]
    assert lines[1:] == ["it ended with status -11", "b", "c", "Segmentation fault"]


def test_bytes_that_are_no_text_do_not_end_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told.py").write_text("import os, sys; os.write(2, b'\\xc7\\xfd 507899'); sys.exit(3)")
    monkeypatch.setattr(reporting, "ROOT", tmp_path)
    outcome = reporting.run(VerifyPart("tokens", "are they?", ("told",)))
    assert outcome.status == 3
    assert outcome.log.endswith(" 507899")


HANGS = """
import os, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print("keeps_nan: True", file=sys.stderr, flush=True)
pathlib.Path("begun").touch()
child.wait()
"""


def test_what_a_part_that_hangs_has_said_is_kept_and_its_ranks_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    communicate = subprocess.Popen.communicate

    def once_begun(process: subprocess.Popen[str], **limits: Any) -> tuple[str, str]:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.01)
        return communicate(process, **limits)

    monkeypatch.setattr(subprocess.Popen, "communicate", once_begun)
    monkeypatch.setattr(reporting, "ROOT", tmp_path)
    monkeypatch.setattr(reporting, "PART_S", 1)
    outcome = reporting.run(VerifyPart("probes", "what?", ("hangs",)))
    assert (outcome.status, outcome.is_right) == (124, False)
    # It came to its end, for which every process that had its streams must end.
    assert outcome.log.split("\n") == ["keeps_nan: True", "", "no end after 1 s", ""]


def test_a_stand_in_is_named_and_its_environment_forgiven() -> None:
    asked = ["recipes/tiny/npu.yaml", "device.virtual=true"]
    whole = reporting.parts(Path("/x"), asked, virtual=True, num_calls=7)
    names = ["environment", "operators", "probes", "tokens", "trace", "benchmark"]
    assert [part.name for part in whole] == names
    assert [part.name for part in whole if not part.counts] == ["environment"]
    assert "--virtual" in whole[1].command
    assert all("device.virtual=true" in whole[index].command for index in (2, 3, 5))
    assert whole[5].command[-2:] == ("--runs", "1"), "its speed means nothing"
    assert whole[2].command[-2:] == ("--answers", "/x"), "those of a stand-in are for the report"
    real = reporting.parts(Path("/x"), asked[:1], virtual=False, num_calls=7)
    assert all(part.counts and "--virtual" not in part.command for part in real)
    assert not any("--answers" in part.command for part in real)
    assert reporting.in_words([], virtual=True).startswith("VIRTUAL: ")
    named = reporting.parts(Path("/x"), asked, virtual=True, num_calls=7, product="310P")
    assert named[1].command[-2:] == ("--product", "310P")


def test_several_ranks_are_asked_for_their_collectives() -> None:
    asked = ["recipes/tiny/npu.yaml", "parallel.tensor=8"]
    whole = reporting.parts(Path("/x"), asked, virtual=False, num_calls=7, ranks=8)
    names = [part.name for part in whole]
    assert names[names.index("probes") : names.index("trace")] == ["probes", "collectives", "tokens"]
    (collectives,) = (part.command for part in whole if part.name == "collectives")
    assert collectives == ("doctor.verify.collectives", *asked)


def records(**changes: list[int]) -> dict[str, Record]:
    """An answer of three tokens to each sum, but for the changes by its number."""
    made = {}
    for number, (a, b) in enumerate(held_out_sums(tokens.NUM_SUMS)):
        ids = changes.get(f"at_{number}", [7, 8, 2])
        logprobs = [{"token": each, "logprob": -0.1 * (index + 1)} for index, each in enumerate(ids)]
        made[f"{a}+{b}="] = {"token_ids": ids, "text": str(a + b), "logprobs": logprobs}
    return made


def test_answers_are_compared_up_to_their_first_difference() -> None:
    same = tokens.compare("x", records(), records())
    assert (same.num_same, same.num_right, same.mean_apart, same.is_right) == (32, 32, 0, True)
    one = tokens.compare("x", records(at_0=[7, 9, 2]), records())
    assert (one.num_same, one.is_right) == (31, True)
    many = tokens.compare("x", records(**{f"at_{number}": [9] for number in range(4)}), records())
    assert (many.num_same, many.is_right) == (28, False)
    shifted = records()
    for record in shifted.values():
        record["logprobs"] = [{**each, "logprob": each["logprob"] - 0.1} for each in record["logprobs"]]
    assert not tokens.compare("x", shifted, records()).is_right


def test_a_cpu_gives_what_a_cpu_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert tokens.main(ON_CPU) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told] == ["bfloat16", "W8A8"]
    for each in told:
        assert each["num_same"] == 32
        assert each["num_right"] >= 30


ON_BF16 = ["recipes/tiny/npu.yaml", "device.virtual=true"]


@pytest.mark.parametrize(
    ("name", "overrides", "needs"),
    [
        ("310P", [], ["model.dtype=float16"]),
        ("310P", ["model.dtype=float16"], []),
        ("910", [], ["model.dtype=float16", "device.attention=reference", "device.graphs=0"]),
        ("910", ["model.dtype=float16", "device.graphs=0", "device.attention=reference"], []),
        *((name, [], []) for name in ("910B", "910C", "950")),
    ],
)
def test_what_a_product_needs_the_recipe_to_say(name: str, overrides: list[str], needs: list[str]) -> None:
    assert needed(load(ON_BF16[0], overrides), product(name, "")) == needs
    fitting = load(ON_BF16[0], [*needs, *overrides])
    assert needed(fitting, product(name, "")) == []


def test_the_other_parts_are_given_what_the_product_needs_and_the_user_says_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[VerifyPart] = []

    def run(part: VerifyPart) -> PartOutcome:
        ran.append(part)
        found = {"chip": "Ascend310P3", "product": "310P", "overrides": ["model.dtype=float16"]}
        result = found if part.name == "product" else None
        return PartOutcome(part.name, part.question, 0, 0.1, True, result, "")

    monkeypatch.setattr(verify, "run", run)
    assert verify.main([*ON_BF16, "device.graphs=4", "--output", str(tmp_path)]) == 0
    assert [part.name for part in ran][:2] == ["product", "environment"]
    whole = ["recipes/tiny/npu.yaml", "model.dtype=float16", "device.virtual=true", "device.graphs=4"]
    (asked,) = (part.command for part in ran if part.name == "tokens")
    assert list(asked[1:]) == whole
    assert "Ascend310P3 is a 310P with model.dtype=float16" in capsys.readouterr().out


def test_eight_ranks_are_asked_with_heads_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[VerifyPart] = []

    def run(part: VerifyPart) -> PartOutcome:
        ran.append(part)
        return PartOutcome(part.name, part.question, 0, 0.1, True, None, "")

    monkeypatch.setattr(verify, "run", run)
    assert verify.main([*ON_BF16, "parallel.tensor=8", "--output", str(tmp_path)]) == 0
    assert [part.name for part in ran][:3] == ["product", "weights", "environment"]
    assert ran[1].command[0] == "recipes.tiny.widened"
    path, *ranks = ran[1].command[1:]
    assert ranks == ["--ranks", "8"]
    (tokens_of,) = (part.command for part in ran if part.name == "tokens")
    whole = ["recipes/tiny/npu.yaml", f"model.path={path}", "device.virtual=true", "parallel.tensor=8"]
    assert list(tokens_of[1:]) == whole
    assert not Path(path).parent.exists(), "it is for this run alone"


def test_a_product_that_was_not_found_changes_nothing() -> None:
    crashed = PartOutcome("product", "?", 2, 0.1, True, {"overrides": ["model.dtype=float16"]}, "")
    assert needed_overrides(crashed) == []
    assert needed_overrides(PartOutcome("product", "?", 0, 0.1, True, None, "")) == []


def test_the_script_gives_the_verb_the_recipe_of_what_it_is_asked(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    script = shutil.copy(ROOT / "scripts/verify_npu.sh", folder)
    (folder / "launch.sh").write_text("printf '%s\\n' \"$@\"")
    asked = [["--virtual", "--calls", "2"], ["--ranks", "8"], []]
    done = [subprocess.run(["bash", script, *each], capture_output=True, text=True) for each in asked]
    assert [each.stdout.split() for each in done] == [
        ["verify", "recipes/tiny/npu.yaml", "device.virtual=true", "--calls", "2"],
        ["verify", "recipes/tiny/npu.yaml", "parallel.tensor=8"],
        ["verify", "recipes/tiny/npu.yaml"],
    ]


@pytest.mark.slow
@pytest.mark.npu
@stand_in_alone
@pytest.mark.parametrize("name", cases(["310P"], [each.name for each in PRODUCTS]))
def test_the_stand_in_passes_as_every_product(name: str, tmp_path: Path) -> None:
    """The 310P needs another type than the recipe says, and has no W8A8, which the report says.

    What is printed are the lines of docs/ascend.md.
    """
    from tests.test_readme import ASCEND, absent, shown_after  # which reads pages that a tree of code lacks

    # A start runs the largest step, in each of several parts
    asked = [*ON_BF16, f"device.product={name}", "scheduler.max_batch_tokens=64"]
    done = completed("scripts.verify", *asked, "--calls", "2", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("VIRTUAL: ")
    shown = shown_after(ASCEND, "bash scripts/verify_npu.sh")
    assert len(shown.splitlines()) == 8
    assert not absent(shown, done.stdout), done.stdout
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    told = json.loads((folder / "report.json").read_text())
    assert [part["is_right"] for part in told["parts"] if part["counts"]] == [True] * 6
    parts = {part["name"]: part["result"] for part in told["parts"]}
    assert parts["product"]["product"] == name
    named = product(name, "")
    for each in parts["probes"]:  # a right device leaves the product as it is known, or lets it do more
        known = getattr(named, each["name"]) or each["name"] == "unmasks_decodes"
        assert each["answer"] == known, each["said"]
    assert [each for each in parts["tokens"] if "left_out" in each] == parts["tokens"][1 + named.has_int8 :]
    assert f"({name})" in parts["benchmark"]["machine"]["device"]
    assert "VIRTUAL" in parts["benchmark"]["machine"]["device"]


@pytest.mark.slow
@pytest.mark.npu
@pytest.mark.timeout(3600)
@stand_in_alone
def test_ranks_of_the_stand_in_give_the_tokens_of_a_cpu(tmp_path: Path) -> None:
    ranks = cases(2, 8)
    widen(tmp_path / "wide", ranks)
    asked = [*ON_BF16, f"model.path={tmp_path / 'wide'}", f"parallel.tensor={ranks}"]
    for module, names in (("collectives", COLLECTIVES), ("tokens", ["bfloat16", "W8A8"])):
        done = completed(f"doctor.verify.{module}", *asked)
        assert done.returncode == 0, done.stdout + done.stderr
        told = json.loads(done.stdout)
        assert [(each["name"], each["is_right"]) for each in told] == [(name, True) for name in names]


@pytest.mark.npu
@stand_in_alone
@pytest.mark.parametrize("name", [None, *COLLECTIVES])
def test_a_collective_that_is_wrong_is_found(name: str | None) -> None:
    group = Alone()
    if name is not None:
        setattr(group, name, lambda x, **_: getattr(ALONE, name)(x) + 1)
    found = collectives_of(load(ON_BF16[0], settings("npu")), group)
    assert {each for each, (is_right, _) in found.items() if not is_right} == ({name} - {None})
    if name is not None:
        assert found[name][1] == "wrong on rank 0: 8 rows at once, 8 rows in a graph"
