"""Engines that exchange pages prove a secret to each other, and encrypt, before either believes the other.

Whoever lacks the secret, replays or reflects what another said, or stalls, is told nothing and holds nothing.
"""

from __future__ import annotations

import hmac
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from borders import shared_secret
from borders.shared_secret import HELLO, NONCE_BYTES, Unproven, prove_as_dialler, prove_as_listener
from kv_cache.exchange import connection
from kv_cache.exchange.channel import Credentials, TlsContexts
from kv_cache.exchange.messages import VERSION, Hello, PagesWanted, Unfit, Welcome, framed
from recipes.schema.recipe_error import RecipeError
from recipes.schema.server_section import ServerSection
from serving.engine.page_exchange import credentials_of
from tests.kv_cache import device
from tests.patience import PATIENCE_S
from tests.serving.hostile_peer import AnswersPeer
from tests.serving.page_pair import Listener, Pair, alone, cache_of, prompts
from tests.serving.test_hostile_peers import WISH

FOLDER = Path(__file__).parent / "certificates"
OURS = Credentials(b"a secret of these two engines, of enough bytes")
OTHER = Credentials(b"a secret of two other engines, of enough bytes")


def tls(of: str = "engine", authority: str = "authority") -> TlsContexts:
    return TlsContexts.of(FOLDER / f"{of}.pem", FOLDER / f"{of}.key", FOLDER / f"{authority}.pem")


ENCRYPTED = Credentials(tls=tls())
BOTH = Credentials(OURS.secret, tls())


@pytest.mark.parametrize(
    ("credentials", "transport"), [(OURS, "shared_memory"), (ENCRYPTED, "tcp"), (BOTH, "tcp")]
)
def test_engines_of_one_secret_and_authority_exchange_pages(credentials: Credentials, transport: str) -> None:
    requests = prompts(6)
    pair = Pair(transport=transport, credentials=credentials)
    assert pair.serve(requests) == alone(requests)
    pair.settle()
    assert pair.answers.scheduler.counters.arrived_pages
    assert not pair.answers.scheduler.counters.missed_pages
    assert not pair.server.num_faults
    pair.close()


STRANGER = Credentials(tls=tls("stranger", "stranger"))
UNLIKE = {
    "none there": (OURS, Credentials()),
    "none here": (Credentials(), OURS),
    "another": (OURS, OTHER),
    "no TLS here": (Credentials(), ENCRYPTED),
    "no TLS there": (ENCRYPTED, Credentials()),
    "another authority there": (ENCRYPTED, STRANGER),
    "another authority here": (STRANGER, ENCRYPTED),
    "TLS and another secret": (BOTH, Credentials(OTHER.secret, tls())),
}


