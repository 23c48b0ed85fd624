"""Which faults are seeded where answers stand on channels?"""

from __future__ import annotations

from tests.mutation.fault import Fault

TOOLS = "serving/tools/"
CHANNELS, CHANNEL_PARSING, CHANNEL_GRAMMAR = (
    TOOLS + name for name in ("channels.py", "channel_parsing.py", "channel_grammar.py")
)
ANSWERS = "recipes/schema/answer_checks.py"
CHANNEL_TESTS_OF = dict.fromkeys(
    (CHANNELS, CHANNEL_PARSING, CHANNEL_GRAMMAR, ANSWERS), ("tests/serving/test_channels.py",)
)

CHANNEL_FAULTS = (
    Fault(
        "half_an_end_mark_is_lost",
        CHANNEL_PARSING,
        "            self._held = held[len(held) - kept :]",
        '            self._held = ""',
        "a mark that comes in two pieces ends no message",
    ),
    Fault(
        "messages_end_at_the_first_kind_of_mark",
        CHANNEL_PARSING,
        "at, end = min(found)",
        "at, end = found[0]",
        "text goes on behind its end mark where another message has the other mark",
    ),
    Fault(
        "any_mark_ends_a_message",
        CHANNEL_PARSING,
        "held, ends = self._held, self._form.ends",
        "held, ends = self._held, self._form.marks",
        "openai-harmony reads other marks in a message as its text",
    ),
    Fault(
        "heads_are_decided_by_the_piece",
        CHANNEL_PARSING,
        "if not self._may_be_head(held if at < 0 else held[: at + len(form.message)]):",
        "if at < 0 and not self._may_be_head(held):",
        "what is no head is one if it comes with its text in one piece",
    ),
    Fault(
        "a_call_to_nobody_is_made",
        CHANNEL_PARSING,
        "if not to.startswith(prefix) or self._name not in self._names:",
        "if not to.startswith(prefix):",
        "clients are told to call a function that they do not have",
    ),
    Fault(
        "prompt_s_own_head_is_said",
        CHANNEL_PARSING,
        "        self._begin_anew(len(self._held))",
        "        self._begin_anew(0)",
        "an answer that is no message begins with the end of its prompt",
    ),
    Fault(
        "notes_before_a_form",
        CHANNEL_GRAMMAR,
        "before = [form.thoughts] if must_call or answer is not None else [form.thoughts, form.notes]",
        "before = [form.thoughts, form.notes]",
        "content that is to be JSON begins with a note",
    ),
    Fault(
        "form_of_what_the_prompt_began",
        CHANNEL_GRAMMAR,
        'if place == "text" and answer is not None:',
        'if place == "" and answer is not None:',
        "an answer that goes on where its prompt ends is held to a second head",
    ),
    Fault(
        "said_before_a_call_is_lost",
        CHANNELS,
        "for each in (thoughts, content) if each)",
        "for each in (thoughts,) if each)",
        "gpt-oss' template takes thoughts or content before a call, not both",
    ),
    Fault(
        "thoughts_without_calls",
        ANSWERS,
        '(tool_format == "harmony") != (reasoning == "harmony")',
        'tool_format == "harmony" and reasoning != "harmony"',
        "a recipe serves thoughts on channels, and refuses the calls on them",
    ),
)
