"""Define a recipe's keys for how clients are served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from borders.field_table import MOST_LEASE_S
from recipes.schema.keys import key

_DAY_S = 86_400
ToolFormatName = Literal[
    "none",
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_v11",
    "deepseek",
    "deepseek_v31",
    "deepseek_v32",
    "kimi_k2",
    "glm45",
    "glm47",
    "qwen3_coder",
    "seed_oss",
    "minimax_m2",
    "hy_v3",
    "gemma4",
    "hunyuan_a13b",
    "longcat",
    "olmo3",
    "pythonic",
    "harmony",
]
ReasoningName = Literal["none", "think", "seed", "mistral", "gemma4", "hunyuan", "ernie", "harmony"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSection:
    """How clients are served; the command line gives the address and the name."""

    model_names: tuple[str, ...] = key(
        "further names that clients may call the model by, such as one that their programs have built in",
        default=(),
    )
    tool_format: ToolFormatName = key(
        "how the model writes that it calls tools (docs/tools.md); none: it was not trained to, and requests"
        " that let it are refused; harmony: beside `server.reasoning` alone; vLLM's names deepseek_v3 and"
        " openai are read as deepseek and harmony",
        default="none",
        elsewhere=(("deepseek_v3", "deepseek"), ("openai", "harmony")),
    )
    reasoning: ReasoningName = key(
        "how the model writes what it only thinks; think: from <think> to </think>, before the answer; seed,"
        " mistral and gemma4: between marks of their own; hunyuan and ernie: as think, with marks around the"
        " answer, too; harmony: on gpt-oss' channels, on which its calls are, too",
        default="none",
    )
    score_question: str | None = key(
        "what /score and /rerank ask the model about a pair: a user's message, in which {query} and"
        " {document} stand for the texts; null: they compare embeddings, if `model.pooling` says which",
        default=None,
    )
    score_system: str | None = key("the system message before it", default=None)
    score_answers: tuple[str, ...] = key(
        "two answers, of one token each: a score is the probability of the first, beside the second",
        default=("yes", "no"),
    )
    logits_processors: tuple[str, ...] = key(
        "classes of the operator's own, as MODULE:CLASS, which change the logits of requests that name them"
        " (docs/serving.md)",
        default=(),
    )
    profile: str | None = key(
        "a folder for traces of the engine's steps, which POST /start_profile and /stop_profile record; null:"
        " there are no such routes",
        default=None,
    )
    weights_root: Path | None = key(
        "checkpoints below this folder, and shared memory, may replace the weights while serving (POST"
        " /update_weights); also enables /pause, /resume, /sleep and /wake; null: there are no such routes",
        default=None,
    )
    pages_at: str | None = key(
        "where this engine computes prompts for others and sends them the pages, tcp://HOST:PORT, beside what"
        " it serves itself; null: nowhere",
        default=None,
    )
    prompt_replicas: tuple[str, ...] = key(
        "the `server.pages_at` of engines that may compute prompts for this one, which answers; a request"
        " names one in the header x-prompt-replica, as scripts.route does",
        default=(),
    )
    page_transport: Literal["tcp", "shared_memory", "mooncake"] = key(
        "prompt_replicas: how bytes of pages come; shared_memory: from engines on the same machine; mooncake:"
        " by Mooncake's transfer engine (docs/fleet.md), which both engines must name",
        default="tcp",
    )
    mooncake_host: str | None = key(
        "page_transport: the name or address at which the other engine's transfer engine reaches this"
        " machine; required where page_transport is mooncake",
        default=None,
    )
    mooncake_protocol: Literal["tcp", "rdma", "ascend"] = key(
        "how Mooncake's transfer engine writes; refused where the machine has no device for it",
        default="tcp",
    )
    page_window_mib: float = key(
        "prompt_replicas: host memory for each, for bytes of pages that have come and are not yet in their"
        " pages",
        default=64.0,
        least=0.001,
        most=2**20,
    )
    page_wait_s: float = key(
        "prompt_replicas: pages of a prompt that have not come after this long are computed here; as long"
        " are they held there",
        default=10.0,
        least=0.001,
        most=MOST_LEASE_S,
    )
    pages_key_file: Path | None = key(
        "pages_at, prompt_replicas: a file of a secret of at least 32 bytes, which engines that exchange"
        " pages prove to each other and never send; null: anyone who reaches the port may ask for pages",
        default=None,
    )
    pages_tls_certificate: Path | None = key(
        "pages_at, prompt_replicas: a PEM file of this engine's certificate, with which pages are encrypted;"
        " null: they are not",
        default=None,
    )
    pages_tls_private_key: Path | None = key(
        "a PEM file of its private key, without a password", default=None
    )
    pages_tls_authority: Path | None = key(
        "a PEM file of the authority that signed the certificates of all engines that exchange pages, and of"
        " nobody else",
        default=None,
    )
    pages_open: bool = key(
        "let pages_at and prompt_replicas have addresses beyond this machine without pages_key_file and"
        " pages_tls_certificate: for a network that nobody else reaches",
        default=False,
    )
    max_requests: int = key(
        "the most requests in the server at once, each sample counted; further ones are asked to try again"
        " later",
        default=1024,
        least=1,
        most=2**20,
    )
    max_body_mib: float = key(
        "the largest body of a request",
        default=2.0,
        least=0.001,
        most=1024,
    )
    max_bodies_mib: float = key(
        "the most of all bodies that are being received; further requests are asked to try again later",
        default=128.0,
        least=0.001,
        most=2**20,
    )
    max_body_values: int = key(
        "the most values in the JSON of a request, such as token ids, and the most tokens that /tokenize"
        " returns; a body with more is not decoded",
        default=300_000,
        least=64,
        most=2**30,
    )
    max_batch_file_mib: float = key(
        "the largest file of requests for a batch",
        default=64.0,
        least=0.001,
        most=1024,
    )
    max_batch_store_mib: int = key(
        "the most of all files, requests and answers of batches, on the disk; further files are refused",
        default=4096,
        least=1,
        most=2**20,
    )
    batch_requests: int | None = key(
        "the most samples of batches in the engine at once, and only in slots that nobody else asks for; a"
        " line with more than are free begins when no other line is in the engine; null: half of the slots",
        default=None,
        least=1,
        most=2**20,
    )
    max_logprobs_per_request: int = key(
        "the most log-probabilities that one request may ask for: tokens x (logprobs + 1), of all its prompts"
        " and samples; each takes about 130 bytes in the server until it is sent",
        default=2**20,
        least=1,
        most=2**32,
    )
    max_logprobs_in_flight: int = key(
        "the most that all requests in the server may ask for; further ones are asked to try again later",
        default=2**21,
        least=1,
        most=2**32,
    )
    text_threads: int = key(
        "threads that tokenize long prompts and conversations", default=2, least=1, most=256
    )
    max_unread_tokens: int = key(
        "the most tokens of an answer that a client may leave unread before the answer is cut off",
        default=4096,
        least=1,
        most=2**24,
    )
    keep_alive_s: float = key(
        "a stream sends a comment, which clients skip, whenever it has said nothing for this long, as while"
        " its request waits: proxies end connections that are silent; 0: none",
        default=15.0,
        least=0,
        most=_DAY_S,
    )
    resume: int = key(
        "how often an answer whose engine is lost goes on at another replica of the router, token for token"
        " (docs/fleet.md); 0: never, its client gets an error",
        default=3,
        least=0,
        most=64,
    )
    resume_max_tokens: int = key(
        "the most tokens of prompt and answer of such an answer; a longer one ends with an error",
        default=65_536,
        least=1,
        most=2**22,
    )
    share_prefixes: bool = key(
        "let clients with different API keys share pages; one could then find out, by timing, what others"
        " sent",
        default=False,
    )
    drain_s: float = key(
        "how long requests may go on after SIGTERM before they are cut off",
        default=30.0,
        least=0,
        most=_DAY_S,
    )
    step_timeout_s: float | None = key(
        "an engine that does not answer for this long is ended and started again; null: 5 times the longest"
        " silence so far (that of 5 minutes ago counts half), at least 5 s, and 20 s on an accelerator",
        default=None,
        least=1,
        most=_DAY_S,
    )
    spare_engine: bool = key(
        "keep a process (150 MiB) for each rank of this machine that has imported what an engine needs, so"
        " that a lost engine is replaced sooner",
        default=True,
    )
    start_timeout_s: float = key(
        "an engine that is not ready after this long is ended and started again",
        default=1800.0,
        least=1,
        most=_DAY_S,
    )

    @property
    def most_resumed(self) -> int:
        """How often an answer may go on at another replica; never where its weights may be replaced."""
        return 0 if self.weights_root is not None else self.resume

    @property
    def proves_pages(self) -> bool:
        """Whether engines that exchange pages with this one prove who they are."""
        return self.pages_key_file is not None or self.pages_tls_certificate is not None

    @property
    def pages_tls(self) -> tuple[Path, Path, Path] | None:
        """The files of certificate, private key and authority; None where pages are not encrypted."""
        certificate, key, authority = (
            self.pages_tls_certificate,
            self.pages_tls_private_key,
            self.pages_tls_authority,
        )
        return (certificate, key, authority) if certificate and key and authority else None
