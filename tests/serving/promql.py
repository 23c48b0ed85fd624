"""Read what a PromQL expression asks for, by a parser that is not ours."""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser as promql

OF_TARGET = {"instance", "job"}  # labels that Prometheus itself puts on what it scrapes
OF_GRAFANA = {"$__rate_interval": "5m", "$model": ".*", "$source": "x"}


def selectors(expression: str) -> Iterator[tuple[str, list[tuple[str, str, bool]]]]:
    """Each metric, and its matchers: label, value, and whether it must be equal. Raises ValueError."""
    found: list[tuple[str, list[tuple[str, str, bool]]]] = []

    def visit(node: object) -> None:
        if isinstance(node, promql.VectorSelector):
            assert node.name is not None, "a selector of ours names its metric"
            matchers = node.matchers.matchers
            found.append(
                (node.name, [(each.name, each.value, each.op == promql.MatchOp.Equal) for each in matchers])
            )

    promql.walk(promql.parse(in_prometheus(expression)), visit)
    yield from found


def in_prometheus(expression: str) -> str:
    """As Grafana sends it."""
    for name, value in OF_GRAFANA.items():
        expression = expression.replace(name, value)
    return expression


def grouping(expression: str) -> set[str]:
    """The labels that it sums by, or joins on."""
    clauses = re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression)
    return {label.strip() for clause in clauses for label in clause.split(",")}
