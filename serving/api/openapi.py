"""Describe every path's answers for `/openapi.json`.

The models of this module make and check nothing: the answers are written by the routes, and tests hold what
the server sends to what is described here. Requests are described by the bodies of schemas.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"
_FASTAPI_OWN = ("HTTPValidationError", "ValidationError")  # FastAPI's models of an answer that is never sent


class AnswerObject(BaseModel):
    """A JSON object with these fields; those with a default may be left out."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class OpenObject(AnswerObject):
    """A JSON object that has more fields than are named."""

    model_config = ConfigDict(extra="allow")


class Problem(AnswerObject):
    """Why a request failed; `param` is the field that it is about."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorAnswer(AnswerObject):
    """An error in OpenAI's form."""

    error: Problem


class MessageProblem(AnswerObject):
    """Why a request below `/v1/messages` failed."""

    type: str
    message: str
    details: dict[str, str] | None = None  # the code for programs, where there is one


class MessageError(AnswerObject):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: MessageProblem
    request_id: str | None


class CachedTokens(AnswerObject):
    """How many of the prompt's tokens were found in the cache."""

    cached_tokens: int


class PromptUsage(AnswerObject):
    """The number of tokens of prompts that get no answer."""

    prompt_tokens: int
    total_tokens: int
    weights_version: str | None = None


class AnswerUsage(PromptUsage):
    """The number of tokens of prompts and answers."""

    completion_tokens: int
    prompt_tokens_details: CachedTokens
    resumed: int | None = None  # how often the answer went on at another replica, if it did


class CompletionLogprobs(AnswerObject):
    """The log-probabilities of a choice, in the form of completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AnyChoice(AnswerObject):
    """What all choices have."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class CompletionChoice(AnyChoice):
    """A continued text, or a piece of it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class AnswerHead(AnswerObject):
    """What all answers of completions and chats have."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | None = None


class Completion(AnswerHead):
    """The answer of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: AnswerUsage


class CompletionChunk(AnswerHead):
    """An event of it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: AnswerUsage | None = None


class CalledFunction(AnswerObject):
    """The function of a call, and its arguments as JSON, which may break off."""

    name: str
    arguments: str


class ChatCall(AnswerObject):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(AnswerObject):
    """What the assistant said."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChatCall] | None = None


class TopLogprob(AnswerObject):
    """A token that could have come, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that came."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerObject):
    """The log-probabilities of a choice, in the form of chats."""

    content: list[TokenLogprob]


class ChatChoice(AnyChoice):
    """One answer."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(AnswerHead):
    """The answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: AnswerUsage
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class FunctionDelta(AnswerObject):
    """A piece of a call's arguments; its first piece has the name."""

    name: str | None = None
    arguments: str


class CallPiece(AnswerObject):
    """A piece of a call; its first piece has the id."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatPiece(AnswerObject):
    """A piece of what the assistant says."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallPiece] | None = None


class ChunkChoice(AnyChoice):
    """A piece of one answer."""

    delta: ChatPiece
    logprobs: ChatLogprobs | None


class ChatChunk(AnswerHead):
    """An event of it."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: AnswerUsage | None = None


class ResponseItem(OpenObject):
    """Thoughts, a message or a call."""

    id: str
    type: Literal["reasoning", "message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseAnswer(OpenObject):
    """The answer of `/v1/responses`; it also says what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[ResponseItem]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class ResponseEvent(OpenObject):
    """An event of it; the first and the last have the response."""

    type: str
    sequence_number: int


class MessageUsage(AnswerObject):
    """The number of tokens of a message; those found in the cache are not among the input's own."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: dict[str, int]
    output_tokens_details: dict[str, int]
    service_tier: str
    resumed: int | None = None  # how often the message went on at another replica, if it did
    weights_version: str | None = None


class MessageAnswer(AnswerObject):
    """The answer of `/v1/messages`: blocks of text, of thoughts and of calls."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(OpenObject):
    """An event of it."""

    type: str


class MessageTokens(AnswerObject):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class TraceBegun(AnswerObject):
    """The answer of `/start_profile`."""

    num_steps: int
    folder: str


class TraceFile(AnswerObject):
    """The answer of `/stop_profile`."""

    path: str


class Paused(AnswerObject):
    """The answer of `/pause` and `/resume`."""

    paused: bool


class Asleep(AnswerObject):
    """The answer of `/sleep` and `/wake`, with the bytes of pages that were given back or allocated."""

    asleep: bool
    num_bytes: int


