"""A product's limits follow what its probes found, and a file that holds anything else is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from devices.ascend_limits import answered, answers_file, product, write_answers
from tests.attention.test_attention import shape

B = product("910B", "")


def test_without_answers_a_product_is_as_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert answered(B, answers_file(tmp_path, "910B", "9.0.0", virtual=False)) is B
    assert not caplog.messages


def test_answers_are_followed_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = answers_file(tmp_path / "new", "910B", "9.0.0", virtual=False)
    write_answers(path, {"keeps_nan": False, "packs_float16": True, "tiles_weights": True})
    with caplog.at_level(logging.INFO):
        found = answered(B, path)
    assert (found.keeps_nan, found.packs_float16, found.tiles_weights) == (False, True, True)
    (line,) = caplog.messages
    assert line == (
        f"device: follows the answers of verify_npu.sh in {path}:"
        " keeps_nan no (was yes); tiles_weights yes (was no)"
    )


def test_an_answer_that_was_asked_otherwise_counts_no_more_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "910B-cann-9.0.0.json"
    path.write_text('{"bares_decodes": true, "keeps_nan": false}')
    with caplog.at_level(logging.WARNING):
        found = answered(B, path)
    assert not found.unmasks_decodes, "decodes have a mask until a captured probe says yes"
    assert not found.keeps_nan
    (line,) = caplog.messages
    assert line.startswith(f"device: the answer bares_decodes in {path} no longer counts, since it was asked")
    assert line.endswith("run `bash scripts/verify_npu.sh` again")


def test_inexact_angles_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = answers_file(tmp_path, "910B", "", virtual=False)
    write_answers(path, {"exact_angles": False})
    assert not answered(B, path).exact_angles
    assert caplog.messages == [
        "device: cosines of large angles are not exact here, which dynamic rope computes"
    ]


def test_a_stand_in_has_answers_of_its_own(tmp_path: Path) -> None:
    names = {
        answers_file(tmp_path, "950", cann, virtual=each).name for cann in ("8.5", "") for each in (0, 1)
    }
    assert names == {
        "950-cann-8.5.json",
        "virtual-950-cann-8.5.json",
        "950-cann-unknown.json",
        "virtual-950-cann-unknown.json",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "holds no JSON"),
        ("[]", "holds no answers of yes and no"),
        ('{"keeps_nan": 1}', "holds no answers of yes and no"),
        ('{"head_dims": true}', "answers head_dims, which nothing asks"),
    ],
)
def test_what_is_no_answer_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=rf"x\.json {said}.*: remove it, or run `bash scripts/verify_npu\.sh`"
    ):
        answered(B, path)


def test_float16_is_refused_where_attention_is_wrong_in_it(tmp_path: Path) -> None:
    path = answers_file(tmp_path, "910B", "9.0.0", virtual=False)
    write_answers(path, {"packs_float16": False})
    found, sizes = answered(B, path), {"page_size": 128}
    found.check(shape(dtype=torch.bfloat16, **sizes))
    with pytest.raises(
        ValueError, match=r"wrong in it: set model\.dtype to bfloat16, or set device\.attention"
    ):
        found.check(shape(dtype=torch.float16, **sizes))
    B.check(shape(dtype=torch.float16, **sizes))
