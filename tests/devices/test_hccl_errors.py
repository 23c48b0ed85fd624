"""A link that HCCL complains of is named to the leader's clients, from its error or from its log."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from continuous_batching.recording.follower import Beats
from continuous_batching.recording.listeners import Heard, RankLost
from devices import hccl_errors
from devices.hccl_errors import end_of_log, explained
from recipes.cluster import ranks
from tests.patience import PATIENCE_S

# What torch_npu and HCCL print, with other addresses and numbers
NOTIFY = """The execution of the internal task times out.
EI0002: [PID: 7277] The wait execution of the Notify register times out. Reason: The Notify register has not
received the Notify record from remote rank{}. base information: [streamID:[2282987520], tag[AllReduce]]"""
HEARTBEAT = """ task information: [there are(is) 1 abnormal device(s):
    Cluster Exception Location[IP/ID]:[192.0.2.240/1], Arrival Time:[Thu Nov 28 11:56:34 2024],
    Discoverer:[192.0.2.240/0], ExceptionType:[Heartbeat Lost Occurred], Possible Reason:1. Process has exited
]"""
SOCKET = "HcclAllreduce, error code is 6\nEI0006: Getting socket times out. Reason: Remote Rank did not send"
TABLE = """[ERROR] HCCL(17528,python3):2026 [hccl_socket_manager.cc:624]   |  comm error, device[1]
[ERROR]  |  dest_ip(user_rank)  |  dest_port  |  src_ip(user_rank)  |  src_port  |  MyRole  |  Status  |
[ERROR]  |  192.0.2.199(7)   |  16666  |   192.0.3.198(3)   |  3234403008  |  client  | time out |  DISABLE  |
"""
CREATION = """[Timeout]Transport init error! createLink: rank[1]-localUserrank[3]-localIpAddr[192.0.2.1/1],
remoteRank[0]-remoteUserrank[7]-remoteIpAddr[192.0.2.100/0], machineType[1]"""
MADE = "the link from rank 3 to rank 7 cannot be made"


@pytest.mark.parametrize(
    ("words", "log", "said"),
    [
        (NOTIFY.format(": [7]"), "", "the link from rank 3 to rank 7 brings nothing (EI0002): "),
        (NOTIFY.format(" [7]"), "", "the link from rank 3 to rank 7 brings nothing (EI0002): "),
        (
            NOTIFY.format(" [unknown]") + HEARTBEAT,
            TABLE,
            "rank 3 has lost device 192.0.2.240/1: Heartbeat Lost Occurred (EI0002): ",
        ),
        (SOCKET, TABLE, f"{MADE}: time out (EI0006): "),
        (SOCKET, CREATION, f"{MADE} (EI0006): "),
        (SOCKET, "", ""),
        ("no memory", TABLE, ""),
    ],
)
def test_a_link_is_named_by_its_ranks(words: str, log: str, said: str) -> None:
    assert explained(words.replace("\nreceived", " received"), 3, log).startswith(
        said + words.splitlines()[0]
    )


def test_a_log_of_another_process_or_none_says_nothing(tmp_path: Path) -> None:
    environment = {"ASCEND_PROCESS_LOG_PATH": str(tmp_path)}
    assert end_of_log(12, environment) == ""
    folder = tmp_path / "debug" / "plog"
    folder.mkdir(parents=True)
    (folder / "plog-123_20261128.log").write_text("another")
    assert end_of_log(12, environment) == ""
    (folder / "plog-12_20261128.log").write_text("x" * hccl_errors.MOST_LOG_BYTES + TABLE)
    log = end_of_log(12, environment)
    assert len(log) == hccl_errors.MOST_LOG_BYTES
    assert explained(SOCKET, 3, log).startswith(MADE)


def test_a_rank_says_the_link_with_its_last_words() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        beats = Beats(theirs)
        beats.explain = lambda why: explained(why, 3, TABLE)
        theirs.shutdown(socket.SHUT_RD)  # nothing is read of a leader that says nothing
        beats.end(SOCKET + "\n" + "more" * 2000)
        heard, said = Heard("rank 3", ours, 0.0), b""
        while data := ours.recv(1 << 10):
            said += data
        with pytest.raises(RankLost, match=rf"^rank 3 has ended: {MADE}: time out \(EI0006\): HcclAllreduce"):
            heard.take(said, 0.0)


def test_the_leader_names_a_link_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LOSS_NEWS_S", 0.0)
    listeners: Any = SimpleNamespace(busy_since_s=None, lost=None, check=lambda: None)
    words = NOTIFY.format(": [7]").replace("\nreceived", " received")
    said = r"^the link from rank 0 to rank 7 brings nothing"
    with pytest.raises(RankLost, match=said), ranks.watched(listeners):
        raise RuntimeError(words)
    with pytest.raises(RuntimeError, match=r"^no memory"), ranks.watched(listeners):
        raise RuntimeError("no memory")
