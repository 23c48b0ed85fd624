"""Faults of batches, responses, adapters and requests' own processors."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "batch_answer_before_its_count": Fault(
        "serving/batches/store.py::BatchStore.answer",
        "with self._transaction(): ...",
        "if True: ...",
        "a server that is killed between the two counts an answer too few for ever",
        "tests/serving/test_batch_store.py::test_after_a_kill_at_any_statement_each_line_is_answered_once",
    ),
    "files_of_all_keys": Fault(
        "serving/batches/store.py::BatchStore.batch",
        'query = "SELECT * FROM batches WHERE id = ? AND owner = ?"',
        'query = "SELECT * FROM batches WHERE id = ? AND ? IS NOT NULL"',
        "a key sees the batches of another",
        "tests/serving/test_batch_store.py::test_what_others_keep_is_not_found",
    ),
    "batch_takes_every_slot": Fault(
        "serving/api/batch_runner.py::Batches._room",
        "min",
        "max",
        "batches fill the engine, and clients wait behind them",
        "tests/serving/test_batch_runner.py::test_so_many_lines_run_at_a_time_and_below_all_others",
    ),
    "batch_answer_of_a_lost_engine": Fault(
        "serving/api/batch_runner.py::Batches._answer",
        "status not in (Overloaded.status, Unavailable.status)",
        "status != Overloaded.status",
        "a line whose engine was lost has that for its answer",
        "tests/serving/test_batch_runner.py::test_what_is_not_the_line_s_fault_is_tried_again",
    ),
    "form_with_a_line_break_too_many": Fault(
        "serving/api/files.py::read_form",
        'part.removeprefix(b"\\r\\n")',
        "part.strip()",
        "a file loses the line breaks at its end",
        "tests/serving/test_multipart.py::test_a_form_is_read_as_it_was_written",
    ),
    "items_share_an_event": Fault(
        "serving/api/responses.py::OutputItems._begin",
        'yield from self._close("completed")',
        "",
        "an item is never done when another follows, and OpenAI's client waits for it",
        "tests/serving/test_response_items.py::test_every_way_to_cut_an_answer_gives_the_same_response",
    ),
    "cut_answer_is_complete": Fault(
        "serving/api/responses.py::_status",
        'delta.finish_reason == "stop"',
        "delta.finish_reason",
        "a client takes half an answer for a whole one",
        "tests/serving/test_response_items.py::test_every_way_to_cut_an_answer_gives_the_same_response",
    ),
    "calls_forget_their_thoughts": Fault(
        "serving/api/responses_input.py::_Turns._open_message",
        "self._turn is None",
        "self._turn is None or True",
        "thoughts, text and calls of one turn become messages of several",
        "tests/serving/test_response_items.py::test_items_become_the_messages_of_their_turns",
    ),
    "score_of_the_other_answer": Fault(
        "serving/api/scores.py::AskedJudge.scores",
        "logprobs[:, 1] - logprobs[:, 0]",
        "logprobs[:, 0] - logprobs[:, 1]",
        "what the model says no to scores high",
        "tests/serving/test_scores.py::test_control_tokens_in_a_document_are_text",
    ),
    "documents_may_hold_marks": Fault(
        "serving/api/scores.py::Question.fields",
        "_MARK.sub(lambda mark: texts[mark[1]], self.question)",
        'self.question.replace("{document}", document).replace("{query}", query)',
        "a document that writes {query} gets the query's words",
        "tests/serving/test_scores.py::test_control_tokens_in_a_document_are_text",
    ),
    "adapters_masked_by_products": Fault(
        "models/layers/low_rank.py::LowRank.add",
        "low.masked_fill_(is_other, 0)",
        "low.mul_(~is_other)",
        "infinity times zero is no number, and a neighbour's adapter spoils the answer",
        "tests/models/test_adapters.py::test_what_another_adapter_makes_of_a_token_reaches_it_not_even_where_it_is_infinite",
    ),
    "adapter_left_in_its_place": Fault(
        "models/layers/low_rank.py::LowRank.put",
        "room[len(read) :].zero_()",
        "",
        "what an adapter does not change still has the one that was unloaded",
        "tests/models/test_adapters.py::test_a_place_holds_nothing_of_what_it_held",
    ),
    "adapter_without_its_scale": Fault(
        "models/step/adapters.py::Adapters.read",
        "b * files.scale_of(stored)",
        "b",
        "alpha is taken for the rank",
        "tests/models/test_adapters.py::test_beams_scores_and_guesses_are_those_of_merged_weights",
    ),
    "pages_of_an_adapter_shared_by_name": Fault(
        "serving/text/request_fields.py::parse_request",
        "adapter.files.digest",
        "adapter.name",
        "an adapter that is loaded again with other files finds the pages of the old one",
        "tests/serving/test_adapters.py::test_what_cannot_be_loaded_is_refused_and_the_rest_goes_on",
    ),
    "adapter_asked_for_before_it_is_there": Fault(
        "serving/adapters.py::ServedAdapters.begin",
        "each.is_there = False",
        "",
        "a new engine answers for an adapter that it is still reading",
        "tests/serving/test_adapters.py::test_an_adapter_is_not_asked_for_before_a_new_engine_has_it",
    ),
    "processor_fails_for_all": Fault(
        "continuous_batching/own_processors.py::OwnProcessors.changed",
        'self.error = f"logits processor {name} raised {type(error).__name__}: {error}"\nreturn None',
        'self.error = f"logits processor {name} raised {type(error).__name__}: {error}"\nraise',
        "one request's processor ends the engine, and with it all others",
        "tests/serving/test_own_processors.py::test_what_fails_ends_its_request_alone",
    ),
    "learned_is_lost": Fault(
        "serving/engine/supervisor.py::Supervisor._listen",
        "self._learned = message.learned",
        "self._learned = ''",
        "an engine that takes a lost one's place measures its threads anew, for seconds on busy cores",
        "tests/serving/test_supervisor.py::test_an_engine_is_told_what_the_one_before_it_has_learned",
    ),
    "learned_spinning_is_kept": Fault(
        "devices/cpu_threads.py::Threads.__init__",
        "self.candidates[1:]",
        "self.candidates",
        "an engine begins with spinning threads that nothing watches",
        "tests/devices/test_cpu_threads.py::test_what_an_engine_learned_of_other_threads_is_not_taken",
    ),
}
