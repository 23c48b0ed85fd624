"""Which faults are seeded where files of requests are kept and run?"""

from __future__ import annotations

from tests.mutation.fault import Fault

STORE, LINES = (f"serving/batches/{name}.py" for name in ("store", "lines"))
RUNNER = "serving/api/batch_runner.py"
_RUNNER_TESTS = ("tests/serving/test_batch_runner.py",)
BATCH_TESTS_OF = {
    STORE: ("tests/serving/test_batch_store.py",),
    LINES: _RUNNER_TESTS,
    RUNNER: _RUNNER_TESTS,
    "serving/api/multipart.py": ("tests/serving/test_multipart.py",),
}

BATCH_FAULTS = (
    Fault(
        "batch_answer_before_its_count",
        STORE,
        '        with self._transaction():\n            self._db.execute("INSERT INTO answers',
        '        if True:\n            self._db.execute("INSERT INTO answers',
        "a server that is killed between the two counts an answer too few for ever",
    ),
    Fault(
        "batch_begins_after_its_end",
        STORE,
        " WHERE id = ? AND status = 'validating'\",",
        ' WHERE id = ?",',
        "a batch that was cancelled while it was read runs on",
    ),
    Fault(
        "files_of_all_keys",
        STORE,
        'query = "SELECT * FROM batches WHERE id = ? AND owner = ?"',
        'query = "SELECT * FROM batches WHERE id = ? AND ? IS NOT NULL"',
        "a key sees the batches of another",
    ),
    Fault(
        "batch_line_twice_in_a_file",
        LINES,
        "            if first != number:\n",
        "            if first > number:\n",
        "two answers have one custom_id, and nobody knows which is whose",
    ),
    Fault(
        "batch_takes_every_slot",
        RUNNER,
        "return min(most - running, ",
        "return max(most - running, ",
        "batches fill the engine, and clients wait behind them",
    ),
    Fault(
        "batch_before_clients",
        RUNNER,
        "most = PRIORITY if client.max_priority is None else min(PRIORITY, client.max_priority)",
        "most = client.max_priority",
        "the lines of a batch stand among the requests of clients who wait",
    ),
    Fault(
        "batch_answer_of_a_lost_engine",
        RUNNER,
        "if status not in (Overloaded.status, Unavailable.status) or num_attempts == MOST_ATTEMPTS:",
        "if status != Overloaded.status or num_attempts == MOST_ATTEMPTS:",
        "a line whose engine was lost has that for its answer",
    ),
    Fault(
        "batch_ends_with_lines_left",
        RUNNER,
        "        self.number, self.is_over = 0, False\n",
        "",
        "after a defect the line is never found again, and the batch ends without it",
    ),
    Fault(
        "form_with_a_line_break_too_many",
        "serving/api/multipart.py",
        'part.removeprefix(b"\\r\\n").partition(b"\\r\\n\\r\\n")',
        'part.strip().partition(b"\\r\\n\\r\\n")',
        "a file loses the line breaks at its end",
    ),
)
