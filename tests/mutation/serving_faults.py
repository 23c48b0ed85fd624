"""Faults of tokenizers' files, batches, responses, adapters and requests' own processors."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "space_after_every_added_token": Fault(
        "serving/text/vocabulary.py::_rebuild",
        'settings.get("legacy")',
        'settings.get("legacy", True)',
        "a Llama whose files are silent of legacy puts a space after each added token",
        "tests/serving/test_tokenizer_files.py::test_a_llamas_class_says_where_the_space_before_a_text_goes",
    ),
    "templates_of_two_files_mixed": Fault(
        "serving/text/tokenizer_settings.py::templates_in",
        "found = {}",
        "found.pop('default', None)",
        "tools take an older template than conversations without them",
        "tests/serving/test_tokenizer_files.py::test_conversations_with_tools_take_the_template_of_tools",
    ),
    "ended_requests_kept": Fault(
        "serving/engine/worker.py::Worker._end",
        "del self._requests[stream]",
        "",
        "an engine keeps every request that it has answered",
        "tests/serving/test_worker.py::test_an_engine_keeps_nothing_of_requests_that_have_ended",
    ),
    "places_given_back_too_soon": Fault(
        "serving/async_llm.py::_all_ended",
        "return_exceptions=True",
        "return_exceptions=False",
        "threads read more prompts than the server has places for",
        "tests/serving/test_bounds.py::test_a_refused_prompt_keeps_its_places_until_its_siblings_have_ended",
    ),
    "handshakes_without_a_place": Fault(
        "serving/tls.py::Handshakes.accept",
        "len(connected) + len(self._agreeing) >= self._most",
        "len(connected) >= self._most",
        "strangers that say nothing hold all descriptors of a server with TLS",
        "tests/serving/test_tls.py::test_connections_count_and_have_little_time_before_they_have_keys",
    ),
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
    "calls_forget_their_thoughts": Fault(
        "serving/api/responses_input.py::_Turns._open_message",
        "self._turn is None",
        "self._turn is None or True",
        "thoughts, text and calls of one turn become messages of several",
        "tests/serving/test_response_items.py::test_items_become_the_messages_of_their_turns",
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
    "processor_fails_for_all": Fault(
        "continuous_batching/own_processors.py::OwnProcessors.changed",
        'self.error = f"logits processor {name} raised {type(error).__name__}: {error}"\nreturn None',
        'self.error = f"logits processor {name} raised {type(error).__name__}: {error}"\nraise',
        "one request's processor ends the engine, and with it all others",
        "tests/serving/test_own_processors.py::test_what_fails_ends_its_request_alone",
    ),
}
