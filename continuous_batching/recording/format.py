"""What does a recording of an engine hold?

A file of MessagePack entries, each a record as `framing` keeps it. It holds all inputs of the scheduler, so
that it can be run again, and its decisions, so that a difference shows. Arrays are little-endian int32.
A prompt is there as token ids, so a recording is as private as its prompts.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch, Candidates, Sampled
from continuous_batching.recording.framing import CutShort, DamagedRecording, read_frames
from continuous_batching.request import SamplingParams
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index

FORMAT = 4  # 1 held page-table entries, and one token at most for a row; 2 had no checksums, 3 no drafts
BEGIN = zlib.crc32(b"recording of format %d" % FORMAT)  # what the first record's checksum goes on from


class Header(msgspec.Struct, tag="H", array_like=True, frozen=True):
    """The first entry; `facts` say what the engine was made of, in the words of the recorder's owner."""

    format: int
    facts: dict[str, Any]


class SampleEntry(msgspec.Struct, array_like=True, frozen=True):
    """One of the samples of a request."""

    id: str
    params: SamplingParams


class Added(msgspec.Struct, tag="A", array_like=True, frozen=True):
    """A request was accepted; the first of its samples leads."""

    samples: list[SampleEntry]
    prompt: bytes
    tenant: str
    cache_salt: str
    priority: int
    arrival_s: float
    timeout_s: float | None = None
    adapter: int = 0
    leases_pages: bool = False
    awaits_pages: bool = False  # it waits for what a lookup in the tier below finds


class Fetched(msgspec.Struct, tag="T", array_like=True, frozen=True):
    """A lookup in the tier below has ended, for whom it was, and how many pages it found from which on."""

    id: str
    first: int
    count: int


class Ended(msgspec.Struct, tag="E", array_like=True, frozen=True):
    """A request was ended from outside: its text was complete, or nobody waited for it."""

    id: str
    reason: str
    now_s: float


class PagesExpected(msgspec.Struct, tag="X", array_like=True, frozen=True):
    """Pages were taken that another engine is to fill with those of a prompt's first tokens."""

    id: str  # of the request that will need them
    tokens: bytes
    cache_salt: str


class PagesArrived(msgspec.Struct, tag="V", array_like=True, frozen=True):
    """They came whole, and can be found; or they are free again."""

    id: str
    is_whole: bool


class PagesReleased(msgspec.Struct, tag="F", array_like=True, frozen=True):
    """The pages of a request that had ended are held no longer."""

    id: str


class Resized(msgspec.Struct, tag="R", array_like=True, frozen=True):
    """The pool got another number of pages."""

    num_pages: int
    give_up: str


class Forgotten(msgspec.Struct, tag="P", array_like=True, frozen=True):
    """No page can be found any more."""


class Copied(msgspec.Struct, array_like=True, frozen=True):
    """Page copies of one batch."""

    sources: bytes
    targets: bytes
    way: str


class Scheduled(msgspec.Struct, tag="S", array_like=True, frozen=True):
    """A batch was made. Its spans are left out where every row of the batch before goes on by one token,
    its samples where every span yields one token, at its end and for its own row. Where a span has drafts,
    it has several samples, and a commit books as many of them as turn out right. Its drafts stand at the
    targets of all its samples but the last; their tokens are recorded, so that a replay proposes nothing:
    here, or in what is committed where the device made them.
    """

    now_s: float
    digest: bytes  # of this and all batches before
    spans: tuple[bytes, bytes, bytes] | None  # slots, starts, stops
    samples: tuple[bytes, bytes, bytes] | None  # sampled, owners, targets
    copies: list[Copied]
    held_back: str | None  # why the head of the queue was not admitted
    drafts: bytes | None = None  # the tokens of all drafts, span after span


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """The candidates of one beam: tokens, and little-endian float32 log-probabilities."""

    index: int  # into the batch's sampled tokens
    tokens: bytes
    scores: bytes


class Looked(msgspec.Struct, tag="L", array_like=True, frozen=True):
    """With a batch in flight, nothing more was to be computed yet; a request may have got its row."""

    now_s: float


