"""Every call of torch_npu in the code is in the table of calls, and each supported release takes it."""

from __future__ import annotations

import ast
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from devices.ascend_limits import PRODUCTS, product
from devices.torch_npu_calls import ALL, PYTHON_NAMES, OperatorCall, calls_of, lacking
from devices.torch_npu_releases import FILE, Release, arguments_in, completed, releases, supported, table_of
from doctor.wheels import order, release_of
from scripts import torch_npu_releases
from tests.test_imports import ROOT
from virtual_npu.operators import OPERATORS

CALLERS = [
    *ROOT.glob("attention/npu/*.py"),
    *ROOT.glob("models/ops/npu/*.py"),
    *ROOT.glob("doctor/verify/npu/*.py"),
]
CALLS = {call.operator: call for call in ALL}
NEWEST = list(releases())[-1]
# What the operators of attention are called through, by the file that does
CALLED_BY = {
    "fused_attention.py": {
        "_operator": ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"),
        "_operator.out": ("npu_fused_infer_attention_score.out", "npu_fused_infer_attention_score_v2.out"),
        "measure": (
            "_npu_fused_infer_attention_score_get_max_workspace",
            "_npu_fused_infer_attention_score_v2_get_max_workspace",
        ),
    }
}


def order_of_arguments(operator: str) -> tuple[str, ...]:
    """The names of an operator's arguments in the newest release."""
    return arguments_in(releases()[NEWEST].schemas[operator][0])


def calls_in(path: Path) -> Iterator[tuple[tuple[str, ...], ast.Call]]:
    """The calls of torch_npu's operators in a file, with the operators that each may call."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called.startswith("torch_npu.") and called.count(".") == 1:
            yield (called.partition(".")[2],), node
        elif through := CALLED_BY.get(path.name, {}).get(called.removeprefix("self.")):
            yield through, node


def words_of(path: Path) -> set[str]:
    """The keys of dictionaries and the keywords in a file, of which arguments that are passed on come.

    What latent attention and that over int8 pages call is called in their base.
    """
    if path.name == "fused_attention.py":
        kinds = ("latent_attention.py", "int8_attention.py")
        return words_in(path).union(*(words_in(path.with_name(kind)) for kind in kinds))
    if path.name == "int8_sparse_attention.py":  # whose base makes the lengths
        return words_in(path) | words_in(path.with_name("sparse_attention.py"))
    return words_in(path)


def words_in(path: Path) -> set[str]:
    """The keywords and the texts in a file."""
    words: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg:
            words.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
    return words


def test_every_call_and_argument_is_in_the_table() -> None:
    seen: dict[str, set[str]] = {}
    for path in CALLERS:
        for operators, node in calls_in(path):
            for operator in operators:
                known = order_of_arguments(operator)
                given = {*known[: len(node.args)], *(each.arg for each in node.keywords if each.arg)}
                assert given <= set(CALLS[operator].arguments), f"{path}:{node.lineno}"
                if any(each.arg is None for each in node.keywords):  # passed on from a dictionary
                    given |= words_of(path) & set(CALLS[operator].arguments)
                seen.setdefault(operator, set()).update(given)
    assert seen.keys() == CALLS.keys()
    unused = {name: set(call.arguments) - seen[name] for name, call in CALLS.items()}
    assert not {name: some for name, some in unused.items() if some}


def test_every_name_of_torch_npus_module_is_in_the_table() -> None:
    used = set()
    for path in CALLERS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
                "torch_npu.npu",
                "torch_npu.npu.utils",
            ):
                used.add(node.attr)
    assert used - {"config", "utils"} <= set(PYTHON_NAMES)


def test_the_stand_in_has_rules_for_each_of_them() -> None:
    """But for the making of an empty tensor, which has no operator's contract."""
    rules = {each.name for each in OPERATORS}
    routed = {"npu_moe_token_unpermute"}  # torch_npu turns it into the operator of the same name with _
    assert CALLS.keys() - rules - routed == {"empty_with_format"}


@pytest.mark.parametrize("chip", PRODUCTS, ids=lambda each: each.name)
def test_supported_releases_have_every_call(chip: object) -> None:
    for version in supported(chip):
        release = releases()[version]
        for call in calls_of(chip):
            assert any(set(call.arguments) <= set(names) for names in release.arguments_of(call.operator))
        assert not release.absent_names


