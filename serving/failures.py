"""Define the reasons why a client gets no answer although its request was right.

Each failure says whether the client may send the request again: after a while (`Overloaded`, `Unavailable`,
`ShutDown`) or at once (`CutOff`). A request that is itself wrong is a `BadRequest`, which is defined below
all packages that check requests.
"""

from __future__ import annotations

UNKNOWN_S = 5.0  # delay after which a client may ask again, where nothing was measured


class Failure(Exception):
    """A reason in one line that a client may read; `status` is the HTTP status."""

    status = 500
    code: str | None = None  # a code for programs, where the status alone is ambiguous
    retry_after_s: float | None = None


class Overloaded(Failure):
    """Too many requests are in the server already."""

    status = 429

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class PartlyOverloaded(Overloaded):
    """Some prompts of the request waited too long for the engine, perhaps because of its other prompts."""


class Unavailable(Failure):
    """The server is starting, draining, or without an engine."""

    status = 503

    def __init__(self, reason: str, retry_after_s: float = UNKNOWN_S) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class EngineEnded(Unavailable):
    """The engine ended while it had the request, which may be the cause.

    By the code a router counts it as a loss, where another 503 says that the request may come again.
    """

    code = "engine_lost"


class CutOff(Failure):
    """The answer was ended early because of the client itself, by an abort, a disconnect or slow reading.

    The status keeps clients from sending the request again automatically, as OpenAI's do after 408, 409, 429
    and every 5xx. `cause` is the label in the metrics (see `ServerStats.aborted`).
    """

    status = 499
    code: str | None = "aborted"

    def __init__(self, reason: str, cause: str) -> None:
        super().__init__(reason)
        self.cause = cause


class ShutDown(CutOff):
    """The server ends before the answer does."""

    status = 503
    code = None
    retry_after_s = UNKNOWN_S

    def __init__(self) -> None:
        super().__init__("the server is shutting down", "shutdown")


class SetAside(CutOff):
    """The answer was ended early because of an operator's order; the same request may be sent again."""

    status = 503
    code = None
    retry_after_s = UNKNOWN_S

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "order")


class ClientGone(CutOff):
    """The client disconnected before the answer began; only the log shows this."""


class RequestFailed(Failure):
    """This request alone failed, for example because its logits were not finite."""
