"""Faults of pages that move from one engine to another."""

from __future__ import annotations

from tests.mutation.fault import Fault

FAULTS = {
    "published_before_whole": Fault(
        "continuous_batching/paging/held_pages.py::HeldPages.arrived",
        "not is_whole",
        "not len(pages)",
        "of a cut transfer, pages that never came are found",
        "tests/continuous_batching/test_held_pages.py::test_of_a_cut_transfer_nothing_is_found_and_nothing_is_held",
    ),
    "found_pages_not_held": Fault(
        "continuous_batching/paging/held_pages.py::HeldPages.expect",
        "self._prefix.share(found)",
        "",
        "what the arriving pages continue is evicted before they come",
        "tests/continuous_batching/test_held_pages.py::test_what_is_here_is_not_asked_for",
    ),
    "arrival_over_promised": Fault(
        "continuous_batching/paging/held_pages.py::HeldPages.expect",
        "missing + num_idle > num_spare",
        "missing > self._tables.num_available - num_idle",
        "pages are taken that running requests were promised",
        "tests/continuous_batching/test_held_pages.py::test_nothing_is_expected_that_others_were_promised",
    ),
    "arrived_pages_leak": Fault(
        "continuous_batching/paging/held_pages.py::HeldPages.arrived",
        "self._prefix.release(pages)",
        "",
        "each transfer takes its pages for ever",
        "tests/continuous_batching/test_held_pages.py::test_pages_that_came_whole_are_an_ordinary_hit",
    ),
    "lease_not_pinned": Fault(
        "continuous_batching/paging/held_pages.py::HeldPages.lease",
        "self._leased[name] = pages",
        "self._leased[name] = pages[:0]",
        "pages are evicted or moved while they are being read",
        "tests/continuous_batching/test_held_pages.py::test_held_pages_give_way_to_who_runs",
    ),
    "sent_before_it_is_full": Fault(
        "serving/engine/page_exchange.py::PageSends._tapped",
        "int(batch.stops[index]) // slots.page_size",
        "-(-int(batch.stops[index]) // slots.page_size)",
        "a page is sent without its last tokens",
        "tests/serving/test_page_exchange.py::test_what_is_in_the_pages_is_what_the_other_engine_has_in_them",
    ),
    "end_without_a_count": Fault(
        "serving/engine/page_exchange.py::PageFetches._hear",
        "min(fetch.next_page) == fetch.num_pages and num_bytes == fetch.num_bytes",
        "num_bytes",
        "pages are found of which the last part was lost",
        "tests/serving/test_hostile_peers.py::test_a_lie_of_an_engine_of_prompts_is_a_miss",
    ),
    "bytes_believed": Fault(
        "kv_cache/exchange/prompt_source.py::_Life._check",
        "zlib.crc32(self.connection.part(part).data) != part.check",
        "part.num_bytes != len(self.connection.part(part))",
        "a write that did not arrive whole is read as pages",
        "tests/serving/test_page_exchange.py::test_bytes_that_are_put_straight_into_the_window_are_verified",
    ),
    "model_not_compared": Fault(
        "kv_cache/exchange/messages.py::PageIdentity.difference",
        '"the model": (self.model, hello.model)',
        "",
        "pages of another model are found under the keys of the same tokens",
        "tests/kv_cache/test_exchange.py::test_what_differs_is_named",
    ),
    "window_overrun": Fault(
        "kv_cache/exchange/transports.py::Ring.take",
        "stop = self.num_bytes\nif newest < oldest:\n    stop = oldest\nelif start + count > stop: ...",
        "stop = self.num_bytes\nif start + count > stop: ...",
        "bytes are put over others that were not taken out yet",
        "tests/kv_cache/test_exchange.py::test_a_ring_never_gives_out_what_is_taken_and_gives_out_all_that_is_free",
    ),
    "priority_of_a_peer_unbounded": Fault(
        "kv_cache/exchange/messages.py::PagesWanted",
        "Annotated[int, Meta(ge=-LAST_ID, le=LAST_ID)]",
        "int",
        "one message of another engine ends this one",
        "tests/serving/test_hostile_peers.py::test_a_wish_that_is_none_is_refused_and_the_engine_goes_on",
    ),
    "proof_of_either_side": Fault(
        "borders/shared_secret.py::_proof",
        "HELLO + of_dialler + of_listener + role",
        "HELLO + of_dialler + of_listener",
        "who reflects the dialler's proof is believed to hold the secret",
        "tests/serving/test_page_credentials.py::test_a_reflected_proof_is_none",
    ),
    "proof_of_any_connection": Fault(
        "borders/shared_secret.py::prove_as_listener",
        "secrets.token_bytes(NONCE_BYTES)",
        "bytes(NONCE_BYTES)",
        "who recorded a handshake repeats it",
        "tests/serving/test_page_credentials.py::test_a_recorded_proof_is_none",
    ),
    "said_before_the_proof": Fault(
        "kv_cache/exchange/connection.py::Connection._send",
        "self._may_send.wait()",
        "",
        "an impostor is told the tokens of prompts",
        "tests/serving/test_page_credentials.py::test_an_impostor_learns_no_prompt",
    ),
    "salt_of_a_client_is_an_adapters": Fault(
        "kv_cache/page_keys.py::page_salt",
        'hashlib.sha256(salt.encode()).hexdigest() if salt else ""',
        "salt",
        "a client's own salt, if long, is no name that engines may tell each other",
        "tests/serving/test_page_keys.py::test_no_salt_of_a_request_is_that_of_an_adapter",
    ),
    "base_model_for_an_adapter": Fault(
        "serving/engine/page_exchange.py::PageSends._begin",
        "0 if number is None else number",
        "0",
        "an adapter's prompt is computed with the base model",
        "tests/serving/test_pages_beside.py::test_an_adapter_is_the_one_of_the_same_files_whatever_its_place",
    ),
    "adapter_replaced_beneath": Fault(
        "serving/engine/worker.py::AdapterLoads._put",
        "self._leave(message.number)",
        "",
        "a prompt that was begun for another engine goes on with another adapter",
        "tests/serving/test_pages_beside.py::test_a_place_that_gets_another_adapter_computes_no_more_for_others",
    ),
    "drafts_layers_before_the_drafter": Fault(
        "serving/engine/page_exchange.py::PageSends._tapped",
        "result = run()",
        "list(map(self._after_layer, range(self._num_layers, len(self._layer_bytes)))); result = run()",
        "what a drafter keeps is sent before it has computed it",
        "tests/serving/test_pages_beside.py::test_what_a_drafter_keeps_of_a_prompt_comes_with_its_pages",
    ),
}
