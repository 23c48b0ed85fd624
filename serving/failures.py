"""Why does a client not get its answer, although its request was right?

Each failure says whether the client may send the request again: after a while (`Overloaded`, `Unavailable`,
`ShutDown`) or at once (`CutOff`). A request that is wrong itself is a `BadRequest`, which lies below all
rooms that check requests.
"""

from __future__ import annotations

UNKNOWN_S = 5.0  # after which a client may ask again, where nothing was measured


class Failure(Exception):
    """A reason in one line that a client may read; `status` is HTTP's."""

    status = 500
    code: str | None = None  # for programs, where the status does not say it all
    retry_after_s: float | None = None


class Overloaded(Failure):
    """Too many requests are in the server already."""

    status = 429

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unavailable(Failure):
    """The server is starting, draining, or without an engine."""

    status = 503

    def __init__(self, reason: str, retry_after_s: float = UNKNOWN_S) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class CutOff(Failure):
    """The answer ended before its time, because of who asked for it: a client that sends it again by itself,
    as OpenAI's do after 408, 409, 429 and every 5xx, would undo that. `cause` is the label in the metrics:
    see `ServerStats.aborted`.
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


class ClientGone(CutOff):
    """The client went away before the answer began: only the log shows this."""


class RequestFailed(Failure):
    """This request alone failed, for example because its logits were not finite."""
