"""Run the test files, and the tests within each, in an order drawn from a seed that is printed.

The tests of a file that is marked `in_order` keep their order: they share one server, or one group of ranks.
`scripts/test.sh -p tests.shuffled` draws a seed; `--order-seed N` repeats the order of an earlier run.
"""

from __future__ import annotations

import random
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the seed's option."""
    parser.addoption("--order-seed", type=int, help="the order of an earlier run with -p tests.shuffled")


def pytest_configure(config: pytest.Config) -> None:
    """Draw a seed once: a worker takes that of the process which started it."""
    if config.option.order_seed is None:
        config.option.order_seed = random.randrange(1_000_000)
    if hasattr(config, "workerinput"):
        config.option.order_seed = config.workerinput["order_seed"]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker the seed."""
    node.workerinput["order_seed"] = node.config.option.order_seed


def pytest_report_header(config: pytest.Config) -> str:
    """Name the seed where it is read first."""
    return f"order: drawn, repeat it with -p tests.shuffled --order-seed {config.option.order_seed}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the seed where failures are read."""
    terminalreporter.write_line(pytest_report_header(terminalreporter.config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle before pytest brings together what shares a parameter of a lasting fixture."""
    draw = random.Random(config.option.order_seed)
    of_file: dict[object, list[pytest.Item]] = {}
    for item in items:
        of_file.setdefault(item.path, []).append(item)
    files = list(of_file.values())
    draw.shuffle(files)
    for tests in files:
        if not tests[0].get_closest_marker("in_order"):
            draw.shuffle(tests)
    items[:] = [item for tests in files for item in tests]
