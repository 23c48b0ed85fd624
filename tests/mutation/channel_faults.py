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

CHANNEL_FAULTS = {
    "half_an_end_mark_is_lost": Fault(
        CHANNEL_PARSING + "::ChannelParser._in_text",
        "held[len(held) - kept :]",
        '""',
        "a mark that comes in two pieces ends no message",
    ),
    "messages_end_at_the_first_kind_of_mark": Fault(
        CHANNEL_PARSING + "::ChannelParser._in_text",
        "min(found)",
        "found[0]",
        "text goes on behind its end mark where another message has the other mark",
    ),
    "any_mark_ends_a_message": Fault(
        CHANNEL_PARSING + "::ChannelParser._in_text",
        "self._form.ends",
        "self._form.marks",
        "openai-harmony reads other marks in a message as its text",
    ),
    "heads_are_decided_by_the_piece": Fault(
        CHANNEL_PARSING + "::ChannelParser._in_head",
        "not self._may_be_head(held if at < 0 else held[: at + len(form.message)])",
        "at < 0 and not self._may_be_head(held)",
        "what is no head is one if it comes with its text in one piece",
    ),
    "a_call_to_nobody_is_made": Fault(
        CHANNEL_PARSING + "::ChannelParser._in_head",
        "not to.startswith(prefix) or self._name not in self._names",
        "not to.startswith(prefix)",
        "clients are told to call a function that they do not have",
    ),
    "prompt_s_own_head_is_said": Fault(
        CHANNEL_PARSING + "::ChannelParser.__init__",
        "len(self._held)",
        "0",
        "an answer that is no message begins with the end of its prompt",
    ),
    "notes_before_a_form": Fault(
        CHANNEL_GRAMMAR + "::channel_grammar",
        "[form.thoughts] if must_call or answer is not None else [form.thoughts, form.notes]",
        "[form.thoughts, form.notes]",
        "content that is to be JSON begins with a note",
    ),
    "form_of_what_the_prompt_began": Fault(
        CHANNEL_GRAMMAR + "::channel_grammar",
        'place == "text"',
        'place == ""',
        "an answer that goes on where its prompt ends is held to a second head",
    ),
    "said_before_a_call_is_lost": Fault(
        CHANNELS + "::with_thinking",
        "(thoughts, content)",
        "(thoughts,)",
        "gpt-oss' template takes thoughts or content before a call, not both",
    ),
    "thoughts_without_calls": Fault(
        ANSWERS + "::answer_contradictions",
        '(tool_format == "harmony") != (reasoning == "harmony")',
        'tool_format == "harmony" and reasoning != "harmony"',
        "a recipe serves thoughts on channels, and refuses the calls on them",
    ),
}
