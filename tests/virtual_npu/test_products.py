"""Products state where each of their facts comes from, and the list of operators says what it checks."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import pytest

from tests.patience import PATIENCE_S
from tests.serving.warm import start_session
from virtual_npu import ops
from virtual_npu.operators import OPERATORS, operator
from virtual_npu.simulated_products import PRODUCTS, Product, product


def test_every_fact_has_its_source() -> None:
    facts = {each.name for each in dataclasses.fields(Product)} - {"name", "chips", "sources"}
    for each in PRODUCTS.values():
        assert set(each.sources) == facts
        assert all(
            source.startswith(("op-plugin", "CANN", "vllm-ascend", "Ascend C"))
            for source in each.sources.values()
        )


def test_what_is_not_known_is_said_to_be_so() -> None:
    with pytest.raises(
        ValueError, match="product 'A9' is not known; the products are 310P, 910, 910B, 910C, 950"
    ):
        product("A9")
    with pytest.raises(ValueError, match="operator 'npu_x' is not known here"):
        operator("npu_x")


def test_rules_say_all_that_a_message_needs() -> None:
    for each in OPERATORS:
        names = [rule.name for rule in each.all_rules]
        assert len(names) == len(set(names)), each.name
        assert all(rule.demands and rule.source and rule.fix for rule in each.all_rules)


def test_operators_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert ops.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["operator", "rules", *PRODUCTS]
    assert [line.split()[0] for line in lines[1:]] == [each.qualified for each in OPERATORS]
    swiglu = next(line for line in lines if "npu_swiglu" in line)
    assert swiglu.split() == ["npu::npu_swiglu", "8", "x", "x", "x", "x"]


def test_one_operator_is_listed_rule_by_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert ops.main(["npu_rms_norm"]) == 0
    text = capsys.readouterr().out
    assert "gamma-dtype: gamma is of the input's type, or float32 on the 910B and 910C" in text
    assert "    source: op-plugin npu_rms_norm" in text


def test_the_list_is_there_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert ops.main(["--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed] == [each.qualified for each in OPERATORS]
    assert all({"name", "demands", "source", "fix"} == set(rule) for each in listed for rule in each["rules"])
    with pytest.raises(SystemExit):
        ops.main(["npu_x"])


def test_a_reader_that_has_seen_enough_ends_the_list_without_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        status = start_session("virtual_npu.ops", [], dict(os.environ), nobody).wait(PATIENCE_S)
    assert status == 128 + signal.SIGPIPE
