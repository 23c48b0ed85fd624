"""Define the entries of a recording: all inputs and all decisions of an engine.

A recording is a file of MessagePack entries, each framed as a record by `framing`. It holds all inputs of the
scheduler, so that it can be run again, and its decisions, so that a difference shows. Arrays are
little-endian int32. Prompts are stored as token ids, so a recording is as private as its prompts.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from typing import IO, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from borders.field_types import LAST_ID
from borders.framing import CutShort, DamagedRecording, read_frames
from continuous_batching.batch import Batch, Candidates, Sampled
from continuous_batching.request import SamplingParams
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index
from kv_cache.tier.lookup import PageName

# Format 1 held page-table entries and at most one token for a row; 2 had no checksums, and 3 no drafts.
# Digests of format 4 left out the pages of windows and states, cuts, and the groups and keys of copies.
FORMAT = 5
BEGIN = zlib.crc32(b"recording of format %d" % FORMAT)  # initial value of the chained checksum


class Header(msgspec.Struct, tag="H", array_like=True, frozen=True):
    """The first entry; `facts` describe how the engine was built."""

    format: int
    facts: dict[str, Any]


class SampleEntry(msgspec.Struct, array_like=True, frozen=True):
    """One sample of a request."""

    id: str
    params: SamplingParams


class Added(msgspec.Struct, tag="A", array_like=True, frozen=True):
    """A request was accepted; the first of its samples is the leader."""

    samples: list[SampleEntry]
    prompt: bytes
    tenant: str
    cache_salt: str
    priority: Annotated[int, Meta(ge=-LAST_ID, le=LAST_ID)]
    arrival_s: float
    timeout_s: float | None = None
    adapter: Annotated[int, Meta(ge=0, le=LAST_ID)] = 0
    leases_pages: bool = False
    awaits_pages: bool = False  # it waits for the result of a lookup in the tier below
    known: bytes = b""  # the beginning of its answer, which another engine has sampled


class Fetched(msgspec.Struct, tag="T", array_like=True, frozen=True):
    """A lookup in the tier below ended: for which request, from which page, and how many pages it found.

    `beside` are the pages of other groups than 0 that it found, each as its group and its index.
    """

    id: str
    first: int
    count: int
    beside: list[PageName] = []


class Ended(msgspec.Struct, tag="E", array_like=True, frozen=True):
    """A request was ended from outside: its text was complete, its client had gone, or its time was over."""

    id: str
    reason: str
    now_s: float


class PagesExpected(msgspec.Struct, tag="X", array_like=True, frozen=True):
    """Pages were allocated for another engine to fill with those of a prompt's first tokens."""

    id: str  # id of the request that will need the pages
    tokens: bytes
    cache_salt: str


class PagesArrived(msgspec.Struct, tag="V", array_like=True, frozen=True):
    """The expected pages arrived whole and can be found, or were freed."""

    id: str
    is_whole: bool


class PagesReleased(msgspec.Struct, tag="F", array_like=True, frozen=True):
    """The lease on the pages of an ended request is over."""

    id: str


class Resized(msgspec.Struct, tag="R", array_like=True, frozen=True):
    """The page pools were resized; those of windows kept their size if there is no number for them."""

    num_pages: int
    give_up: str
    window_pages: list[int] = []


class Forgotten(msgspec.Struct, tag="P", array_like=True, frozen=True):
    """The prefix cache was emptied."""


LONGEST_QUESTION = 300  # characters of a topic or a name, so that an answer stays within a rank's line
Named = Annotated[str, Meta(max_length=LONGEST_QUESTION)]


class RanksAsked(msgspec.Struct, tag="Q", array_like=True, frozen=True):
    """The leader asks all ranks something; it changes nothing in a scheduler (see `agreement`)."""

    topic: Named
    name: Named
    body: bytes = b""


class RanksTold(msgspec.Struct, tag="W", array_like=True, frozen=True):
    """All ranks use what they have made ready for a question, or drop it; no scheduler changes by it."""

    topic: Named
    name: Named
    is_agreed: bool


class PagesMoved(msgspec.Struct, tag="M", array_like=True, frozen=True):
    """All ranks send the leader their parts of some pages of a layer, or receive theirs from it.

    The layer is counted over the whole model. No scheduler changes by it.
    """

    layer: Annotated[int, Meta(ge=0, le=LAST_ID)]
    pages: bytes
    to_leader: bool


class Copied(msgspec.Struct, array_like=True, frozen=True):
    """The page copies of one batch."""

    sources: bytes
    targets: bytes
    way: str
    group: Annotated[int, Meta(ge=0, le=LAST_ID)] = 0


def copied(batch: Batch) -> list[Copied]:
    """Return the entries of a batch's page copies."""
    return [Copied(packed(each.sources), packed(each.targets), each.way, each.group) for each in batch.copies]


