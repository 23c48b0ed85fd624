"""Which faults are seeded in how ranks hear the leader, and in how one that is lost is found?"""

from __future__ import annotations

from tests.mutation.fault import Fault
from tests.mutation.graph_faults import GRAPHS

ENGINE = "continuous_batching/engine.py"
SCHEDULER = "continuous_batching/scheduling/scheduler.py"
RECORDER, LISTENERS, FOLLOWER, REPLAY = (
    f"continuous_batching/recording/{name}.py" for name in ("recorder", "listeners", "follower", "replay")
)
BUILT = "recipes/build/engine.py"
IN_FLIGHT, SHARE = "continuous_batching/scheduling/in_flight.py", "models/share.py"
STAGE_RUNNER, WAITS = "models/stage_runner.py", "benchmark/micro/stages.py"
RANK_TESTS = (
    "tests/continuous_batching/test_follower.py",
    "tests/continuous_batching/test_starting_ranks.py",
)
BUILT_RANK_TESTS = ("tests/recipes/test_tensor_ranks.py",)
RANK_TESTS_OF = dict.fromkeys((ENGINE, RECORDER, LISTENERS, FOLLOWER), RANK_TESTS) | {
    BUILT: BUILT_RANK_TESTS,
    REPLAY: ("tests/continuous_batching/test_recorder.py",),
    STAGE_RUNNER: ("tests/models/test_stage_runner.py",),
    WAITS: ("tests/benchmark/test_stages.py",),
}