class WeightsPut(AnswerObject):
    """The answer of `/update_weights`."""

    weights_version: str
    system_fingerprint: str


class Embedding(AnswerObject):
    """The embedding of a text; base64 of float32, if that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(AnswerObject):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: PromptUsage


class TextScore(AnswerObject):
    """How well a pair of texts matches."""

    object: Literal["score"]
    index: int
    score: float


class TextScores(AnswerObject):
    """The answer of `/score`, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[TextScore]
    usage: PromptUsage


class RankedText(AnswerObject):
    """The text of a document."""

    text: str


class Ranked(AnswerObject):
    """A document, by its place in the request."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(AnswerObject):
    """The answer of `/rerank`, the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PromptUsage


class Health(AnswerObject):
    """Whether the engine runs."""

    status: str
    silent_s: float | None = None
    limit_s: float | None = None
    doing: str | None = None
    reason: str | None = None


class Readiness(AnswerObject):
    """Whether requests are taken."""

    status: str


class Versions(AnswerObject):
    """The versions of the server, Python and torch."""

    version: str
    python: str
    torch: str


class InfoAnswer(AnswerObject):
    """What should be noted beside a figure that was measured on this server."""

    model: str
    version: str
    recipe: dict[str, Any]
    machine: dict[str, Any]
    sampling_defaults: dict[str, Any]
    device: str | None
    num_slots: int | None
    num_pages: int | None
    page_size: int | None
    continuations: str | None  # servers with the same can continue each other's answers; null: none can
    weights_version: str
    paused: bool
    asleep: bool


class ServedModel(AnswerObject):
    """The model under one of its names, or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int | None = None


class ServedModels(AnswerObject):
    """All names."""

    object: Literal["list"]
    data: list[ServedModel]


class Aborted(AnswerObject):
    """How many answers of a request were ended."""

    id: str
    aborted: int


class Tokens(AnswerObject):
    """The tokens of a text."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None = None


class Detokenized(AnswerObject):
    """The text of tokens."""

    prompt: str


class TokenizerInfo(OpenObject):
    """What a remote tokenizer needs to know."""

    chat_template: str | list[dict[str, Any]] | None
    vocab_size: int


class ExpertsAnswer(AnswerObject):
    """How many tokens chose each expert of each layer."""

    counts: list[list[int]]
    num_chosen: int
    steps: int


class PastFigures(AnswerObject):
    """The figures of the last minutes."""

    every_s: float
    columns: list[str]
    samples: list[list[float | None]]
    num_slots: int
    cells: str


class FileObject(AnswerObject):
    """A file of requests, or of answers."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(AnswerObject):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(AnswerObject):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchCounts(AnswerObject):
    """How many requests a batch has, and how many have ended."""

    total: int
    completed: int
    failed: int


class BatchObject(AnswerObject):
    """A batch and its progress; times are in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: Literal["24h"]
    status: str
    errors: None
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    cancelling_at: int | None
    completed_at: int | None
    expired_at: int | None
    cancelled_at: int | None
    failed_at: int | None
    finalizing_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(AnswerObject):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True, slots=True)
class PathAnswer:
    """What a path answers: an object, or a text; and the events of a stream, where it has one."""

    model: type[AnswerObject] | None = None
    event: type[AnswerObject] | None = None
    media_type: str = "application/json"
    also: Mapping[int, type[AnswerObject]] = field(default_factory=dict)  # other good answers, by status
    error: type[AnswerObject] = ErrorAnswer


