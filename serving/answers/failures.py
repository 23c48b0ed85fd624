"""Why does a client not get its answer?

Each failure says whether to come again: not with the same request (`BadRequest`), after a while
(`Overloaded`, `Unavailable`, `ShutDown`), or as the client likes (`CutOff`).
"""

from __future__ import annotations


class Failure(Exception):
    """A reason in one line, fit for the client's eyes; `status` is HTTP's."""

    status = 500
    retry_after_s: float | None = None

    @property
    def reason(self) -> str:
        """The line."""
        return str(self)


class BadRequest(Failure):
    """It cannot be served as it is."""

    status = 400


class Overloaded(Failure):
    """Too much is in the server already."""

    status = 429

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unavailable(Failure):
    """The server is starting, draining, or without an engine."""

    status = 503

    def __init__(self, reason: str, retry_after_s: float = 5.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class CutOff(Failure):
    """The answer ended before its time; `cause` is for who counts: see `Observer.aborted`."""

    def __init__(self, reason: str, cause: str) -> None:
        super().__init__(reason)
        self.cause = cause


class ShutDown(CutOff):
    """The server ends before the answer does."""

    status = 503
    retry_after_s = 5.0

    def __init__(self) -> None:
        super().__init__("the server is shutting down", "shutdown")


class Gone(CutOff):
    """Its client went away before the answer began: nobody reads this but the log."""

    status = 499


class Failed(Failure):
    """This request alone failed, such as by logits that are not numbers."""
