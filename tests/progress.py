"""Print how far a run of the tests is and which room each worker is in, in place of a dot for each test."""

from __future__ import annotations

import time

import pytest

_LINE_EVERY_S = 10.0  # where a line cannot be written over


class Progress:
    """A plugin of pytest that prints a line every ten seconds; on a terminal, one line is written anew."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._began_s = time.monotonic()
        self._printed_s = 0.0  # seconds since the run began
        self._num_tests = self._num_ended = self._num_failed = 0
        self._rooms: dict[str, str] = {}  # the key is the worker

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without workers, this process knows what it runs."""
        self._num_tests = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Every worker has the same tests."""
        self._num_tests = len(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no letter for a test: its count stays, and one that fails is named in a line of its own."""
        if report.passed and report.when != "call":
            return "", "", ""
        if report.failed and report.when != "call":
            return "error", "", "ERROR"
        return report.outcome, "", report.outcome.upper()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test that has ended, and name it at once where it failed."""
        self._num_failed += report.failed
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"FAILED {report.nodeid}", red=True)
        if report.when != "teardown":
            return
        self._num_ended += 1
        room = report.nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
        self._rooms[getattr(report, "worker_id", "")] = room
        took_s = time.monotonic() - self._began_s
        if self._terminal.isatty:
            self._terminal.rewrite(self._line(took_s)[: self._terminal._tw.fullwidth - 1], erase=True)
        elif took_s > self._printed_s + _LINE_EVERY_S:
            self._printed_s = took_s
            self._terminal.write_line(self._line(took_s))

    def _line(self, took_s: float) -> str:
        failed = f", {self._num_failed:,} failed" if self._num_failed else ""
        rooms = ", ".join(self._rooms[worker] for worker in sorted(self._rooms))
        return f"{took_s:6.0f} s  {self._num_ended:,} of {self._num_tests:,}{failed}  {rooms}"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Add the plugin where this process prints, and not for `-v`, which names each test."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and config.get_verbosity() <= 0 and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(terminal), "progress")