_TEXT = PathAnswer(media_type="text/plain")
_SCORES, _RANKING = PathAnswer(TextScores), PathAnswer(Ranking)
ANSWERS = {
    ("POST", "/v1/completions"): PathAnswer(Completion, CompletionChunk),
    ("POST", "/v1/chat/completions"): PathAnswer(ChatCompletion, ChatChunk),
    ("POST", "/v1/responses"): PathAnswer(ResponseAnswer, ResponseEvent),
    ("POST", "/v1/messages"): PathAnswer(MessageAnswer, MessageEvent, error=MessageError),
    ("POST", "/v1/messages/count_tokens"): PathAnswer(MessageTokens, error=MessageError),
    ("POST", "/v1/embeddings"): PathAnswer(Embeddings),
    **dict.fromkeys((("POST", "/score"), ("POST", "/v1/score")), _SCORES),
    **dict.fromkeys((("POST", "/rerank"), ("POST", "/v1/rerank"), ("POST", "/v2/rerank")), _RANKING),
    ("GET", "/health"): PathAnswer(Health, also={503: Health}),
    ("GET", "/ready"): PathAnswer(Readiness, also={503: Readiness}),
    ("GET", "/version"): PathAnswer(Versions),
    ("GET", "/server_info"): PathAnswer(InfoAnswer),
    ("GET", "/v1/models"): PathAnswer(ServedModels),
    ("GET", "/v1/models/{name}"): PathAnswer(ServedModel),
    ("POST", "/abort/{request_id}"): PathAnswer(Aborted),
    ("POST", "/v1/load_lora_adapter"): _TEXT,
    ("POST", "/v1/unload_lora_adapter"): _TEXT,
    ("POST", "/tokenize"): PathAnswer(Tokens),
    ("POST", "/detokenize"): PathAnswer(Detokenized),
    ("GET", "/tokenizer_info"): PathAnswer(TokenizerInfo),
    ("GET", "/metrics"): _TEXT,
    ("GET", "/experts"): PathAnswer(ExpertsAnswer),
    ("GET", "/history"): PathAnswer(PastFigures),
    ("POST", "/start_profile"): PathAnswer(TraceBegun),
    ("POST", "/stop_profile"): PathAnswer(TraceFile),
    ("POST", "/pause"): PathAnswer(Paused),
    ("POST", "/resume"): PathAnswer(Paused),
    ("POST", "/sleep"): PathAnswer(Asleep),
    ("POST", "/wake"): PathAnswer(Asleep),
    ("POST", "/update_weights"): PathAnswer(WeightsPut),
    ("POST", "/v1/files"): PathAnswer(FileObject),
    ("GET", "/v1/files"): PathAnswer(FileList),
    ("GET", "/v1/files/{file_id}"): PathAnswer(FileObject),
    ("GET", "/v1/files/{file_id}/content"): PathAnswer(media_type="application/jsonl"),
    ("DELETE", "/v1/files/{file_id}"): PathAnswer(DeletedFile),
    ("POST", "/v1/batches"): PathAnswer(BatchObject),
    ("GET", "/v1/batches"): PathAnswer(BatchList),
    ("GET", "/v1/batches/{batch_id}"): PathAnswer(BatchObject),
    ("POST", "/v1/batches/{batch_id}/cancel"): PathAnswer(BatchObject),
}
_UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                    "purpose": {"const": "batch"},
                },
                "required": ["file", "purpose"],
            }
        }
    },
}


class DescribedAPI(FastAPI):
    """An application whose description says what its paths answer."""

    def openapi(self) -> dict[str, Any]:
        """Return the description; it is made once."""
        if self.openapi_schema is None:
            described = super().openapi()
            models = set[type[AnswerObject]]()
            for path, operations in described["paths"].items():
                for method, operation in operations.items():
                    answer = ANSWERS[method.upper(), path]
                    operation["responses"] = _responses(answer)
                    models |= {
                        each for each in (answer.model, answer.event, answer.error) if each is not None
                    }
            if "/v1/files" in described["paths"]:
                described["paths"]["/v1/files"]["post"]["requestBody"] = _UPLOAD
            _add_schemas(described, models)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _responses(answer: PathAnswer) -> dict[str, Any]:
    content: dict[str, Any] = {answer.media_type: {"schema": _schema_of(answer.model)}}
    if answer.event is not None:
        events = {"contentMediaType": "text/event-stream", "contentSchema": _schema_of(answer.event)}
        content["text/event-stream"] = {"schema": {"type": "string", **events}}
    problem = {"application/json": {"schema": _schema_of(answer.error)}}
    found: dict[str, Any] = {
        "200": {"description": "The answer", "content": content},
        "400": {"description": "The request cannot be served as it is", "content": problem},
        "default": {"description": "Any other failure (docs/serving.md)", "content": problem},
    }
    for status, model in answer.also.items():
        said = {"application/json": {"schema": _schema_of(model)}}
        found[str(status)] = {"description": "Not now", "content": said}
    return found


def _schema_of(model: type[AnswerObject] | None) -> dict[str, str]:
    return {"type": "string"} if model is None else {"$ref": _REF.format(model=model.__name__)}


def _add_schemas(described: dict[str, Any], models: Collection[type[AnswerObject]]) -> None:
    """Add the models of answers, and leave out what FastAPI describes and the server never sends."""
    named = sorted(models, key=lambda each: each.__name__)
    _, made = models_json_schema([(each, "serialization") for each in named], ref_template=_REF)
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    schemas |= made["$defs"]
    for name in _FASTAPI_OWN:
        schemas.pop(name, None)
