"""Every rule refuses a call that breaks it, in a sentence that names the rule, its source and the fix."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.each_of import each_of
from tests.virtual_npu.batches import first_version
from tests.virtual_npu.right_calls import FIA, RIGHT, Arguments, outputs
from tests.virtual_npu.wrong import Wrong, put
from tests.virtual_npu.wrong_attention import ATTENTION, ATTENTION_BASES, INT8_PAGES
from tests.virtual_npu.wrong_calls import FAMILIES, PRODUCT, WANTED
from virtual_npu.contract import Conditions, ContractError, Operator
from virtual_npu.operators import OPERATORS
from virtual_npu.simulated_products import PRODUCTS


def family(operator: Operator) -> list[Wrong]:
    """The wrong calls of an operator: those of its kind, and those of all."""
    table = ATTENTION if FIA in operator.name else FAMILIES[operator.name]
    rules = {rule.name for rule in operator.all_rules}
    arguments = {each.name for each in operator.parsed.arguments}
    back = {real: said for said, real in operator.names.items()}
    known = arguments | {back.get(name, name) for name in arguments}
    first = next(each for each in operator.parsed.arguments if str(each.type) in ("Tensor", "List[Tensor]"))
    tensor = first.name
    tensor = back.get(tensor, tensor)
    shared = [
        Wrong("schema", put(nonsense=1), "nonsense", "no argument of it"),
        Wrong("types", put(**{tensor: [1, 2]}), tensor, f"a list where the schema has {first.type}"),
    ]
    absent = [each for each in PRODUCTS.values() if each not in operator.products]
    if absent:
        shared.append(
            Wrong("product", put(), "the product", absent[0].name, conditions={"product": absent[0]})
        )
    return shared + [
        each
        for each in table
        if each.rule in rules
        and (each.argument in known or each.captured)
        and (each.base != INT8_PAGES or "key_antiquant_scale" in known)
    ]


@each_of("operator", OPERATORS)
def test_a_wrong_call_is_refused(operator: Operator) -> None:
    assert [complaint for wrong in family(operator) if (complaint := _complaint(operator, wrong))] == []


def _complaint(operator: Operator, wrong: Wrong) -> str:
    """What is wrong with the refusal of a wrong call; nothing if it is as it should be."""
    arguments, conditions = call(operator, wrong)
    try:
        (operator.check_capture if wrong.captured else operator)(conditions, **arguments)
    except ContractError as error:
        message, broken = str(error), error.rule
    else:
        return f"{wrong} is let through"
    argument = operator.names.get(wrong.argument, wrong.argument)
    rule = next(rule for rule in operator.all_rules if rule.name == wrong.rule)
    is_right = (
        broken == wrong.rule
        and message.startswith(f"{operator.name}: {argument} is ")
        and wrong.said in message.partition("; ")[0] + ";"
        and message.endswith(f"; {rule.demands} [{rule.name}: {rule.source}]: {rule.fix}")
        and "\n" not in message
    )
    return "" if is_right else f"{wrong} is refused by {message!r}"


def test_every_rule_of_every_operator_has_a_wrong_call() -> None:
    wanted = {(operator.name, rule.name) for operator in OPERATORS for rule in operator.all_rules}
    assert {(operator.name, wrong.rule) for operator in OPERATORS for wrong in family(operator)} == wanted
    assert sum(len(family(operator)) for operator in OPERATORS) > 300


def test_the_bases_of_wrong_calls_are_right() -> None:
    """So that what is refused is refused for the change alone."""
    for operator in OPERATORS:
        for base in ATTENTION_BASES if FIA in operator.name else ["base"]:
            of_the_other = INT8_PAGES if "_v2" in operator.name else "sink"
            if base in ("turned single rows", "long rows", of_the_other):
                continue  # wrong as they are, or of the other version alone
            arguments, conditions = call(operator, Wrong("", put(), "", "", base))
            operator(conditions, **arguments)


def test_float32_is_let_through_by_a_condition_and_nothing_else_is() -> None:
    operator = next(each for each in OPERATORS if each.name == FIA)
    widened = {"fp32": True}
    arguments, conditions = call(operator, Wrong("", put(), "", "", conditions=widened))
    wide = {name: arguments[name].float() for name in ("query", "key", "value")}
    operator(conditions, **arguments | wide)
    for wrong in (each for each in family(operator) if not each.captured and each.rule != "dtype"):
        merged = replace(wrong, conditions=wrong.conditions | widened)
        arguments, conditions = call(operator, merged)
        with pytest.raises(ContractError) as refused:
            operator(conditions, **arguments)
        assert refused.value.rule == wrong.rule


def call(operator: Operator, wrong: Wrong) -> tuple[Arguments, Conditions]:
    """The arguments of a wrong call by the schema's names, and its conditions."""
    if FIA in operator.name:
        arguments, conditions = ATTENTION_BASES[wrong.base](), Conditions()
        given = outputs(arguments) if operator.name.endswith(".out") else {}
    else:
        arguments, conditions = drawn(
            operator.name, wrong.conditions.get("product", PRODUCT.get(operator.name))
        )
        given = {}
        back = {real: said for said, real in operator.names.items()}
        arguments = {back.get(name, name): value for name, value in arguments.items()}
    arguments = given | arguments | wrong.change(arguments)
    if FIA in operator.name and "_v2" not in operator.name:
        arguments = first_version(arguments)
    return {operator.names.get(name, name): value for name, value in arguments.items()}, replace(
        conditions, **wrong.conditions
    )


# Whose first axis is no axis of rows
BROAD = ("mask", "weight_scale", *(f"dequant_scale_w_{each}" for each in ("dq", "uq_qr", "dkv_kr")))


@cache
def drawn(name: str, product: Any) -> tuple[Arguments, Conditions]:
    """A right call with three rows or more in its tensors, of a product if one is named."""
    wanted = WANTED.get(name, lambda _: True)
    for seed in range(200):
        arguments, conditions = RIGHT[name](np.random.default_rng(seed))
        tensors = [each for key, each in arguments.items() if isinstance(each, Tensor) and key not in BROAD]
        long = all(each.shape[0] > 2 for each in tensors if each.dim() > 1)
        fits = product is None or conditions.product is product or product.name not in made_for(name)
        if long and fits and wanted(arguments):
            return arguments, replace(conditions, held=None)
    raise AssertionError(f"no right call of {name} is as wanted")


def made_for(name: str) -> set[str]:
    return {product.name for each in OPERATORS if each.name == name for product in each.products}
