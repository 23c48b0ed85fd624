"""Every number of every file and interface is tried with the same forty values, and refused in one line.

Each value stands in the place of each number of a valid document, as JSON, YAML or a command line write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from borders.field_table import FIELDS
from borders.field_types import Biases, Numeric, TokenIds
from borders.files import in_one_line
from borders.refusal import BadRequest
from models.checkpoint.adapter_files import CONFIG, WEIGHTS, look_at
from models.parallel import placement
from recipes.cluster.rank_table import read_rank_table
from recipes.schema.keys import keys_of
from recipes.schema.reader import read
from recipes.schema.recipe import Recipe
from serving.api.api_keys import ApiKeys
from serving.router.replicas import figures_of, info_of
from serving.text.sampling_defaults import NAMES, sampling_defaults
from simulation.fitted import Fitted, Timed, _check, fit
from tests.recipes.test_cluster import rank_table
from tests.serving.server import TINY
from tests.thorough import cases

FORTY = (
    "0", "-0", "1", "-1", "2", "-2", "7", "255", "256", "65536", "2147483647", "2147483648", "-2147483648",
    "-2147483649", "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808",
    "-9223372036854775808", "-9223372036854775809", "18446744073709551615", "18446744073709551616", "0.5",
    "-0.5", "1.0", "1.5", "1e3", "1E+19", "1e-400", "5e-324", "1e300", "-1e308", "1e400", "NaN", "Infinity",
    "-Infinity", "9" * 400, "9" * 5000, "true", '"1"',
)  # fmt: skip
assert len({*FORTY}) == 40


def with_each(document: Any, values: tuple[str, ...] = FORTY) -> Iterator[str]:
    """The JSON of a document with each value in the place of each of its numbers."""
    text = json.dumps(document)
    for match in re.finditer(r"(?<=[\[:, ])-?[0-9][-+0-9.eE]*(?=[\],}])", text):
        for value in values:
            yield text[: match.start()] + value + text[match.end() :]


def refused_in_one_line(do: Callable[[], object]) -> bool:
    """Whether a value is refused; what is not refused in one line is an error of ours."""
    try:
        do()
    except (ValueError, OSError) as error:
        words = in_one_line(error)
        assert words.isprintable(), words
        assert len(words) < 2500, words
        return True
    return False


def of_json(text: str) -> Any:
    """A value as Python's JSON reads it, which refuses integers of many digits."""
    try:
        return json.loads(text)
    except ValueError:
        return 10 ** (len(text) - 1)


def test_every_field_of_a_request() -> None:
    for name, field in FIELDS.items():
        for text in FORTY:
            value = of_json(text)
            given = [value]
            if isinstance(field.kind, TokenIds):
                given.append([value])
            elif isinstance(field.kind, Biases):
                given += [{"5": value}, {text: 1.0}]
            for each in given:
                found = None
                with suppress(BadRequest):
                    found = field.kind.read(name, each)
                if found is None:
                    continue
                if isinstance(field.kind, Numeric) and not isinstance(found, bool):
                    np.float32(found)
                    assert found in field.kind.range or field.kind.zero is not None
                    if field.kind.range.kind is int:
                        np.int64(found)


def test_every_key_of_a_recipe() -> None:
    """As a value, and as what a command line says; every value that is taken is one of the key's range."""
    for key in keys_of(Recipe):
        if key.range is None:
            continue
        taken = set[str]()
        for value in FORTY:
            if refused_in_one_line(lambda key=key, value=value: key.check(of_json(value))):
                continue
            taken.add(value)
            assert of_json(value) in key.range
        some = sorted(FORTY, key=lambda each, name=key.name: hash_of(name + each))
        for value in some[: cases(3, len(FORTY))]:
            is_refused = refused_in_one_line(lambda key=key, value=value: read(TINY, [f"{key.name}={value}"]))
            assert is_refused or value in taken or key.nullable


