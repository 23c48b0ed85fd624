"""Give an engine's leader the pages of all ranks, as one rank would hold them.

What goes to another engine, and what comes from it, are pages of the whole model: engines of any numbers of
ranks understand each other, and only the leaders of two engines talk. Within an engine, each rank copies the
heads, layers and tokens of a page that it holds to its host's memory, and sends them to the leader; or
receives them from it. Where ranks divide the tokens of a page, parts lie in the order of tokens on their way.
The leader says by an entry of the recording which pages of which layer, so that all ranks read or write them
between the same two steps; and what is recorded after it, such as that a prompt's pages are whole, is true on
all ranks.

Bytes between ranks go from host to host over a process group of their own, in threads, in the order of the
entries. A rank that is lost ends its engine, as in any step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Queue
from typing import Annotated, Protocol

import msgspec
import numpy as np
import torch
from msgspec import Meta

from kv_cache.device.storage import Bytes, KVCache, layout_of
from kv_cache.exchange.shares import MOST_HEADS, Held, Piece, RankShare, layers_of, sent_by, sent_to
from kv_cache.pages import Index, PageCopy

MOST_QUEUED = 16  # parts that wait for another rank to take them

log = logging.getLogger(__name__)


class WholePages(Protocol):
    """Pages of a whole model: those of a cache, or of all ranks' caches."""

    @property
    def layout(self) -> list[str]:
        """The layout of a page in each layer."""
        ...

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of a page in each layer."""
        ...

    @property
    def are_states(self) -> list[bool]:
        """Whether a page of each layer is the whole state of a request."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be written that nothing more is to be."""
        ...

    def read_layer(self, layer: int, pages: Index) -> Callable[[], Bytes]:
        """Start to copy some pages of a layer to the host; the function returned waits for the bytes."""
        ...

    def write_layer(self, layer: int, pages: Index, data: Bytes) -> None:
        """Write bytes, as `read_layer` returns them, to some pages of a layer."""
        ...

    def apply(self, copies: Sequence[PageCopy]) -> None:
        """Make page copies, one after the other."""
        ...