def test_the_floor_is_what_the_manual_says() -> None:
    text = (ROOT / "docs/ascend.md").read_text(encoding="utf-8")
    for name in ("910B", "310P"):
        [row] = [line for line in text.splitlines() if line.startswith(f"| {name}") and "torch_npu" in line]
        assert row.split("|")[2].split() == ["torch_npu", *" ".join(supported(product(name, ""))).split()]


def test_what_is_absent_is_said_in_words() -> None:
    calls = [OperatorCall("f", ("x", "y"), "W8A8"), OperatorCall("g", (), "every model")]
    assert list(lacking(calls, {"f": [{"x"}], "g": []}.__getitem__)) == [
        "the argument y of f (W8A8)",
        "g (every model)",
    ]
    assert list(lacking(calls, {"f": [{"x"}, {"x", "y"}], "g": [()]}.__getitem__)) == []


def wheel(path: Path, *texts: str, python: str = "") -> Path:
    """A wheel whose one library holds these texts among others."""
    with zipfile.ZipFile(path, "w") as archive:
        library = b"\x7fELF\0junk(Tensor\0" + b"\0".join(each.encode() for each in texts) + b"\0\xff\0"
        archive.writestr("torch_npu/lib/libtorch_npu.so", library)
        archive.writestr("torch_npu/npu/__init__.py", python)
    return path


FUNCTION = "N3c104impl6detail24WrapFunctionIntoFunctor_INS_26CompileTimeFunctionPointerI{}EXadL_ZN3atb22{}EE"
RESHAPE = "_npu_reshape_and_cache"
TEXT = f"{RESHAPE}(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor at) -> ()"


def test_a_wheel_is_read_without_being_imported(tmp_path: Path) -> None:
    swiglu = "npu_swiglu(Tensor input, int dim=-1) -> Tensor"
    merged = f"{RESHAPE}(Tensor key tion_get_workspace(Tensor query) -> Tensor"
    function, cut = FUNCTION.format("Fv", RESHAPE), "npu_rms_norm(Tensor"
    texts = (f"npu::{swiglu}", cut, merged, function, "other(Tensor x) -> Tensor")
    found = release_of(wheel(tmp_path / "a.whl", *texts, python="NPUGraph current_stream"))
    assert found.schemas == {"npu_swiglu": (swiglu,)}
    assert found.functions == {RESHAPE: "Fv"}
    assert set(PYTHON_NAMES) - set(found.absent_names) == {"NPUGraph", "current_stream"}


def test_a_text_that_is_absent_is_lent_by_a_release_whose_function_has_the_same_type() -> None:
    own = Release({RESHAPE: (TEXT,)}, {RESHAPE: "Fv"})
    filled = completed({"1": Release({}, {RESHAPE: "Fv"}), "2": own, "3": Release({}, {RESHAPE: "Fi"})})
    names = ("key", "value", "key_cache", "value_cache", "at")
    assert [filled[version].arguments_of(RESHAPE) for version in "123"] == [[names], [names], []]
    assert filled["1"].lacks([OperatorCall(RESHAPE, ("key", "other"), "every model")]) == (
        f"the argument other of {RESHAPE} (every model)",
    )


def test_the_table_gives_back_what_made_it() -> None:
    known = releases()
    assert list(known) == sorted(known, key=order)
    again = json.loads(json.dumps(table_of(known)))
    assert again == json.loads(FILE.read_text(encoding="utf-8"))


def test_the_command_adds_a_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.json"
    file.write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(torch_npu_releases, "FILE", file)
    asked: list[str] = []

    def brought(version: str, folder: Path) -> Path:
        asked.append(version)
        return wheel(folder / "x.whl", "npu_swiglu(Tensor input) -> Tensor")

    monkeypatch.setattr("doctor.wheels._downloaded", brought)
    assert torch_npu_releases.main(["9.0.0"]) == 0
    assert asked == ["9.0.0"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("9.0.0: torch_npu.npu.ExternalEvent; ")
    assert "; the argument dim of npu_swiglu (every model); " in last
    table = json.loads(file.read_text(encoding="utf-8"))
    assert table["releases"].items() > json.loads(FILE.read_text(encoding="utf-8"))["releases"].items()


def test_the_installed_schemas_are_those_of_the_table() -> None:
    """The stand-in's contract has the texts that torch parsed from the installed wheel, 2.13.0."""
    table = releases()["2.13.0"]
    for each in OPERATORS:
        for text in table.schemas.get(each.name, ()):
            assert arguments_in(text) == tuple(argument.name for argument in each.parsed.arguments)