RANK_FAULTS = {
    "resize_told_too_late": Fault(
        ENGINE + "::Engine.resize",
        (
            "self.observer.resized(num_pages, give_up)\n"
            "self.runner.resize(num_pages, self.scheduler.tables.take_copies())"
        ),
        (
            "self.runner.resize(num_pages, self.scheduler.tables.take_copies())\n"
            "self.observer.resized(num_pages, give_up)"
        ),
        "the leader waits in a resize for ranks that have not heard of it",
    ),
    "forgotten_by_the_leader_alone": Fault(
        REPLAY + "::_replay_held",
        "scheduler.prefix.forget_all()",
        "pass",
        "ranks find pages of a run before, which the leader computes again",
    ),
    "broken_recording_closed": Fault(
        RECORDER + "::_Records.append",
        "self._is_broken = True",
        "pass",
        "a recording that misses entries says that nothing is missing",
    ),
    "masks_untold": Fault(
        RECORDER + "::_recorded",
        "allowed[:4]",
        "None",
        "ranks that follow take a masked row for a greedy one, and wait for logits that nobody brings",
    ),
    "overlap_not_followed": Fault(
        FOLLOWER + "::Follower.start",
        "self._overlap",
        "False",
        "ranks wait in a broadcast for one that calls none",
    ),
    "another_engine_followed": Fault(
        FOLLOWER + "::Follower._compare",
        "header.facts",
        "own",
        "a rank with other settings goes on until something differs",
    ),
    "rank_that_ended_unseen": Fault(
        LISTENERS + "::Listeners._receive_once",
        "not self._is_closed",
        "self._is_closed",
        "the engine waits for a rank that has ended",
    ),
    "silent_rank_unseen": Fault(
        LISTENERS + "::Listeners._receive_once",
        "any(now_s - rank.heard_s > self.limit_s for rank in self._ranks)",
        "False",
        "a rank that is stopped is never named",
    ),
    "long_step_unseen": Fault(
        LISTENERS + "::Listeners._receive_once",
        "now_s - since_s > self.limit_s",
        "False",
        "a step that waits for ever is never ended",
    ),
    "start_limited_as_a_step": Fault(
        LISTENERS + "::Listeners._receive_once",
        "not self.has_started",
        "False",
        "a rank that loads longer than a step may take ends the engine",
    ),
    "lost_at_once": Fault(
        FOLLOWER + "::Beats._tell",
        "not self._has_ended.wait(_LAST_WORDS_S)",
        "True",
        "a rank that ends in order after its leader is killed before it has cleaned up",
    ),
    "endless_start": Fault(
        LISTENERS + "::Listeners._check_start",
        "took_s > self._start_limit_s",
        "False",
        "a start that hangs is never ended",
    ),
    "last_record_lost": Fault(
        LISTENERS + "::Listeners.close",
        "self._records.put(last)",
        "",
        "ranks take the end in order for the loss of their leader",
    ),
    "pages_of_this_rank": Fault(
        BUILT + "::_least",
        "world.least(memory.num_pages, machine.device)",
        "memory.num_pages",
        "a rank with less memory has fewer pages than the leader gives out",
    ),
    "row_in_two_batches": Fault(
        IN_FLIGHT + "::InFlight.withheld",
        "if self._depth > 1:\n    return self.rows",
        "",
        "a row is computed twice, by batches in two stages",
    ),
    "first_batch_takes_all": Fault(
        SCHEDULER + "::Scheduler.schedule",
        "rows = rows[:most]",
        "pass",
        "the other stages have nothing to compute",
    ),
    "pages_moved_under_a_stage": Fault(
        SCHEDULER + "::Scheduler.schedule",
        "self._compaction is not None and (self.depth == 1 or not ahead)",
        "self._compaction is not None",
        "the last stage reads pages where they are not yet",
    ),
    "layer_of_two_stages": Fault(
        SHARE + "::Share.layers", "range(first, stop)", "range(first, stop + 1)", "a layer is computed twice"
    ),
    "head_of_the_first_stage": Fault(
        SHARE + "::Share.is_elsewhere",
        "not self.is_last",
        "self.is_last",
        "a stage complains of a head that it has no place for",
    ),
    "windows_of_the_first_layers": Fault(
        SHARE + "::Share.part",
        "config.windows[layers.start : layers.stop]",
        "config.windows[: len(layers)]",
        "layers of the last stage see as far as those of the first",
    ),
    "captured_where_the_last_stage_launches": Fault(
        STAGE_RUNNER + "::StageRunner._prepared",
        "wanted, graphs = of_prompts.wanted_of(batch, self.slots), self.graphs",
        (
            "last = self.decoder.share.is_last\n"
            "wanted = of_prompts.wanted_of(batch, self.slots) if last else None\n"
            "graphs = self.graphs"
        ),
        "a stage sends as many rows as are captured, and the next receives as many as there are",
    ),
    "inputs_of_a_later_table": Fault(
        STAGE_RUNNER + "::StageRunner.start",
        "self._prepared(batch)",
        "lambda: self._prepared(batch)()",
        "the leader reads pages that were moved for a batch after this one",
    ),
    "leader_waits_for_its_neighbours": Fault(
        STAGE_RUNNER + "::StageRunner.start",
        "share.is_last and share.tensor == 0",
        "False",
        "stages compute one batch after the other",
    ),
    "sizes_of_own_layers": Fault(
        GRAPHS + "::captured_sizes",
        "attention.graph_sizes(wanted, len(spans), most_layers, joins=joins)",
        "attention.graph_sizes(wanted, len(spans), joins=joins)",
        "a shorter stage captures a size that the longer has no streams for",
    ),
    "inputs_for_two_batches": Fault(
        GRAPHS + "::DecodeGraphs.__init__",
        "max(2, stages)",
        "2",
        "with three stages, the third batch takes the place of the first, which nobody has computed",
    ),
    "wait_of_the_later_batch": Fault(
        WAITS + "::TimedStage._computed",
        "has_prompt + self._had_prompt",
        "2 * has_prompt",
        "a wait between a prompt and decodes counts as one between prompts",
    ),
    "wait_counted_as_computing": Fault(
        WAITS + "::TimedStage._computed",
        "time.perf_counter() - start_s - (self._links.waited_s - since_s)",
        "time.perf_counter() - start_s",
        "the simulation learns that a stage computes while it waits",
    ),
    "receive_without_a_name": Fault(
        "models/group.py::StageLinks.receive",
        'self.inside = "receive"',
        "",
        "a stage that waits for another is said to be behind",
    ),
}