class Scheduled(msgspec.Struct, tag="S", array_like=True, frozen=True):
    """A batch was made.

    Its spans are left out if every row of the batch before continues by one token, and its samples if every
    span yields one token, at its end and for its own row. A span with drafts has several samples, and a
    commit books as many of them as are accepted. Its drafts stand at the targets of all its samples but the
    last. Their tokens are recorded, so that a replay proposes nothing: here, or in the commit if the device
    proposed them. Rows were left out because their masks were late.
    """

    now_s: float
    digest: bytes  # digest of this batch and all batches before it
    spans: tuple[bytes, bytes, bytes] | None  # slots, starts, stops
    samples: tuple[bytes, bytes, bytes] | None  # sampled, owners, targets
    copies: list[Copied]
    held_back: str | None  # why the head of the queue was not admitted
    drafts: bytes | None = None  # the tokens of all drafts, span after span
    late: bytes = b""  # rows that were left out


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """The candidates of one beam: tokens, and log-probabilities as little-endian float32."""

    index: int  # index into the batch's sampled tokens
    tokens: bytes
    scores: bytes


class Looked(msgspec.Struct, tag="L", array_like=True, frozen=True):
    """Nothing was to be computed beside a batch in flight, or without rows that were late or preempted.

    A row is late where its mask is. A request may have been given a row.
    """

    now_s: float
    late: bytes = b""  # these rows


class Committed(msgspec.Struct, tag="C", array_like=True, frozen=True):
    """The device's answer, and when it came."""

    now_s: float
    tokens: bytes
    offers: list[Offer] = []
    drafts: bytes | None = None  # drafts that the device proposed, span after span


class Closed(msgspec.Struct, tag="Z", array_like=True, frozen=True):
    """The last entry: the recorder was closed in order, so that nothing is missing after it."""


Entry = (
    Header
    | Added
    | Fetched
    | Forgotten
    | RanksAsked
    | RanksTold
    | Ended
    | PagesExpected
    | PagesArrived
    | PagesReleased
    | PagesMoved
    | Resized
    | Scheduled
    | Looked
    | Committed
)


def read_entries(file: IO[bytes]) -> Iterator[Entry]:
    """Yield the entries of a recording, the header first, without the one that closes it.

    Raises DamagedRecording at the first record that differs from what was written, with its position, and
    CutShort if the file ends before the recording was closed: the engine was killed, the disk was full, or
    the rest is lost.
    """
    decoder = msgspec.msgpack.Decoder(Entry | Closed)
    entry: Entry | Closed | None = None
    for place, body in read_frames(file, BEGIN):
        if isinstance(entry, Closed):
            raise DamagedRecording(f"{place} stands behind the one that closes the recording")
        is_first = entry is None
        try:
            entry = decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
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
    """Encode an array of integers as little-endian int32."""
    return array.astype("<i4").tobytes()


def unpacked(data: bytes) -> Index:
    """Decode the integers that `packed` encoded."""
    return np.frombuffer(data, dtype="<i4").astype(np.int64)


def committed(sampled: Sampled, now_s: float) -> Committed:
    """Return the entry of a device's answer; log-probabilities decide nothing and are left out."""
    offers = [
        Offer(index, packed(each.tokens), each.scores.astype("<f4").tobytes())
        for index, each in sampled.candidates.items()
    ]
    drafts = packed(sampled.drafts) if len(sampled.drafts) else None
    return Committed(now_s, packed(sampled.tokens), offers, drafts)


def answered(entry: Committed) -> Sampled:
    """Return the device's answer from its entry."""
    candidates = {}
    for offer in entry.offers:
        scores = np.frombuffer(offer.scores, dtype="<f4").astype(np.float32)
        candidates[offer.index] = Candidates(unpacked(offer.tokens), scores, scores)
    drafts = unpacked(entry.drafts or b"")
    return Sampled(unpacked(entry.tokens), candidates=candidates, drafts=drafts)


class Chain:
    """A digest chained over all decisions so far: equal digests mean equal decisions."""

    def __init__(self) -> None:
        self._last = b""

    def add(self, batch: Batch, slots: SlotPool) -> bytes:
        """Return the digest after one more batch.

        It covers the spans, the page of each group of layers that each ends on, the samples, the positions
        where states are left behind, the copies, and what a draft model computes.
        """
        hashed = hashlib.blake2b(self._last, digest_size=8)
        rows, ends = batch.slots, (batch.stops - 1) // slots.page_size
        arrays: list[NDArray[Any]] = [
            rows,
            batch.starts,
            batch.stops,
            batch.sampled,
            batch.owners,
            batch.targets,
        ]
        arrays += [table[rows, ends] for table in (slots.page_table, *slots.window_tables)]
        arrays += [batch.draft_starts, batch.draft_stops]
        if slots.state_pages is not None:
            arrays.append(slots.state_pages[rows])
        for array in arrays:
            hashed.update(len(array).to_bytes(4, "little"))
            hashed.update(array.tobytes())
        for cut in batch.cuts:
            hashed.update(b"cut %d %d %d" % (cut.span, cut.position, cut.page))
        for copy in batch.copies:
            lengths = len(copy.sources), len(copy.targets), len(copy.keys)
            hashed.update(f"{copy.way} {copy.group} {lengths}".encode())
            hashed.update(copy.sources.tobytes())
            hashed.update(copy.targets.tobytes())
            hashed.update(b"".join(copy.keys))
        self._last = hashed.digest()
        return self._last