class RankLinks(Protocol):
    """Sends tensors of the host's memory between ranks, of which this is number `rank`."""

    rank: int

    def send(self, x: torch.Tensor, rank: int) -> None:
        """Send `x` to another rank, and wait until it has it."""
        ...

    def receive(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """Receive into `x` what another rank has sent."""
        ...


class MovesPages(Protocol):
    """Tells the other ranks to move pages, as an engine's observer does."""

    def moved(self, layer: int, pages: Index, to_leader: bool) -> None:
        """All ranks send the leader their parts of some pages of a layer, or receive them from it."""
        ...


class HeldLayer(msgspec.Struct, frozen=True, array_like=True):
    """A layer on one rank: the layout of a page with all heads, and how each plane of it divides into heads.

    A page is some runs, in each of which the heads lie one after the other, with so many bytes each. Where
    ranks divide the tokens of a page, the runs are these.
    """

    layout: Annotated[str, Meta(max_length=2**12)]
    planes: Annotated[tuple[tuple[int, int], ...], Meta(min_length=1, max_length=2**6)]  # runs, bytes a head
    num_heads: Annotated[int, Meta(ge=1, le=MOST_HEADS)]  # The heads of all ranks count.
    holds_state: bool = False


class RankHolds(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds, in the order of its cache."""

    share: RankShare
    layers: tuple[HeldLayer, ...]


def held_by(
    cache: KVCache, share: RankShare, num_heads: Sequence[int], state: HeldLayer | None = None
) -> RankHolds:
    """Describe a rank's cache; each layer has `num_heads` on all ranks together.

    Layers that keep a recurrent state are as `state` says, whose planes may divide in several ways.
    """
    layers = []
    for layer, (piece, heads) in enumerate(zip(layers_of(share), num_heads)):
        if cache.layers[layer].holds_state:
            assert state is not None, f"layer {layer} keeps a state"
            layers.append(state)
            continue
        own, made = piece.stop_head - piece.first_head, cache.layers[layer]
        shapes, planes = [], []
        for plane in cache.of(layer):
            shape = [*plane.shape[1:]]
            page_bytes = plane.element_size() * int(np.prod(shape))
            runs = made.runs_of(plane) if heads > 1 else 1
            if piece.turns > 1:
                runs = shape[0]
                shape[0] *= piece.turns
            planes.append((runs * piece.turns, page_bytes // runs // own))
            if heads > 1:
                shape[made.head_axis - 1] = shape[made.head_axis - 1] * heads // own
            shapes.append((plane.dtype, shape))
        order = made.order if made.order is None else made.order.resized(shapes[0][1][0], heads)
        layers.append(HeldLayer(layout_of(shapes, order), tuple(planes), heads))
    return RankHolds(share, tuple(layers))


class RankPages:
    """This rank's part of the pages of all ranks, of which it knows what each `holds`.

    The leader's has the methods of `WholePages`, and `moves` tells the others; these call `move`. `later`
    does something to the leader's cache once the batches that have been started are computed.
    """

    def __init__(
        self,
        cache: KVCache,
        links: RankLinks,
        holds: Sequence[RankHolds],
        later: Callable[[Callable[[], None]], None] = lambda action: action(),
    ) -> None:
        self.moves: MovesPages | None = None
        self._later = later
        self._cache, self._links = cache, links
        shares = tuple(each.share for each in holds)
        found = {
            piece.layer: layer for each in holds for piece, layer in zip(layers_of(each.share), each.layers)
        }
        self._layers = [found[layer] for layer in sorted(found)]
        whole = tuple(Held(at, at + 1, 0, layer.num_heads) for at, layer in enumerate(self._layers))
        self._sources = _by_layer(sent_to(0, (whole,), shares), len(whole))
        self._targets = _by_layer(sent_by(0, (whole,), shares), len(whole))
        self._order = cache.layers[0].order
        self._own = {piece.layer: (at, piece) for at, piece in enumerate(layers_of(shares[links.rank]))}
        # The leader's thread computes the batches that its own jobs wait for, and must not wait for these:
        # what it reads is bounded by what its links have not sent, what it writes by `is_behind`
        most = MOST_QUEUED if links.rank else 0
        self._reads, self._writes = _InOrder("pages-to-leader", most), _InOrder("pages-to-ranks", most)

    def close(self) -> None:
        """Let the threads end behind what they do now."""
        self._reads.close()
        self._writes.close()

    @property
    def layout(self) -> list[str]:
        """See `WholePages.layout`."""
        return [each.layout for each in self._layers]

    @property
    def layer_bytes(self) -> list[int]:
        """See `WholePages.layer_bytes`."""
        return [sum(runs * width for runs, width in each.planes) * each.num_heads for each in self._layers]

    @property
    def are_states(self) -> list[bool]:
        """See `WholePages.are_states`."""
        return [each.holds_state for each in self._layers]

    @property
    def is_behind(self) -> bool:
        """See `WholePages.is_behind`."""
        return self._writes.num_queued >= MOST_QUEUED

    def apply(self, copies: Sequence[PageCopy]) -> None:
        """See `WholePages.apply`; the other ranks make the same copies by themselves."""
        self._later(partial(self._cache.apply, copies))

    def read_layer(self, layer: int, pages: Index) -> Callable[[], Bytes]:
        """See `WholePages.read_layer`."""
        assert self.moves is not None, "the leader reads"
        sources = self._sources[layer]
        own = {rank: self._read_later(layer, pages, piece) for rank, piece in sources if rank == 0}
        if len(own) == len(sources) == 1:
            return own[0]
        self.moves.moved(layer, pages, True)
        came = Future[Bytes]()
        self._reads.do(partial(self._gather, layer, len(pages), own, came))
        return came.result

    def write_layer(self, layer: int, pages: Index, data: Bytes) -> None:
        """See `WholePages.write_layer`."""
        assert self.moves is not None, "the leader writes"
        targets = self._targets[layer]
        if any(rank for rank, _ in targets):
            self.moves.moved(layer, pages, False)
        data = self._ordered(layer, len(pages), data, None, by_token=True)
        for rank, piece in targets:
            part = self._cut(layer, len(pages), data, piece)
            if rank:
                self._writes.do(partial(self._links.send, torch.from_numpy(part), rank))
            else:
                self._later(partial(self._write, layer, pages, part, piece))

    def move(self, layer: int, pages: Index, to_leader: bool) -> None:
        """Send the leader this rank's part of some pages of a layer, or receive it from there.

        A part that is received is written when this returns; sending is only begun. Raises ValueError for a
        layer that the model does not have, or pages that this rank does not have.
        """
        rank = self._links.rank
        self._check(layer, pages)
        for _, piece in [each for each in self._parts(layer, to_leader=to_leader) if each[0] == rank]:
            if to_leader:
                self._reads.do(partial(self._send, self._read(layer, pages, piece)))
            else:
                part = self._received(layer, len(pages), piece, 0)
                self._write(layer, pages, part, piece)

    def _check(self, layer: int, pages: Index) -> None:
        if layer >= len(self._layers):
            raise ValueError(f"the leader moves pages of layer {layer}, and there are {len(self._layers)}")
        if layer not in self._own:
            return
        there = len(self._cache.of(self._own[layer][0])[0])
        if len(pages) > there or (len(pages) and not 0 <= pages.min() <= pages.max() < there):
            raise ValueError(
                f"the leader moves {len(pages)} pages of layer {layer} that are not among {there}"
            )

    def _send(self, wait: Callable[[], Bytes]) -> None:
        self._links.send(torch.from_numpy(wait()), 0)

    def _parts(self, layer: int, *, to_leader: bool) -> list[tuple[int, Piece]]:
        return (self._sources if to_leader else self._targets)[layer]

    def _gather(
        self, layer: int, count: int, own: dict[int, Callable[[], Bytes]], came: Future[Bytes]
    ) -> None:
        """Put the parts of all ranks together."""
        try:
            data = np.empty(count * self.layer_bytes[layer], dtype=np.uint8)
            for rank, piece in self._sources[layer]:
                part = self._received(layer, count, piece, rank) if rank else own[0]()
                parts = self._planes(layer, count, part, piece)
                for whole, cut in zip(self._planes(layer, count, data), parts):
                    whole[piece_of_page(piece)] = cut
            came.set_result(self._ordered(layer, count, data, None, by_token=False))
        # torch.distributed raises RuntimeError: a rank is lost, and its engine with it
        except (RuntimeError, MemoryError) as error:
            came.set_exception(ConnectionError(f"a rank did not send its part: {error}"))

    def _cut(self, layer: int, count: int, data: Bytes, piece: Piece) -> Bytes:
        planes = self._planes(layer, count, data)
        return np.concatenate([each[piece_of_page(piece)].reshape(-1) for each in planes])

    def _planes(self, layer: int, count: int, data: Bytes, piece: Piece | None = None) -> list[Bytes]:
        """Return views [pages, runs, heads, bytes] of each plane of a layer; None: the whole of it."""
        held, at, views = self._layers[layer], 0, []
        assert count == 1 or not held.holds_state, "the planes of several states lie one after the other"
        num_heads = held.num_heads if piece is None else piece.stop_head - piece.first_head
        for runs, width in held.planes:
            own_runs = runs if piece is None else runs // piece.turns
            stop = at + count * own_runs * num_heads * width
            views.append(data[at:stop].reshape(count, own_runs, num_heads, width))
            at = stop
        assert at == len(data), f"{len(data)} bytes are not those of {count} pages"
        return views

    def _ordered(self, layer: int, count: int, data: Bytes, piece: Piece | None, *, by_token: bool) -> Bytes:
        """Return pages of a layer, or a piece of them, in the order of tokens, or back in attention's own.

        They stay as they are where both are the same, or no ranks divide the tokens of a page.
        """
        if self._order is None or self._sources[layer][0][1].turns == 1:
            return data
        found = []
        for number, plane in enumerate(self._planes(layer, count, data, piece)):
            order = self._order.resized(*plane.shape[1:3])
            pages = torch.from_numpy(plane).view(order.dtype)
            moved = order.by_token(pages, number) if by_token else order.from_tokens(pages, number)
            found.append(moved.contiguous().view(-1).view(torch.uint8).numpy())
        return np.concatenate(found)

    def _received(self, layer: int, count: int, piece: Piece, rank: int) -> Bytes:
        runs_bytes = sum(runs // piece.turns * width for runs, width in self._layers[layer].planes)
        part = np.empty(count * (piece.stop_head - piece.first_head) * runs_bytes, dtype=np.uint8)
        self._links.receive(torch.from_numpy(part), rank)
        return part

    def _read_later(self, layer: int, pages: Index, piece: Piece) -> Callable[[], Bytes]:
        begun = Future[Callable[[], Bytes]]()
        self._later(lambda: begun.set_result(self._read(layer, pages, piece)))
        return lambda: begun.result()()

    def _read(self, layer: int, pages: Index, piece: Piece) -> Callable[[], Bytes]:
        own, held = self._own[layer]
        wait = self._cache.read_layer(own, pages, _within(held, piece))
        return lambda: self._ordered(layer, len(pages), wait(), piece, by_token=True)

    def _write(self, layer: int, pages: Index, data: Bytes, piece: Piece) -> None:
        own, held = self._own[layer]
        data = self._ordered(layer, len(pages), data, piece, by_token=False)
        self._cache.write_layer(own, pages, data, _within(held, piece))


def piece_of_page(piece: Piece) -> tuple[slice, slice, slice]:
    """Return what a piece is of [pages, runs, heads, bytes]; runs are tokens where ranks divide these."""
    return slice(None), slice(piece.turn, None, piece.turns), slice(piece.first_head, piece.stop_head)


def _within(held: Piece, piece: Piece) -> range:
    """Return the numbers on this rank of a piece's heads."""
    assert (held.turn, held.turns) == (piece.turn, piece.turns), "a rank moves all tokens that it holds"
    return range(piece.first_head - held.first_head, piece.stop_head - held.first_head)


def _by_layer(pieces: Sequence[Sequence[Piece]], num_layers: int) -> list[list[tuple[int, Piece]]]:
    """Return, for each layer, the ranks that send or receive some of it, and which."""
    found: list[list[tuple[int, Piece]]] = [[] for _ in range(num_layers)]
    for rank, of_rank in enumerate(pieces):
        for piece in of_rank:
            found[piece.layer].append((rank, piece))
    return found


class _InOrder:
    """Does what is queued in a thread, in order; whoever queues waits while `most` jobs are, if not 0."""

    def __init__(self, name: str, most: int) -> None:
        self._queue = Queue[Callable[[], object] | None](most)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._has_begun = False

    @property
    def num_queued(self) -> int:
        return self._queue.qsize()

    def do(self, job: Callable[[], object]) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()
        self._queue.put(job)

    def close(self) -> None:
        if self._has_begun:
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job()
            # torch.distributed raises RuntimeError; what follows fails as well
            except (RuntimeError, MemoryError) as error:
                log.error("pages of a rank: %s", error)
