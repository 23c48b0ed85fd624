"""Ranks join the one that leads by a secret, at a named address; whoever else comes there ends alone."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from borders.shared_secret import HELLO, NONCE_BYTES, new_secret, prove_as_dialler, within
from continuous_batching.recording.listeners import RankLost
from recipes.cluster import joining
from recipes.cluster import ranks as ranks_module
from recipes.cluster.cluster import HERE, Cluster
from recipes.cluster.joining import Joining, bound, introduced, leader_address, tell_libraries
from recipes.cluster.rank_process import RECORDING, SpareRanks
from recipes.cluster.ranks import Ranks, stay_near
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError
from tests.each_of import each_of
from tests.mutated import Mutator
from tests.patience import PATIENCE_S
from tests.thorough import cases

SECRET = new_secret()


@contextmanager
def listening() -> Iterator[tuple[Joining, Callable[[], socket.socket]]]:
    """A leader that ranks join, and what connects to it."""
    sockets = list[socket.socket]()
    with bound(HERE, 0) as server:
        found = Joining(server, SECRET)

        def dial() -> socket.socket:
            sockets.append(socket.create_connection(server.getsockname()))
            return sockets[-1]

        try:
            yield found, dial
        finally:
            found.close()
            found._thread.join(PATIENCE_S)
            assert not found._thread.is_alive()
            for each in sockets:
                each.close()


def join(sock: socket.socket, line: bytes, secret: bytes = SECRET) -> None:
    prove_as_dialler(secret, sock.sendall, within(sock, PATIENCE_S))
    sock.sendall(line)


def test_a_rank_joins_beside_strangers() -> None:
    """Silent ones, half-open ones, those that say what no rank says, and those of another engine."""
    with listening() as (leader, dial):
        proof = HELLO + b"n" * NONCE_BYTES + b"p" * 32
        for said in (b"", b"1 process 7 on node2\n", HELLO, proof, b"\n" * 5000):
            dial().sendall(said)
        with pytest.raises(ConnectionError):
            join(dial(), b"1 process 7 on node2\n", new_secret())
        ours = dial()
        join(ours, b"2 process 9 on node3\n")
        came = leader.next(PATIENCE_S)
        assert came is not None
        assert came[:2] == (2, "rank 2 (process 9 on node3)")
        came[2].sendall(b"x")
        assert ours.recv(1) == b"x"
        came[2].close()
        assert leader.next(0.0) is None


def test_strangers_give_way_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place is free again when a connection has proved nothing in time, and nothing else is held by it."""
    strangers = iter(range(9))
    monkeypatch.setattr(joining, "MOST_UNPROVEN", 2)
    monkeypatch.setattr(
        joining, "within", lambda sock, _: within(sock, PATIENCE_S if next(strangers, None) is None else 0.1)
    )
    with listening() as (leader, dial):
        for _ in range(9):
            dial()
        join(dial(), b"1 process 7 on node2\n")
        came = leader.next(PATIENCE_S)
        assert came is not None
        came[2].close()


def test_a_rank_that_cannot_join_says_why() -> None:
    with listening() as (leader, dial):
        join(dial(), b"rank 1: scheduler.num_slots is 3 here, and 32 on the leader\x1b[31m\n")
        with pytest.raises(RankLost, match="a rank cannot join: rank 1: scheduler"):
            leader.next(PATIENCE_S)


def test_a_rank_that_has_ended_before_all_have_joined_comes_again() -> None:
    """Its machine starts all its ranks again where one of them ends; one that is still there comes once."""
    ranks = object.__new__(Ranks)
    ranks._processes = []
    with listening() as (leader, dial), ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(ranks._accepted, leader, 4, PATIENCE_S)
        for rank in (1, 2):
            before = dial()
            join(before, b"%d process 7 on node2\nwhat it does\n" % rank)
            before.close()
        for rank in (3, 2, 1):
            assert not gathered.done()
            join(dial(), b"%d process 8 on node2\n" % rank)
        found = gathered.result(PATIENCE_S)
        assert [*found] == [f"rank {rank} (process 8 on node2)" for rank in (1, 2, 3)]
        gathered = pool.submit(ranks._accepted, leader, 3, PATIENCE_S)
        for _ in range(2):
            join(dial(), b"1 process 7 on node2\n")
        with pytest.raises(RankLost, match=r"only \[2\] are missing: is one twice"):
            gathered.result(PATIENCE_S)
        for each in found.values():
            each.close()


def test_mutated_first_lines_are_no_ranks() -> None:
    """10,000 of them in a thorough run."""
    mutator = Mutator(1)
    for _ in range(cases(300, 10_000)):
        said = io.BytesIO(mutator.data(b"12 process 7 on node2\n") + b"\n")

        def receive(count: int, said: io.BytesIO = said) -> bytes:
            return said.read(count) or b"\n"

        try:
            rank, name = introduced(receive)
        except RankLost as lost:
            words = str(lost)
        else:
            assert 1 <= rank < 1024
            words = name
        assert words.isprintable()
        assert len(words) < 1100


def test_what_is_not_taken_is_closed_with_it() -> None:
    with listening() as (leader, dial):
        ours, silent = dial(), dial()
        join(ours, b"1 process 7 on node2\n")
        while leader._came.empty() or not leader._unproven:
            pass
        leader.close()
        for each in (ours, silent):
            each.settimeout(PATIENCE_S)
            assert each.recv(1) == b""


