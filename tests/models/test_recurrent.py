"""Decoders whose layers keep states give transformers' tokens, however their spans are cut and packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.recurrent import DraftRows, StateMetadata
from attention.reference import AttentionMetadata
from continuous_batching.batch import Batch, ragged_ranges
from continuous_batching.slots import SlotPool
from kv_cache.states import GRID
from models.checkpoint import weights
from models.checkpoint.files import tensor_names
from models.layers.recurrent import new_states
from models.ops.cpu.ops import CpuOps
from models.parallel.group import ALONE, Group, StageLinks
from models.quantization import Quantization
from models.step.inputs import state_spans
from models.step_inputs import StepInputs
from recipes.assembly.engine import build
from recipes.assembly.scoring import score
from recipes.schema.reader import load
from tests.device_kinds import Way
from tests.lazy import transformers
from tests.models.families import VOCABULARY, _fill, expected_logprobs, followed, make
from tests.models.recurrent_variants import EXPERTS, HALF, HEADS, RECURRENT_VARIANTS
from tests.models.state_steps import Span, Steps, decoder_of, empty_decoder
from tests.models.test_random_shares import together
from tests.thorough import first_quick

VARIANTS = {each.name: each for each in RECURRENT_VARIANTS}
KINDS = ["qwen3_next", "kimi_linear"]  # decays of heads, and of channels
LENGTHS, NUM_NEW = (1, 5, GRID, 150), 12
NEAR = 1e-4  # tolerance of log-probabilities, as for families without states
Case = tuple[Any, Path]


@pytest.fixture(scope="module")
def case_named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: make(VARIANTS[name], folder))


def prompts_of(seed: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


def in_spans(steps: Steps, rng: np.random.Generator, sizes: Sequence[int]) -> list[Tensor]:
    """Compute all prompts in packed spans of some of these sizes; log-probabilities at their ends."""
    at, last = [0] * len(steps.tokens), [torch.empty(0)] * len(steps.tokens)
    while missing := [row for row, tokens in enumerate(steps.tokens) if at[row] < len(tokens)]:
        some = [int(row) for row in rng.permutation(missing)[: rng.integers(1, len(missing) + 1)]]
        stops = [min(len(steps.tokens[row]), at[row] + int(rng.choice(sizes))) for row in some]
        lines = steps.run([Span(row, at[row], stop) for row, stop in zip(some, stops)])
        for row, stop, line in zip(some, stops, lines):
            at[row], last[row] = stop, line
    return last


@pytest.mark.parametrize(
    ("name", "way"),
    first_quick(
        3,
        [*((name, "fused") for name in VARIANTS), ("qwen3_next", "reference"), ("kimi_linear", "reference")],
    ),
)
def test_greedy_tokens_are_those_of_transformers(
    name: str, way: Way, case_named: Callable[[str], Case]
) -> None:
    """Prompts in spans on the grid and off it, beside decodes of others; then all decode together."""
    (model, path), prompts = case_named(name), prompts_of(1)
    steps = Steps(decoder_of(path, way=way), prompts)
    logprobs = [[line] for line in in_spans(steps, np.random.default_rng(2), (1, 3, 40, GRID, 2 * GRID))]
    for _ in range(NUM_NEW - 1):
        for lines, tokens in zip(logprobs, steps.tokens):
            tokens.append(int(lines[-1].argmax()))
        ends = [len(tokens) for tokens in steps.tokens]
        rows = np.random.default_rng(ends[0]).permutation(len(ends)).tolist()
        for row, line in zip(rows, steps.run([Span(row, ends[row] - 1, ends[row]) for row in rows])):
            logprobs[row].append(line)
    for row, prompt in enumerate(prompts):
        ours = torch.stack(logprobs[row])
        answer = ours.argmax(-1).tolist()
        tokens, wanted = followed(model, prompt, answer, NUM_NEW)
        torch.testing.assert_close(ours, wanted, rtol=0, atol=NEAR)
        assert answer == tokens


@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_lost_is_missed(name: str, case_named: Callable[[str], Case]) -> None:
    """Also one whose convolution alone starts anew; otherwise these tests would pass without them."""
    (model, path), (prompt,) = case_named(name), prompts_of(3, (2 * GRID,))
    wanted = expected_logprobs(model, prompt)[-1]
    for plane, what in ((0, "states"), (1, "inputs")):
        steps = Steps(decoder_of(path), [prompt])
        steps.run([Span(0, 0, 2 * GRID - 1)])
        config = steps.decoder.part
        for layer in range(config.num_layers):
            if config.layer_state(layer) is not None:
                steps.cache.of(layer)[plane][1].zero_()
        (line,) = steps.run([Span(0, 2 * GRID - 1, 2 * GRID)])
        assert (line - wanted).abs().max() > 100 * NEAR, f"its {what} hardly count"


@pytest.mark.parametrize("name", KINDS)
def test_requests_go_on_from_a_state_that_a_span_left(name: str, case_named: Callable[[str], Case]) -> None:
    """The first request's span is cut; two others share its beginning, and one forks from it at its end."""
    (model, path), (opening, *tails) = case_named(name), prompts_of(4, (2 * GRID, 30, 7, 50))
    prompts = [opening + tails[0], opening + tails[1], opening + tails[2]]
    steps = Steps(decoder_of(path), prompts, spare=1)
    spare = 1 + len(prompts)
    (first,) = steps.run([Span(0, 0, len(prompts[0]), cuts=((2 * GRID, spare),))])
    whole = Steps(steps.decoder, prompts)
    (uncut,) = whole.run([Span(0, 0, len(prompts[0]))])
    assert torch.equal(first, uncut)
    assert all(map(torch.equal, steps.state(1), whole.state(1)))
    kept = steps.state(spare)
    for row in (1, 2):
        steps.table[row, : 2 * GRID // 16] = steps.table[0, : 2 * GRID // 16]
        steps.sources[row] = spare
    others = steps.run([Span(row, 2 * GRID, len(prompts[row])) for row in (1, 2)])
    for prompt, line in zip(prompts, (first, *others)):
        torch.testing.assert_close(line, expected_logprobs(model, prompt)[-1], rtol=0, atol=NEAR)
    assert all(map(torch.equal, steps.state(spare), kept)), "what is shared is not written"


@pytest.mark.parametrize(("name", "state_dtype"), [("qwen3_5", "bfloat16"), ("kimi_linear", "float16")])
def test_states_have_the_type_that_is_asked_for(
    name: str, state_dtype: Any, case_named: Callable[[str], Case]
) -> None:
    """In 16 bits they are near, and not as near as in float32."""
    (model, path), (prompt,) = case_named(name), prompts_of(6, (3 * GRID,))
    steps = Steps(decoder_of(path, state_dtype=state_dtype), [prompt])
    lines = torch.cat([steps.run([Span(0, at, at + GRID)]) for at in range(0, 3 * GRID, GRID)])
    away = (lines - expected_logprobs(model, prompt)[GRID - 1 :: GRID]).abs().max()
    assert steps.cache.of(1)[0].dtype == getattr(torch, state_dtype)
    assert NEAR < away < 0.3


class Padded(CpuOps):
    """Operators that compute more rows than a step has tokens."""

    def padded(self, num_rows: int) -> int:
        return num_rows + 5


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_rows_that_pad_a_step_change_nothing(name: str, case_named: Callable[[str], Case]) -> None:
    (model, path), (prompt,) = case_named(name), prompts_of(12, (90,))
    decoder = decoder_of(path)
    decoder.ops = Padded()
    steps = Steps(decoder, [prompt])
    for start, stop in ((0, GRID), (GRID, 89), (89, 90)):
        (line,) = steps.run([Span(0, start, stop)])
    torch.testing.assert_close(line, expected_logprobs(model, prompt)[-1], rtol=0, atol=NEAR)


@dataclass
class Planes:
    """The cache of one layer."""

    planes: tuple[Tensor, ...]

    def of(self, layer: int) -> tuple[Tensor, ...]:
        return self.planes


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_a_step_of_fixed_size_checks_drafts_as_packed_spans_do(
    name: str, case_named: Callable[[str], Case]
) -> None:
    """A layer reads any number of accepted drafts again, and padding changes nothing."""
    most, generator = 3, torch.Generator().manual_seed(1)
    decoder = decoder_of(case_named(name)[1], way="reference")
    mixer = decoder.layers[1].attention
    planes = new_states(replace(mixer.sizes, num_tail=most).state("float32"), 8, torch.device("cpu"))
    for plane in planes:
        plane.uniform_(-1, 0, generator=generator)
    slots = SlotPool(6, 80, 16)
    slots.state_pages = np.array([3, 1, 7, 5, 2, 6], dtype=np.int32)
    slots.state_lag[:] = [0, 3, 1, 2, 0, 3]
    rows, drafts = np.array([4, 1, 0, 5, 2]), np.array([3, 3, 0, 0, 1])
    starts, lens = np.array([9, 20, 5, 31, 64]), 1 + drafts
    spans = np.repeat(np.arange(5), lens)
    targets = ragged_ranges(starts + 1, starts + lens + 1)
    batch = Batch(rows, starts, starts + lens, spans, rows[spans], targets, num_drafts=int(drafts.sum()))
    x = torch.randn(batch.num_tokens, decoder.config.hidden_size, generator=generator)

    def run(x: Tensor, states: StateMetadata | DraftRows | None, planes: tuple[Tensor, ...]) -> Tensor:
        at = torch.zeros(len(x), dtype=torch.int64)
        with torch.no_grad():
            return mixer(
                x, x, x, StepInputs(at, at, AttentionMetadata(at, ()), Planes(planes), states=states)
            )

    packed, padded = ([each.clone() for each in planes] for _ in range(2))
    wanted = run(x, state_spans(batch, slots, decoder), tuple(packed))
    width, num_rows = 1 + most, 8
    places = ragged_ranges(width * np.arange(1, 6) - lens, width * np.arange(1, 6))
    wide_x = torch.randn(num_rows * width, x.shape[1], generator=generator)
    wide_x[places] = x
    of_rows = np.zeros((3, num_rows), dtype=np.int32)
    of_rows[:, :5] = slots.state_pages[rows], slots.state_lag[rows], lens
    plan = decoder.recurrence.plan_drafts(torch.from_numpy(of_rows), width, mixer.sizes.conv_width)
    found = run(wide_x, plan, tuple(padded))
    torch.testing.assert_close(found[places], wanted, rtol=0, atol=1e-6)
    for plane, one, other in zip(("states", "inputs"), packed, padded):
        torch.testing.assert_close(other[1:], one[1:], rtol=0, atol=1e-6, msg=plane)
    assert torch.equal(padded[0][0], planes[0][0]), "padding adds to no state"
    for one, other in zip(packed[2:], padded[2:]):  # the tails of drafts, which alone are read again
        for row, count in zip(slots.state_pages[rows].tolist(), drafts.tolist()):
            torch.testing.assert_close(other[row, :count], one[row, :count], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_tensor_ranks_hold_heads_of_the_states(name: str, case_named: Callable[[str], Case]) -> None:
    (_, path), prompts = case_named(name), prompts_of(7, (90, 40))
    spans = [[Span(0, 0, GRID), Span(1, 0, 40)], [Span(0, GRID, 89)], [Span(0, 89, 90)]]

    def work(group: Group) -> tuple[list[Tensor], list[Tensor]]:
        steps = Steps(decoder_of(path, group=group), prompts)
        return [steps.run(step) for step in spans], steps.state(1)

    whole, states = work(ALONE)
    parts = together(2, work)
    for lines, _ in parts:
        for line, wanted in zip(lines, whole):
            torch.testing.assert_close(line, wanted, rtol=0, atol=NEAR)
    for state, *shared in zip(states[::2], *(part[::2] for _, part in parts)):
        torch.testing.assert_close(torch.cat(shared), state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_linears_before_and_behind_a_state_are_quantised_at_load(
    name: str, case_named: Callable[[str], Case]
) -> None:
    """Ranks have the scales that one has; activations, which each rank quantises itself, are near."""
    (model, path), (prompt,) = case_named(name), prompts_of(10, (90,))
    scheme = Quantization(("lm_head",), is_stored=False)

    def work(group: Group) -> tuple[Tensor, list[Any]]:
        decoder = empty_decoder(path, "reference", group, quantization=scheme)
        weights.load(decoder, path)
        linear = decoder.layers[1].attention.output
        return Steps(decoder, [prompt]).run([Span(0, 0, 90)])[0], [linear.form, linear.packed[1]]

    (line, (form, scales)), wanted = work(ALONE), expected_logprobs(model, prompt)[-1]
    assert form == "quantize"
    assert NEAR < (line - wanted).abs().max() < 2
    for part, (_, own) in together(2, work):
        assert torch.equal(own, scales)
        assert (part - wanted).abs().max() < 2


@pytest.mark.parametrize("name", KINDS)
def test_lines_are_scored_as_in_transformers(name: str, case_named: Callable[[str], Case]) -> None:
    """Each line begins with a state of its own."""
    (model, path), lines = case_named(name), prompts_of(11, (40, 3))
    found = score(path, lines, "float32").logprobs.split([len(line) - 1 for line in lines])
    for line, ours in zip(lines, found):
        wanted = expected_logprobs(model, line)[:-1].gather(1, torch.tensor(line[1:])[:, None])[:, 0]
        torch.testing.assert_close(ours, wanted, rtol=0, atol=NEAR)


class Passed(StageLinks):
    """What one stage hands to the next, in one process."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def send(self, x: Tensor) -> None:
        self._kept.append(x.clone())

    def receive(self, x: Tensor) -> Tensor:
        return x.copy_(self._kept.pop(0))


@pytest.mark.parametrize("name", ["qwen3_next_layer_types", "kimi_linear"])
def test_stages_keep_the_states_of_their_own_layers(name: str, case_named: Callable[[str], Case]) -> None:
    (model, path), (prompt,), links = case_named(name), prompts_of(11, (100,)), Passed()
    stages = [Steps(decoder_of(path, stage=(stage, 2, links)), [prompt]) for stage in range(2)]
    for start, stop in ((0, GRID), (GRID, 99), (99, 100)):
        lines = [steps.run([Span(0, start, stop)]) for steps in stages]
    torch.testing.assert_close(lines[1][0], expected_logprobs(model, prompt)[-1], rtol=0, atol=NEAR)
    counts = [steps.decoder.part.num_recurrent for steps in stages]
    assert min(counts) > 0
    assert [len(steps.state(1)) for steps in stages] == [2 * count for count in counts]


@pytest.mark.parametrize("name", KINDS)
def test_random_weights_are_those_of_one_rank(name: str, case_named: Callable[[str], Case]) -> None:
    (_, path), (prompt,) = case_named(name), prompts_of(8, (70,))

    def work(group: Group) -> Tensor:
        decoder = empty_decoder(path, group=group)
        weights.random(decoder, seed=3)
        return Steps(decoder, [prompt]).run([Span(0, 0, 70)])

    whole = work(ALONE)
    for part in together(2, work):
        torch.testing.assert_close(part, whole, rtol=0, atol=NEAR)


def test_ranks_that_cannot_share_the_heads_are_refused(case_named: Callable[[str], Case]) -> None:
    with pytest.raises(ValueError, match=r"4 tensor ranks .* 2 key heads of recurrent states .* one of 1, 2"):
        together(4, lambda group: empty_decoder(case_named("qwen3_5")[1], group=group))


TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}


def with_images(kind: str, path: Path) -> Any:
    """A model that reads images, too, saved under the names of the hub."""
    text = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= HEADS | {"rope_parameters": HALF | {"mrope_section": [2, 2, 2]}, "eos_token_id": None}
    text |= EXPERTS if kind == "Moe" else {"intermediate_size": 80}
    config_class, model_class = (
        getattr(transformers, f"Qwen3_5{kind}{name}") for name in ("Config", "ForConditionalGeneration")
    )
    config = config_class(text_config=text, vision_config=TOWER, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    _fill(model, seed=5, norm=0.0)
    model.save_pretrained(path)
    return model


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as Qwen3.5's files have them: those of a layer in one tensor, gate before up."""
    made = {name: each for name, each in tensors.items() if ".experts." not in name}
    for block in {name.partition(".experts.")[0] for name in tensors.keys() - made.keys()}:

        def of(role: str, block: str = block) -> Tensor:
            names = [f"{block}.experts.{number}.{role}.weight" for number in range(EXPERTS["num_experts"])]
            return torch.stack([tensors[name] for name in names])

        made[f"{block}.experts.gate_up_proj"] = torch.cat((of("gate_proj"), of("up_proj")), 1)
        made[f"{block}.experts.down_proj"] = of("down_proj")
    return made


def test_joined_experts_of_a_decoder_without_a_head_are_read(tmp_path: Path) -> None:
    path = make(VARIANTS["qwen3_5_moe"], tmp_path)[1]
    whole, tensors = decoder_of(path).state_dict(), load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    bare = {name.removeprefix("model."): each for name, each in stacked(tensors).items()}
    assert "layers.1.mlp.experts.down_proj" in bare
    save_file(bare, path / "model.safetensors")
    found = decoder_of(path).state_dict()
    assert found.keys() <= whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in found)


@pytest.mark.parametrize("kind", ["", "Moe"])
def test_the_text_is_read_of_a_checkpoint_that_reads_images(kind: str, tmp_path: Path) -> None:
    model = with_images(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    further = {"mtp.fc.weight": torch.ones(2), "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2)}
    save_file(stacked(tensors) | further, tmp_path / "model.safetensors")
    assert (kind == "Moe") == ("model.layers.0.mlp.experts.down_proj" in tensor_names(tmp_path))
    asked = ["device.compile=false", "cache.memory_gib=0.01", "scheduler.num_slots=2"]
    assert build(load("recipes/any/cpu.yaml", [f"model.path={tmp_path}", *asked])).config.num_recurrent == 3
    (prompt,) = prompts_of(9, (90,))
    with torch.no_grad():
        wanted = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].log_softmax(-1)

    def work(group: Group) -> Tensor:
        return Steps(decoder_of(tmp_path, group=group), [prompt]).run([Span(0, 0, 90)])[0]

    for line in [work(ALONE), *together(2, work)]:
        torch.testing.assert_close(line, wanted, rtol=0, atol=NEAR)
    lost, named = ("experts.gate_up_proj", "experts.0.gate_proj.weight") if kind else ("up_proj.weight",) * 2
    short = {name: each for name, each in stacked(tensors).items() if f"layers.1.mlp.{lost}" not in name}
    save_file(short, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"missing: model\.layers\.1\.mlp\.{named} "):
        decoder_of(tmp_path)
