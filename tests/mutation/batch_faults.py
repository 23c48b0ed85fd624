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

BATCH_FAULTS = {
    "batch_answer_before_its_count": Fault(
        STORE + "::BatchStore.answer",
        "with self._transaction(): ...",
        "if True: ...",
        "a server that is killed between the two counts an answer too few for ever",
    ),
    "batch_begins_after_its_end": Fault(
        STORE + "::BatchStore.begin",
        (
            '"UPDATE batches SET total = ?, failed = ?, begun_s = ?, status = \'in_progress\'" " WHERE id ='
            " ? AND status = 'validating'\""
        ),
        '"UPDATE batches SET total = ?, failed = ?, begun_s = ?, status = \'in_progress\'" " WHERE id = ?"',
        "a batch that was cancelled while it was read runs on",
    ),
    "files_of_all_keys": Fault(
        STORE + "::BatchStore.batch",
        'query = "SELECT * FROM batches WHERE id = ? AND owner = ?"',
        'query = "SELECT * FROM batches WHERE id = ? AND ? IS NOT NULL"',
        "a key sees the batches of another",
    ),
    "batch_line_twice_in_a_file": Fault(
        LINES + "::LineCheck.__call__",
        "first != number",
        "first > number",
        "two answers have one custom_id, and nobody knows which is whose",
    ),
    "batch_takes_every_slot": Fault(
        RUNNER + "::Batches._room", "min", "max", "batches fill the engine, and clients wait behind them"
    ),
    "batch_before_clients": Fault(
        RUNNER + "::Batches._begun",
        "PRIORITY if client.max_priority is None else min(PRIORITY, client.max_priority)",
        "client.max_priority",
        "the lines of a batch stand among the requests of clients who wait",
    ),
    "batch_answer_of_a_lost_engine": Fault(
        RUNNER + "::Batches._answer",
        "status not in (Overloaded.status, Unavailable.status)",
        "status != Overloaded.status",
        "a line whose engine was lost has that for its answer",
    ),
    "batch_ends_with_lines_left": Fault(
        RUNNER + "::_Active.begin_again",
        "self.number, self.is_over = 0, False",
        "",
        "after a defect the line is never found again, and the batch ends without it",
    ),
    "form_with_a_line_break_too_many": Fault(
        "serving/api/multipart.py::read_form",
        'part.removeprefix(b"\\r\\n")',
        "part.strip()",
        "a file loses the line breaks at its end",
    ),
}