def test_the_leader_listens_at_one_address() -> None:
    """That of the interface that the recipe names, or where the others find it; all only if it says so."""
    for leader in ("127.0.0.1", "localhost"):
        for interface in (None, "all", "lo"):
            assert leader_address(Cluster("a test", 2, leader=leader), interface) == HERE
    assert leader_address(Cluster("a test", 2, leader="127.0.0.2"), None) == "127.0.0.2"
    elsewhere = Cluster("a test", 2, leader="203.0.113.7")
    assert leader_address(elsewhere, "lo") == HERE
    assert leader_address(elsewhere, "all") == ""
    for interface, words in (
        (None, "find the first one at 203.0.113.7"),
        ("no0", "no0 has no IPv4 address here"),
    ):
        with pytest.raises(RecipeError, match=words) as refused:
            leader_address(elsewhere, interface)
        assert refused.value.keys[0] == "parallel.interface"
        assert "\n" not in str(refused.value)


def test_another_address_than_that_of_the_named_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "address_of", lambda _: "192.0.2.1")
    monkeypatch.setattr(joining, "is_here", lambda address: address in ("192.0.2.1", "192.0.2.2"))
    for leader in ("192.0.2.1", "203.0.113.7", "node1"):  # the last two may lead to it
        assert leader_address(Cluster("a test", 2, leader=leader), "eth1") == "192.0.2.1"
    with pytest.raises(
        RecipeError, match=r"eth1 is 192\.0\.2\.1, and the other machines find .* at 192\.0\.2\.2"
    ):
        leader_address(Cluster("a test", 2, leader="192.0.2.2"), "eth1")


def test_the_recording_is_where_the_others_have_found_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of this machine's default route may be one that they do not reach."""
    said = dict[str, str]()

    class Store:
        def __init__(self, *_: object, master_listen_fd: int, **__: object) -> None:
            os.close(master_listen_fd)
            self.set = said.__setitem__

    monkeypatch.setattr(ranks_module.dist, "TCPStore", Store)
    ranks = object.__new__(Ranks)
    ranks._processes, ranks.wait_s = [], 1.0
    monkeypatch.setattr(ranks, "_accepted", lambda *_: {})
    recipe = load("recipes/tiny/cpu.yaml", ["parallel.tensor=2", "parallel.interface=all"])
    monkeypatch.setattr(joining, "own_address", lambda: "192.0.2.1")
    monkeypatch.setattr(joining, "is_here", lambda address: address == "198.51.100.1")
    # Elsewhere is a service of Kubernetes, which forwards declared ports alone
    for found, wanted in (("127.0.1.1", "node1"), ("198.51.100.1", "node1"), ("203.0.113.7", "192.0.2.1")):
        answer = [(0, 0, 0, "", (found, 0))]
        monkeypatch.setattr(joining.socket, "getaddrinfo", lambda *_, answer=answer: answer)
        ranks._gathered(recipe, Cluster("a test", 2, leader="node1"), SpareRanks(0))
        assert said[RECORDING].startswith(f"{wanted}:")


def test_a_name_of_this_machine_stands_for_an_address_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where /etc/hosts says that the name is this machine's loopback, which the others do not reach."""
    monkeypatch.setattr(joining, "own_address", lambda: "192.0.2.1")
    monkeypatch.setattr(joining, "is_here", lambda address: address == "192.0.2.1")
    for found in ("127.0.1.1", "192.0.2.1"):
        monkeypatch.setattr(
            joining.socket, "getaddrinfo", lambda *_, found=found: [(0, 0, 0, "", (found, 0))]
        )
        assert leader_address(Cluster("a test", 2, leader="node1"), None) == "192.0.2.1"


@each_of("interface", [None, "all"])
def test_gloo_meets_at_the_interface_to_the_leader(
    interface: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where /etc/hosts says that the leader's name, or this machine's, is a loopback."""
    caplog.clear()
    addresses = {"lo": "127.0.0.1", "eth0": "192.0.2.1", "eth1": "203.0.113.7"}
    sent_from = {"203.0.113.1": "203.0.113.7", "node1": "127.0.0.1", "far": "198.51.100.9"}
    monkeypatch.setattr(joining, "own_address", lambda: "192.0.2.1")
    monkeypatch.setattr(joining, "_ipv4_of", addresses.get)
    monkeypatch.setattr(joining.socket, "if_nameindex", lambda: list(enumerate(addresses)))

    class Probe(socket.socket):
        def connect(self, place: tuple[str, int]) -> None:
            self.from_ = sent_from[place[0]]

        def getsockname(self) -> tuple[str, int]:
            return self.from_, 1

    monkeypatch.setattr(joining.socket, "socket", Probe)
    for leader, found in (("203.0.113.1", "eth1"), ("node1", "eth0"), ("far", None), ("127.0.0.1", "lo")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        stay_near(Cluster("a test", 2, leader=leader), interface)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == found
    assert caplog.text.count("parallel.interface") == 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bond0")
    stay_near(Cluster("a test", 2, leader="node1"), interface)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "bond0"


def test_the_libraries_use_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    for interface in (None, "all"):
        tell_libraries(interface)
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    tell_libraries("eth1")
    names = ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [os.environ[name] for name in names] == ["eth1", "=eth1", "ib0"]
