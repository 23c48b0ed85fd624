"""Let the ranks of an engine join the rank that leads: where it listens, and whom it believes.

What torch.distributed exchanges has no key, so its store listens at one address, which only the machines of
the engine should reach. The connections over which ranks follow the leader's recording have one: the leader
puts a new secret into the store, and each rank proves that it has read it there. A connection that proves
nothing ends alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue

from borders.addresses import is_loopback
from borders.numbers import integers
from borders.refusal import one_line
from borders.shared_secret import Receive, prove_as_listener, within
from continuous_batching.recording.listeners import RankLost
from recipes.cluster.cluster import HERE, Cluster, is_here, own_address
from recipes.schema.parallel_section import ALL_ADDRESSES, MOST_RANKS
from recipes.schema.recipe_error import RecipeError

PROOF_S = 5.0  # time for a connection to prove the secret and to say which rank it is
MOST_UNPROVEN = 64  # connections that have not yet; further ones wait
_LONGEST_LINE = 2000  # most bytes of the line by which a rank joins
_LOG_S = 1.0  # interval between two log lines about connections that prove nothing
_RANKS = integers(1, MOST_RANKS - 1)
_SIOCGIFADDR = 0x8915  # the IPv4 address of an interface, netdevice(7)

log = logging.getLogger(__name__)


def leader_address(cluster: Cluster, interface: str | None) -> str:
    """Return the address at which the leader listens, "" for all; raises RecipeError.

    Without an interface that is the address by which the other machines find it. A name that means this
    machine's loopback, as /etc/hosts may say, stands for the address from which others see it send.
    """
    if is_loopback(cluster.leader):
        return HERE if cluster.leader == "localhost" else cluster.leader
    if interface == ALL_ADDRESSES:
        return ""
    if interface is not None:
        return _address_as_found(interface, cluster.leader)
    with suppress(OSError):  # the name means nothing here, though it may to others
        found = {str(each[4][0]) for each in socket.getaddrinfo(cluster.leader, None, socket.AF_INET)}
        own = own_address()
        for address in sorted(own if is_loopback(each) else each for each in found):
            if not is_loopback(address) and is_here(address):
                return address
    raise RecipeError(
        ("parallel.interface", "parallel.nodes"),
        f"the other machines find the first one at {cluster.leader}, which is no address of it",
        f"set parallel.interface to the interface that they reach, such as eth0, or to {ALL_ADDRESSES} where"
        " nobody else reaches any",
    )


def address_of_recording(address: str, leader: str) -> str:
    """Return where the leader, which listens at an address or with "" at all, is to be found by the ranks.

    Without an address of its own that is where they have found the leader, unless that is an address which is
    not here, such as a Kubernetes service's: it forwards the ports that were declared, and no other.
    """
    if address:
        return address
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(leader, None, socket.AF_INET)}
    except OSError:
        return leader
    return leader if any(is_loopback(each) or is_here(each) for each in found) else own_address()


def _address_as_found(interface: str, leader: str) -> str:
    """Return the interface's address; raises RecipeError where the others dial another one of this machine.

    A name, and an address that is not here, may lead to it all the same.
    """
    address = address_of(interface)
    if leader != address and is_here(leader):
        raise RecipeError(
            "parallel.interface",
            f"{interface} is {address}, and the other machines find the first one at {leader}, which is"
            " another interface's",
            f"let them find it at {address}, or name the interface that has {leader}",
            value=interface,
        )
    return address


def address_by(interface: str | None) -> str:
    """Return the address under which others find this machine, by the interface that a recipe names."""
    return own_address() if interface is None else address_of(interface)


def tell_libraries(interface: str | None) -> None:
    """Let gloo, NCCL and HCCL use the interface that the recipe names, unless the user says otherwise."""
    if interface not in (None, ALL_ADDRESSES):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", str(interface))
        for name in ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, f"={interface}")  # they take every one that begins so if = is absent


def interface_to(leader: str) -> str | None:
    """Return this machine's interface from which it sends to the leader, None where that is not found.

    On the leader itself that is the interface with its address, whatever its own /etc/hosts says.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((leader, 9))  # this sends nothing; the system only chooses an address
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    if is_loopback(address):
        address = own_address()
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if _ipv4_of(name) == address), None)


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface of this machine; raises RecipeError."""
    address = _ipv4_of(interface)
    if address is None:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise RecipeError(
            "parallel.interface",
            f"{interface} has no IPv4 address here",
            f"this machine has {names}",
            value=interface,
        )
    return address


def _ipv4_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, asked)[20:24])
        except OSError:
            return None


def bound(address: str, port: int) -> socket.socket:
    """Return a socket that listens there; raises OSError that says how to find another port."""
    try:
        return socket.create_server((address, port))
    except OSError as error:
        if not port:
            raise
        raise RankLost(
            f"port {port}, at which the ranks of other machines join, cannot be used"
            f" ({error.strerror or error}); end what uses it, or set MASTER_PORT to another on all machines"
        ) from error


class Joining:
    """Accepts the ranks that prove the secret, each by its number, name and connection.

    `close` ends what has not proved it by then; what `next` has returned is its caller's.
    """

    def __init__(self, server: socket.socket, secret: bytes) -> None:
        self._server, self._secret = server, secret
        self._came = SimpleQueue[tuple[int, str, socket.socket] | RankLost]()
        self._has_place = threading.Semaphore(MOST_UNPROVEN)
        self._unproven = set[socket.socket]()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._log_at_s = 0.0
        self._thread = threading.Thread(target=self._accept, name="ranks-join", daemon=True)
        self._thread.start()

    def next(self, within_s: float) -> tuple[int, str, socket.socket] | None:
        """Return the next rank, None if none comes in time; raises RankLost for one that cannot join."""
        try:
            came = self._came.get(timeout=within_s)
        except Empty:
            return None
        if isinstance(came, RankLost):
            raise came
        return came

    def close(self) -> None:
        """Accept no more ranks, and end those that nobody has taken."""
        with self._lock:
            self._closed.set()
            ending = [*self._unproven]
        for each in (self._server, *ending):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with suppress(Empty):
            while True:
                came = self._came.get_nowait()
                if not isinstance(came, RankLost):
                    came[2].close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._has_place.acquire()
            try:
                sock, (host, *_) = self._server.accept()
            except OSError as error:
                self._has_place.release()
                if not self._closed.is_set():
                    self._complain("no rank can join: %s", error)
                    time.sleep(0.1)  # the system has no descriptor for it now
                continue
            with self._lock:
                self._unproven.add(sock)
                is_over = self._closed.is_set()
            if is_over:
                sock.close()
                return
            threading.Thread(target=self._hear, args=(sock, host), name="ranks-prove", daemon=True).start()

    def _hear(self, sock: socket.socket, host: str) -> None:
        came: tuple[int, str, socket.socket] | RankLost | None = None
        try:
            receive = within(sock, PROOF_S)
            prove_as_listener(self._secret, sock.sendall, receive)
            rank, name = introduced(receive)
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            came = rank, name, sock
        except RankLost as error:
            came = error
        except OSError as error:
            self._complain("a connection from %s is no rank's: %s", host, one_line(str(error)))
        with self._lock:
            self._unproven.discard(sock)
            if not isinstance(came, tuple) or self._closed.is_set():
                sock.close()
            if came is not None and not self._closed.is_set():
                self._came.put(came)
        self._has_place.release()

    def _complain(self, *words: object) -> None:
        if time.monotonic() >= self._log_at_s and not self._closed.is_set():
            self._log_at_s = time.monotonic() + _LOG_S
            log.warning(*words)


def introduced(receive: Receive) -> tuple[int, str]:
    """Return which rank is at the other end of a connection, and its name, from its first line."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
        line += receive(1)
    said = one_line(line.decode("utf-8", "replace").strip())
    number, _, where = said.partition(" ")
    rank = _RANKS.parse(number)
    if rank is None:
        raise RankLost(f"a rank cannot join: {said or 'it has said nothing'}")
    return rank, f"rank {rank} ({where})"