@pytest.mark.parametrize("which", [*UNLIKE])
def test_engines_of_unlike_credentials_exchange_nothing(
    which: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The prompt is computed where it is answered, and the log says what to set."""
    monkeypatch.setattr(connection, "GREETING_S", 2.0)
    here, there = UNLIKE[which]
    pair = Pair(credentials=there, answers_credentials=here, most_wait_s=PATIENCE_S)
    assert pair.serve(prompts(1)) == alone(prompts(1))
    assert pair.answers.scheduler.counters.missed_pages
    assert not pair.prompts.scheduler.counters.sent_pages
    lines = [each.getMessage() for each in caplog.records if "pages from" in each.getMessage()]
    assert len(lines) == 1
    if "TLS" not in which and "authority" not in which:
        assert "server.pages_key_file" in lines[0]
    pair.close()


def test_nothing_is_told_and_no_prompt_is_computed_before_the_proof() -> None:
    """A peer that says hello at once is told what to set, whatever it says it is, and then ended."""
    pair = Pair(credentials=OURS)
    layout = cache_of(pair.prompts).layout
    for model in ("the model", "another"):
        peer = AnswersPeer(pair, greets=False)
        peer.say(Hello(VERSION, model, device.PAGE_SIZE, layout, "tcp", b"", 1 << 14))
        peer.say(PagesWanted(**WISH))
        pair.until(peer.listen)
        (told,) = peer.heard
        assert told == Unfit(f"the other side proves no secret; {connection.ASKS_FOR_SECRET}")
        peer.close()
    pair.until(lambda: pair.server.num_faults == 2)
    assert pair.server.asked.empty() or all(
        each.message is None for each in (pair.server.asked.get() for _ in range(pair.server.asked.qsize()))
    )
    pair.close()


def test_a_flood_without_a_proof_ends_its_connection() -> None:
    pair = Pair(credentials=OURS)
    peer = AnswersPeer(pair, greets=False)
    with suppress(OSError):
        while True:
            peer.sock.sendall(b"x" * (1 << 16))
    pair.until(lambda: pair.server.num_faults == 1 and not pair.server.links)
    pair.close()


class Recorded:
    """A peer that dials and says what it is told to, and reads so many bytes."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.settimeout(PATIENCE_S)

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            if not more:
                raise ConnectionError
            data += more
        return data


NO_PROOF = framed(Unfit(f"the other side holds another secret; {connection.ASKS_FOR_SECRET}"))


def test_a_recorded_proof_is_none() -> None:
    """Each connection has a nonce of its own."""
    pair = Pair(credentials=OURS)
    assert OURS.secret is not None
    said = list[bytes]()
    good = Recorded(pair.server.port)

    def send(data: bytes) -> None:
        said.append(data)
        good.sock.sendall(data)

    prove_as_dialler(OURS.secret, send, good.read)
    greeting, proof = said
    replay = Recorded(pair.server.port)
    replay.sock.sendall(greeting)
    assert replay.read(NONCE_BYTES)
    replay.sock.sendall(proof)
    assert replay.read(len(NO_PROOF)) == NO_PROOF
    for each in (good, replay):
        each.sock.close()
    pair.close()


def test_a_reflected_proof_is_none() -> None:
    """An engine of answers does not believe its own proof, sent back by who lacks the secret."""
    assert OURS.secret is not None
    said = list[bytes]()
    answers = iter([b"n" * NONCE_BYTES])
    with pytest.raises(Unproven, match="another secret"):
        prove_as_dialler(OURS.secret, said.append, lambda _: next(answers, said[-1]))


def test_a_proof_of_another_connection_is_none() -> None:
    """Of two connections, neither can be made to prove what the other asks for."""
    pair = Pair(credentials=OURS)
    first, second = Recorded(pair.server.port), Recorded(pair.server.port)
    first.sock.sendall(HELLO + b"n" * NONCE_BYTES)
    second.sock.sendall(HELLO + first.read(NONCE_BYTES))
    first.sock.sendall(second.read(NONCE_BYTES))
    assert first.read(len(NO_PROOF)) == NO_PROOF
    for each in (first, second):
        each.sock.close()
    pair.close()


def test_the_secret_and_its_proof_are_never_told_to_who_does_not_prove_it() -> None:
    """The side that listens sends a random number, and no digest from which a secret could be guessed."""
    ours, theirs = socket.socketpair()
    assert OURS.secret is not None
    sent = list[bytes]()

    def receive(count: int) -> bytes:
        return ours.recv(count, socket.MSG_WAITALL)

    own = b"n" * NONCE_BYTES
    theirs.sendall(HELLO + own + b"\0" * 32)
    with pytest.raises(Unproven):
        prove_as_listener(OURS.secret, sent.append, receive)
    (nonce,) = sent
    for role in (b"dials", b"listens"):
        assert nonce != hmac.digest(OURS.secret, HELLO + own + nonce + role, "sha256")
    ours.close()
    theirs.close()


class Impostor(Listener):
    """Listens as an engine of prompts does, without its secret, and answers with these bytes."""

    def __init__(self, answers: bytes) -> None:
        super().__init__()
        self._answers = answers
        self.heard = b""
        self.start()

    def __call__(self, port: int) -> int:
        return self.port

    def serve(self, sock: socket.socket) -> None:
        self.run(self._answer, sock)

    def _answer(self, sock: socket.socket) -> None:
        with suppress(OSError):
            sock.sendall(self._answers)
            while more := sock.recv(1 << 16):
                self.heard += more


@pytest.mark.parametrize("answers", [framed(Welcome()), b"\0" * 64, b"", HELLO + b"\0" * 56])
def test_an_impostor_learns_no_prompt(answers: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of answers says what it wants only to who has proved the secret."""
    monkeypatch.setattr(connection, "GREETING_S", 0.2)
    liar = Impostor(answers)
    pair = Pair(between=liar, credentials=OURS)
    (request,) = prompts(1)
    assert pair.serve([request]) == alone(prompts(1))
    assert pair.answers.scheduler.counters.missed_pages
    assert request.prompt[:8].astype("<i4").tobytes() not in liar.heard
    assert len(liar.heard) <= len(HELLO) + NONCE_BYTES + 32
    pair.close()


@pytest.mark.parametrize("credentials", [OURS, ENCRYPTED], ids=["secret", "TLS"])
def test_who_stalls_in_the_handshake_is_dropped_in_time(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GREETING_S", 0.2)
    pair = Pair(credentials=credentials)
    peers = [AnswersPeer(pair, greets=False) for _ in range(3)]
    peers[1].say(HELLO[:3])
    peers[2].say(HELLO + b"n" * NONCE_BYTES if credentials is OURS else b"\x16\x03\x01\x02\x00\x01")
    ended = [threading.Event() for _ in peers]

    def read(peer: AnswersPeer, end: threading.Event) -> None:
        with suppress(OSError):
            while peer.sock.recv(1 << 10):
                pass
        end.set()

    for peer, end in zip(peers, ended):
        threading.Thread(target=read, args=(peer, end), daemon=True).start()
    assert all(each.wait(PATIENCE_S) for each in ended)
    pair.until(lambda: not pair.server.links)
    pair.close()


def test_a_secret_is_long_enough_and_its_file_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    for content, words in (
        (b"", "has 0 bytes, and a secret at least 32"),
        (b" " * 40 + b"x" * 31 + b"\n", "has 31 bytes"),
        (b"x" * 5000, "has more than 4,096 bytes"),
    ):
        file.write_bytes(content)
        with pytest.raises(RecipeError, match=words) as refused:
            credentials_of(ServerSection(pages_key_file=file))
        assert refused.value.keys == ("server.pages_key_file",)
        assert "\n" not in str(refused.value)
    with pytest.raises(RecipeError, match="no such file"):
        credentials_of(ServerSection(pages_key_file=tmp_path / "none"))
    file.write_bytes(b"x" * shared_secret.FEWEST_BYTES + b"\n")
    assert credentials_of(ServerSection(pages_key_file=file)).secret == b"x" * 32


def test_files_of_tls_belong_together(tmp_path: Path) -> None:
    def read(certificate: Path, key: Path, authority: Path) -> Credentials:
        return credentials_of(
            ServerSection(
                pages_tls_certificate=certificate, pages_tls_private_key=key, pages_tls_authority=authority
            )
        )

    good = FOLDER / "engine.pem", FOLDER / "engine.key", FOLDER / "authority.pem"
    assert read(*good).tls is not None
    bad = tmp_path / "bad"
    bad.write_text("no certificate")
    for at in range(3):
        for wrong in (bad, tmp_path / "none", tmp_path):
            files = [*good]
            files[at] = wrong
            with pytest.raises(RecipeError) as refused:
                read(*files)
            assert refused.value.keys[0] == "server.pages_tls_certificate"
            assert "\n" not in str(refused.value)
    with pytest.raises(RecipeError):
        read(good[0], FOLDER / "stranger.key", good[2])