class Committed(msgspec.Struct, tag="C", array_like=True, frozen=True):
    """What the device answered, and when."""

    now_s: float
    tokens: bytes
    offers: list[Offer] = []
    drafts: bytes | None = None  # that the device made, span after span


class Closed(msgspec.Struct, tag="Z", array_like=True, frozen=True):
    """The last entry: the recorder was closed in order, so nothing is missing behind it."""


Entry = (
    Header
    | Added
    | Fetched
    | Forgotten
    | Ended
    | PagesExpected
    | PagesArrived
    | PagesReleased
    | Resized
    | Scheduled
    | Looked
    | Committed
)


def read_entries(file: IO[bytes]) -> Iterator[Entry]:
    """The entries of a recording, the header first, without the one that closes it.

    Raises DamagedRecording at the first record that is not as it was written, with its place, and CutShort
    where the file ends before it was closed: the engine was killed, the disk was full, or the rest is lost.
    """
    decoder = msgspec.msgpack.Decoder(Entry | Closed)
    entry: Entry | Closed | None = None
    for place, body in read_frames(file, BEGIN):
        if isinstance(entry, Closed):
            raise DamagedRecording(f"{place} stands behind the one that closes the recording")
        is_first = entry is None
        try:
            entry = decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise DamagedRecording(f"{place} is no entry of a recording: {error}") from error
        if is_first != isinstance(entry, Header):
            raise DamagedRecording(f"{place} is out of place: a recording starts with its header")
        if isinstance(entry, Header) and entry.format != FORMAT:
            raise DamagedRecording(f"this is format {entry.format}; format {FORMAT} can be read")
        if not isinstance(entry, Closed):
            yield entry
    if entry is not None and not isinstance(entry, Closed):
        raise CutShort(f"it was never closed: its engine was killed, or what follows {place} is lost")


def packed(array: NDArray[np.integer]) -> bytes:
    """An array of integers as the bytes that stand for it."""
    return array.astype("<i4").tobytes()


def unpacked(data: bytes) -> Index:
    """The integers that `packed` made bytes of."""
    return np.frombuffer(data, dtype="<i4").astype(np.int64)


def committed(sampled: Sampled, now_s: float) -> Committed:
    """The entry of what the device answered; log-probabilities decide nothing, and are left out."""
    offers = [
        Offer(index, packed(each.tokens), each.scores.astype("<f4").tobytes())
        for index, each in sampled.candidates.items()
    ]
    drafts = packed(sampled.drafts) if len(sampled.drafts) else None
    return Committed(now_s, packed(sampled.tokens), offers, drafts)


def answered(entry: Committed) -> Sampled:
    """What the device answered, from its entry."""
    candidates = {}
    for offer in entry.offers:
        scores = np.frombuffer(offer.scores, dtype="<f4").astype(np.float32)
        candidates[offer.index] = Candidates(unpacked(offer.tokens), scores, scores)
    drafts = unpacked(entry.drafts or b"")
    return Sampled(unpacked(entry.tokens), candidates=candidates, drafts=drafts)


class Chain:
    """A digest of all decisions so far: equal digests, equal decisions."""

    def __init__(self) -> None:
        self._last = b""

    def add(self, batch: Batch, slots: SlotPool) -> bytes:
        """The digest after one more batch: its spans, the page that each ends on, its samples, its copies,
        and what a draft model computes, if there is one."""
        hashed = hashlib.blake2b(self._last, digest_size=8)
        pages = slots.page_table[batch.slots, (batch.stops - 1) // slots.page_size]
        spans = batch.slots, batch.starts, batch.stops, pages
        for array in (*spans, batch.sampled, batch.owners, batch.targets):
            hashed.update(len(array).to_bytes(4, "little"))
            hashed.update(array.tobytes())
        if len(batch.draft_starts):
            hashed.update(batch.draft_starts.tobytes())
            hashed.update(batch.draft_stops.tobytes())
        for copy in batch.copies:
            hashed.update(copy.way.encode())
            hashed.update(copy.sources.tobytes())
            hashed.update(copy.targets.tobytes())
        self._last = hashed.digest()
        return self._last
