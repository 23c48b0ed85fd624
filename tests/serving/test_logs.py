"""The log is written where it can be, and stops nobody where it cannot."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator

import pytest

from continuous_batching.counters import Counters
from serving.engine.messages import Beat, StepTimes
from serving.metrics import logs
from serving.metrics.logs import FORMATS, Lines
from serving.metrics.server_stats import NO_GAUGES, Pulse, ServerStats
from tests.patience import PATIENCE_S


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last lines are waited for however busy the machine is."""
    monkeypatch.setattr(logs, "_LAST_S", PATIENCE_S)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.Logger("test", logging.INFO)
    yield logger
    for handler in logger.handlers:
        handler.close()


def writes_to(logger: logging.Logger, descriptor: int, form: str = "text") -> Lines:
    lines = Lines(descriptor)
    lines.setFormatter(FORMATS[form]())
    logger.addHandler(lines)
    return lines


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("form", FORMATS)
def test_lines_are_written_in_order_and_none_is_two(logger: logging.Logger, form: str) -> None:
    reader, writer = os.pipe()
    lines = writes_to(logger, writer, form)
    for index in range(100):
        logger.info("%d a\nb \x1b[31m 你好", index, extra={"fields": {"request_id": "r"}})
    lines.close()
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        written = file.read().splitlines()
    assert len(written) == 100
    if form == "json":
        entries = [json.loads(each) for each in written]
        assert [each["message"].split()[0] for each in entries] == [str(index) for index in range(100)]
        assert entries[0]["request_id"] == "r"
        assert entries[0]["level"] == "info"
        assert entries[0]["time"].endswith("Z")
    else:
        assert written[7] == "7 a\\nb \\x1b[31m 你好"


@pytest.mark.usefixtures("patient")
def test_a_defect_is_told_with_its_trace(logger: logging.Logger) -> None:
    reader, writer = os.pipe()
    lines = writes_to(logger, writer, "json")
    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("a defect")
    lines.close()
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        (entry,) = map(json.loads, file)
    assert "KeyError: 'x'" in entry["trace"]


def test_a_full_disk_costs_lines_and_nothing_else(logger: logging.Logger) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    lines = writes_to(logger, full)
    for _ in range(50):
        logger.info("x")
    lines.close()
    os.close(full)
    assert lines.num_lost == 50


def test_a_reader_that_hangs_costs_lines_and_nothing_else(logger: logging.Logger) -> None:
    reader, writer = os.pipe()
    lines = writes_to(logger, writer)
    for _ in range(30_000):
        logger.info("x" * 100)  # more than the queue and a pipe hold, which has 1 MiB where pages have 64 KiB
    assert lines.num_lost > 0
    lines.close()  # does not wait for ever
    os.close(reader)


@pytest.mark.usefixtures("patient")
def test_a_record_that_cannot_be_formatted_is_lost_alone(logger: logging.Logger) -> None:
    reader, writer = os.pipe()
    lines = writes_to(logger, writer)
    logger.info("%d", "x")
    logger.info("y")
    lines.close()
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        assert file.read() == "y\n"
    assert lines.num_lost == 1


def test_what_is_done_is_told_while_there_is_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serving.metrics.server_stats")
    stats = ServerStats()
    pulse = Pulse(stats)
    pulse.beat()
    assert not caplog.records
    stats.stepped(StepTimes(0.1, 0.1, 2, 30, 28))
    stats.beat(Beat(NO_GAUGES, Counters(prompt_tokens=40, hit_tokens=10), None, 0, 0))
    pulse.beat()
    assert "found cached 25%" in caplog.text
    assert caplog.records[0].__dict__["fields"]["hit_rate"] == 0.25
    pulse.beat()
    assert len(caplog.records) == 1
