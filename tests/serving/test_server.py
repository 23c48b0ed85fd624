"""What a server is started with: its recipe, port and keys."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.api.api_keys import ApiKeys, Rights
from serving.server import ServerOptions, listener_at, url_of
from tests.serving.server import TINY, Server


def test_an_unusable_recipe_ends_the_server_in_words() -> None:
    server = Server("recipes/any/cpu.yaml", "model.path=/nowhere")
    assert server.wait() == 1
    assert any("/nowhere" in line for line in server.log)
    assert not any("Traceback" in line for line in server.log)


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=rf"--port is {port}; it must be an integer from 0 to 65535"):
        listener_at("127.0.0.1", port)


@pytest.mark.parametrize(
    ("code", "option"),
    [
        (errno.EADDRINUSE, "--port"),
        (errno.EACCES, "--port"),
        (errno.EADDRNOTAVAIL, "--host"),  # the address is another machine's
        (errno.EAFNOSUPPORT, "--host"),
    ],
)
def test_who_cannot_listen_is_told_what_to_choose(
    code: int, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, "cannot")

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "bind", fail)
        with pytest.raises(OSError, match=f"cannot listen at 10.0.0.1:80: cannot; choose another {option}"):
            listener_at("10.0.0.1", 80)


def test_a_key_is_one_word_however_it_came_into_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServerOptions(TINY)
    monkeypatch.setenv("API_KEY", " abc\n")
    assert options.rights_of() == {"abc": Rights()}
    for wrong in (" ", "a b", "schlüssel", "a\x01b"):
        monkeypatch.setenv("API_KEY", wrong)
        with pytest.raises(ValueError, match="API_KEY must be one word"):
            options.rights_of()


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_address_that_is_told_can_be_asked(host: str, shown: str) -> None:
    listener: Any = SimpleNamespace(getsockname=lambda: (host, 8000, 0, 0))  # a machine may lack IPv6
    assert url_of(listener, is_encrypted=False) == f"http://{shown}:8000"
    assert url_of(listener, is_encrypted=True) == f"https://{shown}:8000"


@pytest.mark.parametrize("line", ["abc team", "abc team max_priority=-2"])
def test_the_key_of_the_environment_is_the_operators_in_a_file_too(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"other\n{line}\n")
    monkeypatch.setenv("API_KEY", "abc")
    rights_of = ServerOptions(TINY, api_keys=str(path)).rights_of()
    assert rights_of == {"other": Rights("", 0), "abc": Rights("team", None)}


def test_a_file_of_keys_may_be_marked_and_commented(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    found = {"first": "", "second": "b", "fo#rth": ""}
    path.write_text("\ufefffirst #note\nsecond b # of many words\n  # third\n\nfo#rth\n", encoding="utf-8")
    assert ApiKeys.read(str(path)) == {key: Rights(tenant, 0) for key, tenant in found.items()}


def test_a_file_of_keys_bounds_their_priorities(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a\nb team\nc max_priority=5 # note\nd max_priority=-2 team\ne *\nf * max_priority=9\n")
    assert ApiKeys.read(str(path)) == {
        "a": Rights("", 0),
        "b": Rights("team", 0),
        "c": Rights("", 5),
        "d": Rights("team", -2),
        "e": Rights("*", None),
        "f": Rights("*", 9),
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("first\nschlüssel\n".encode(), "keys:2: this key cannot be sent; it must be of printable ASCII"),
        (b"first\na\x01b\n", "keys:2: this key cannot be sent"),
        (b"a b c\n", r"keys:1: a line is KEY \[TENANT\] \[max_priority=N\], and this has 3 words"),
        (b"a max_priority=1 max_priority=2\n", "and this has 3 words"),
        (b"a\nb team max_priority=high\n", 'keys:2: max_priority= must be an integer .* not "high"'),
        (b"a max_priority=\n", "keys:1: max_priority= must be an integer"),
        (b"a max_priority=99999999999999999999\n", "keys:1: max_priority= must be an integer from"),
        (b"first \xff\n", "keys is not UTF-8: byte 6 is wrong"),
        (b"# first\n", "keys holds no key"),
    ],
)
def test_a_key_that_can_never_work_is_refused_by_its_place(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        ApiKeys.read(str(path))