def hash_of(text: str) -> int:
    """A number that is the same in every run."""
    return sum(at * ord(each) for at, each in enumerate(text, 1)) % 997


def test_every_weight_of_a_tenant_and_size_of_a_tier() -> None:
    for value in FORTY:
        for change in (
            f"scheduler.tenant_weights={{a: {value}}}",
            f"cache.tier={{kind: disk, path: p, gib: {value}}}",
            f"cache.tier={{kind: disk, path: p, gib: 1, wait_s: {value}}}",
        ):
            refused_in_one_line(lambda change=change: read(TINY, ["cache.host_gib=1", change]))


ADAPTER = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 2.5}, "use_rslora": False, "init_lora_weights": True, "lora_dropout": 0.1,
}  # fmt: skip


def test_every_number_of_an_adapter(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(b"x")
    (tmp_path / CONFIG).write_text(json.dumps(ADAPTER))
    assert look_at(tmp_path, 64).scale_of("q_proj") == 2.5 / 4
    for text in with_each(ADAPTER):
        (tmp_path / CONFIG).write_text(text)

        def use() -> None:
            found = look_at(tmp_path, 64)
            for linear in ("q_proj", "k_proj"):
                assert np.isfinite(np.float32(found.scale_of(linear)))

        refused_in_one_line(use)


def test_every_default_of_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    recipe: Any = SimpleNamespace(model=SimpleNamespace(path=tmp_path, generation_config="auto"))
    said = dict.fromkeys(NAMES, 1) | {"num_beams": 1, "no_repeat_ngram_size": 0, "do_sample": True}
    for text in with_each(said):
        file.write_text(text)
        refused_in_one_line(lambda: sampling_defaults(recipe))


def test_every_number_of_a_placement_and_its_counts(tmp_path: Path) -> None:
    file = tmp_path / "counts"
    counted = {"counts": [[], [9, 1, 4, 4], [1, 2, 3, 4]], "steps": 7, "num_chosen": 2}
    for text in with_each(counted):
        file.write_text(text)
        refused_in_one_line(lambda: placement.proposed(file, 2))
    config: Any = SimpleNamespace(
        mixture=SimpleNamespace(num_experts=4), num_layers=1, mixture_of=lambda number: True
    )
    for text in with_each({"placement": [[3, 1, 2, 0]]}):
        file.write_text(text)
        refused_in_one_line(lambda: placement.read(file, config))


def test_every_number_of_fitted_costs() -> None:
    """Also where the checksum was made anew."""
    fields = json.loads(fit([Timed(np.arange(1.0, 12.0), 0.5), Timed(np.ones(11), 0.25)]).in_json())
    del fields["crc32"]
    for text in with_each(fields, cases(FORTY[::4], FORTY)):
        try:
            changed = json.loads(text)
            whole = json.dumps({**changed, "crc32": _check(changed)})
        except ValueError:
            whole = text
        refused_in_one_line(lambda whole=whole: Fitted.from_json(whole.encode(), "costs").describe())


def test_every_number_of_a_rank_table_and_of_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "file"
    table = rank_table(2, "1.0")
    for server in table["server_list"]:
        for device in server["device"]:
            device["rank_id"] = int(device["rank_id"])
    for text in with_each(table):
        file.write_text(text)
        refused_in_one_line(lambda: read_rank_table(file, 0.0))
    for value in FORTY:
        file.write_text(f"a-key a-tenant max_priority={value}\n")
        refused_in_one_line(lambda: ApiKeys.read(str(file)))


def test_every_figure_of_a_replica() -> None:
    for value in FORTY:
        figures = figures_of(f'cb_requests_queued{{a="b"}} {value}\n'.encode())
        assert all(0 <= each <= 2**53 for each in figures.values())
    for text in with_each({"page_size": 16, "num_slots": 4}):
        info = info_of(text.encode())
        assert all(each is None or 0 <= each < 2**31 for each in (info.page_size, info.num_slots))
