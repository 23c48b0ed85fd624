"""A folder stands in place of a recipe: the one that fits the folder and the devices is chosen."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from borders.files import in_one_line
from devices import present
from devices.ascend_limits import PRODUCTS
from devices.present import Present, npus
from models.checkpoint.files import SINGLE, checkpoint_files
from recipes.fitting import fitting, with_recipe, with_settings
from recipes.model_folder import model_folder
from recipes.schema.reader import read
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from scripts import generate
from serving.llm import LLM, SamplingParams
from serving.server import name_of
from tests.each_of import each_of
from tests.patience import PATIENCE_S
from tests.recipes import published

GIB = 2**30
TINY = "recipes/tiny/weights"
# A start runs the largest step
STEPS = ["cache.memory_gib=0.05", "scheduler.num_slots=4", "scheduler.max_batch_tokens=32"]
SMALL = [*STEPS, "device.compile=false", "device.threads=1"]
CPU = Present("cpu", "4 cores", memory_bytes=34 * GIB)
LLAMA_70B = published.LLAMA3_3_70B
LLAMA_8B = LLAMA_70B | {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
LLAMA_8B |= {"intermediate_size": 14336}
SMI_OF_A_CHIP = """
| 0     {name:<20}| OK            | 91.3        33                0    / 0             |
| 0     0                   | 0000:C1:00.0  | 0           0    / 0          {used} / {total}         |
"""


def folder(path: Path, config: dict[str, Any]) -> str:
    """A checkpoint without its weights, which no choice reads."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def ascend(product: str, count: int = 1, gib: float = 60) -> Present:
    return Present("npu", f"Ascend {product}", product, count, int(gib * GIB))


def chosen_keys(model: str, found: Present, *overrides: str) -> dict[str, str]:
    """The keys that are chosen, beside the model's path."""
    keys = dict(each.partition("=")[::2] for each in fitting(model, overrides, found=found).overrides)
    assert keys.pop("model.path")
    return keys


@each_of(
    "name, product",
    [
        *(("910B4-1", "910B"), ("Ascend910", "910C"), ("310P3", "310P"), ("910B", "910"), ("910ProB", "910")),
        ("Ascend950PR", "950"),
    ],
)
def test_npu_smi_says_which_product_it_is_and_what_is_free(name: str, product: str) -> None:
    printed = 2 * SMI_OF_A_CHIP.format(name=name, used=3072, total=65536)
    assert npus(printed, {}) == Present("npu", name, product, 2, 61 * GIB)
    assert npus(printed, {"ASCEND_RT_VISIBLE_DEVICES": "1"}).count == 1
    for wrong in (printed.replace(name, "980X"), ""):
        with pytest.raises(ValueError, match=r"device\.kind=npu device\.product=910B device\.memory_gib=60"):
            npus(wrong, {})


def test_an_npu_that_others_use_is_named_with_those_that_are_free(tmp_path: Path) -> None:
    idle = SMI_OF_A_CHIP.format(name="910B4-1", used=3072, total=65536)
    printed = 2 * idle + SMI_OF_A_CHIP.format(name="910B4-1", used=63488, total=65536) + idle
    found = npus(printed, {})
    words = r"NPU 2 has 2\.00 GiB free, another 61\.00; to .*, export ASCEND_RT_VISIBLE_DEVICES=0,1,3"
    with pytest.raises(RecipeError, match=rf"4 x 910B4-1 cannot hold the model: .*; {words}"):
        fitting(folder(tmp_path, LLAMA_70B), found=found)
    half = npus(printed.replace("63488", "36864"), {})
    assert half.busy in fitting(folder(tmp_path / "small", LLAMA_8B), found=half).reasons
    assert npus(printed, {"ASCEND_RT_VISIBLE_DEVICES": "3,0"}).busy == ""
    assert "ASCEND_RT_VISIBLE_DEVICES=3" in npus(printed, {"ASCEND_RT_VISIBLE_DEVICES": "2,3"}).busy


CUDA_DEVICES = """
class cuda:
    free = [{free}]
    device_count = lambda: len(cuda.free)
    get_device_name = "GPU {{}}".format
    mem_get_info = lambda number: (cuda.free[number] << 30, 80 << 30)
    get_device_capability = lambda number: (9 - number, 0)
"""


@pytest.fixture
def cuda_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Stand in for the torch of another process, with CUDA devices of so many free GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(present, "num_npus", lambda: 0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def stand_in(free: str) -> None:
        (tmp_path / "torch.py").write_text(CUDA_DEVICES.format(free=free))

    return stand_in


def test_another_process_asks_the_cuda_devices(
    cuda_devices: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where this one asks how much is free, each device holds memory for it until it ends."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: pytest.fail("this process asks"))
    cuda_devices("79, 78")
    assert present.present({}) == Present("cuda", "GPU 0", None, 2, 78 * GIB, "", (8, 0))
    cuda_devices("None")
    with pytest.raises(ValueError, match=r"is not known: TypeError: .* device\.kind=cpu$"):
        present.present({})
    cuda_devices("(_ for _ in ()).throw(RuntimeError('CUDA error: out of memory\\nCompile with more'))")
    with pytest.raises(ValueError, match=r"is not known: RuntimeError: CUDA error: out of memory; see"):
        present.present({})
    cuda_devices("__import__('time').sleep(60)")
    monkeypatch.setattr(present, "CUDA_LIMIT_S", 0.5)
    with pytest.raises(ValueError, match=r"is not known: they did not answer in 0\.5 s; see nvidia-smi"):
        present.present({})


@each_of(
    "said, busy, idle",
    [
        ({}, "1", "0,2"),
        ({"CUDA_VISIBLE_DEVICES": "4, 6,7"}, "6", "4,7"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, "GPU-b", "GPU-a,GPU-c"),
    ],
)
def test_a_cuda_device_that_others_use_is_named_as_its_variable_names_it(
    said: dict[str, str], busy: str, idle: str, tmp_path: Path
) -> None:
    free = (79, 2, 70)
    found = present.cuda_devices(json.dumps([("H100", each * GIB, (9, 0)) for each in free]), said)
    words = f"CUDA device {busy} has 2.00 GiB free, another 79.00; .* export CUDA_VISIBLE_DEVICES={idle}$"
    with pytest.raises(RecipeError, match=words):
        fitting(folder(tmp_path, LLAMA_70B), found=found)


def test_an_old_cuda_device_gets_the_attention_that_starts_there(tmp_path: Path) -> None:
    model, plain = folder(tmp_path, LLAMA_8B), {"device.attention": "reference", "device.graphs": "0"}
    for capability, keys in ((7, 5), plain), ((8, 0), {}):
        found = Present("cuda", "GPU", memory_bytes=79 * GIB, capability=capability)
        assert chosen_keys(model, found) == keys


def test_memory_alone_changes_no_product_and_brings_no_hidden_npu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two NPUs of four are visible, of which npu-smi says that they are 310P."""
    for number in range(4):
        (tmp_path / f"davinci{number}").touch()
    monkeypatch.setattr(present, "DEVICES", tmp_path)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1,3")
    shown = 4 * SMI_OF_A_CHIP.format(name="310P3", used=3072, total=65536)
    monkeypatch.setattr(present, "_npu_smi", lambda: shown)
    model, kind, memory = folder(tmp_path / "model", LLAMA_70B), "device.kind=npu", "device.memory_gib=40"
    chosen = fitting(folder(tmp_path / "small", LLAMA_8B), [kind, memory])
    assert read(ROOT / chosen.recipe, chosen.overrides).recipe.device.product == "310P"
    for product, name in ([], "310P3"), (["device.product=910B"], "Ascend 910B"):
        with pytest.raises(RecipeError, match=f"2 x {name} cannot hold the model"):
            fitting(model, [kind, memory, *product])


@pytest.mark.parametrize("product", [each.name for each in PRODUCTS])
def test_each_product_has_a_recipe_that_its_operators_take(product: str, tmp_path: Path) -> None:
    chosen = fitting(folder(tmp_path, LLAMA_8B), found=ascend(product))
    recipe = read(ROOT / chosen.recipe, chosen.overrides).recipe
    assert (recipe.device.kind, recipe.device.product) == ("npu", product)
    assert recipe.device.attention == ("reference" if product == "910" else "fused")
    assert recipe.model.dtype == ("float16" if product in ("310P", "910") else "auto")


def test_what_a_product_does_not_compute_is_left_to_what_does(tmp_path: Path) -> None:
    wide = folder(tmp_path / "wide", LLAMA_8B | {"head_dim": 256})
    assert chosen_keys(wide, ascend("310P")) == {"cache.page_size": "64"}
    assert chosen_keys(wide, ascend("910B")) == {}
    assert chosen_keys(wide, ascend("950")) == {"device.attention": "reference", "device.graphs": "0"}
    exact = folder(tmp_path / "exact", LLAMA_8B | {"torch_dtype": "float32"})
    assert chosen_keys(exact, ascend("910C")) == {"model.dtype": "bfloat16"}
    assert chosen_keys(exact, ascend("910C"), "model.dtype=float16") == {}, "what the user says, stays"


def test_requests_are_no_longer_than_fused_attention_reads(tmp_path: Path) -> None:
    """Where the positions of the model and the cache allow longer ones."""
    long = folder(tmp_path, published.QWEN2_5_7B | {"max_position_embeddings": 1010000})
    longest = {"scheduler.max_request_tokens": "262145"}
    assert chosen_keys(long, ascend("910B")) == longest
    assert chosen_keys(long, ascend("910B"), "parallel.tensor=1") == longest
    assert chosen_keys(long, ascend("910B"), "max_model_len=1000") == {}
    plain = "device.attention=reference", "device.graphs=0"
    assert chosen_keys(long, ascend("910B", gib=300), *plain) == {}
    assert chosen_keys(long, ascend("910B"), "cache.num_pages=64", "parallel.tensor=1") == {}
    assert "scheduler.max_request_tokens" not in chosen_keys(long, ascend("310P", gib=300))


def test_the_users_values_are_read_as_a_recipe_reads_them(tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA_8B)
    for virtual in ("true", "True", "yes"):
        overrides = [f"device.virtual={virtual}", "cache.num_pages=64", "parallel.tensor=1"]
        assert fitting(model, overrides).recipe == "recipes/any/910b.yaml"
    for same in ("device.virtual=no", "device.product=null", "device.memory_gib=null"):
        assert fitting(model, [same], found=CPU).recipe == "recipes/any/cpu.yaml"
    with pytest.raises(RecipeError, match=r"device\.virtual: 'perhaps' is not allowed"):
        fitting(model, ["device.virtual=perhaps"], found=CPU)


@pytest.mark.parametrize(
    ("config", "found", "keys"),
    [
        (LLAMA_8B, ascend("910B", 8), {}),
        (LLAMA_70B, ascend("910B", 8), {"parallel.tensor": "4"}),
        (LLAMA_70B, Present("cuda", "H100", count=8, memory_bytes=79 * GIB), {"parallel.tensor": "4"}),
        (LLAMA_70B, Present("cuda", "H200", count=2, memory_bytes=139 * GIB), {"parallel.tensor": "2"}),
        (LLAMA_8B, ascend("310P", 4, gib=22), {"parallel.tensor": "2"}),
        (LLAMA_8B | {"torch_dtype": "float32"}, CPU, {"cache.memory_gib": "2"}),
    ],
)
def test_as_many_devices_as_hold_the_model(
    config: dict[str, Any], found: Present, keys: dict[str, str], tmp_path: Path
) -> None:
    model = folder(tmp_path, config)
    assert chosen_keys(model, found) == keys
    asked = chosen_keys(model, found, "parallel.tensor=8", "cache.num_pages=64")
    assert not {"parallel.tensor", "cache.memory_gib"} & asked.keys()


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"} | {
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
}


def test_the_devices_of_all_machines_hold_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the launcher names, or the recipe; each holds as many ranks."""
    model, two = folder(tmp_path, LLAMA_70B), Present("cuda", "H100", count=2, memory_bytes=60 * GIB)
    with pytest.raises(RecipeError, match="2 x H100 cannot hold the model: "):
        fitting(model, found=two)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    chosen = fitting(model, found=two)
    assert "parallel.tensor=4" in chosen.overrides
    assert "parallel.tensor=4, since fewer of 60.00 GiB of 2 machines (SLURM) hold too" in str(chosen.reasons)
    assert chosen_keys(folder(tmp_path / "8b", LLAMA_8B), two) == {}, "one device of a machine holds it"
    monkeypatch.setenv("SLURM_NNODES", "3")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    with pytest.raises(RecipeError, match=r"of 3 machines \(SLURM\) cannot hold the model"):
        fitting(model, found=two)
    for name in SLURM:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NODE_RANK", "0")
    nodes = "parallel.nodes=[a, b]"
    assert chosen_keys(model, two, nodes) == {"parallel.tensor": "4"}
    sixteen = Present("cuda", "H100", count=16, memory_bytes=8 * GIB)
    assert chosen_keys(model, sixteen, nodes) == {"parallel.tensor": "32"}


def test_a_model_that_no_number_of_devices_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"2 x Ascend 910B cannot hold the model: .*weights.*") as refused:
        fitting(folder(tmp_path, LLAMA_70B), found=ascend("910B", 2))
    assert "\n" not in str(refused.value)


@each_of(
    "config, key, words",
    [
        (LLAMA_8B, "max_model_len=200000", "200000 is more than the 131072 positions of the model; lower it"),
        (LLAMA_8B, "cache.num_states=100", "is read for models whose layers keep a recurrent state; leave"),
        (published.DEEPSEEK_V2_LITE, "max_loras=2", "attention over latents has no adapters here; set it to"),
    ],
)
def test_what_no_memory_would_mend_is_refused_as_a_start_refuses_it(
    config: dict[str, Any], key: str, words: str, tmp_path: Path
) -> None:
    found = Present("cuda", "H200", None, 2, 40 * GIB, "leave out what others use")
    with pytest.raises(RecipeError, match=rf"^[a-z_.]+: {words}"):
        fitting(folder(tmp_path, config), [key], found=found)


def test_a_cache_of_each_device_holds_longer_requests_on_more_of_them(tmp_path: Path) -> None:
    model, cache = folder(tmp_path, LLAMA_8B), ["cache.memory_fraction=null", "cache.memory_gib=4"]
    found = Present("cuda", "H200", None, 2, 139 * GIB)
    assert chosen_keys(model, found, *cache, "max_model_len=50000") == {"parallel.tensor": "2"}
    with pytest.raises(RecipeError, match=r"^[a-z_.]+: 100000 is more than the 65\d+ tokens that the cache"):
        fitting(model, [*cache, "max_model_len=100000"], found=found)


def test_settings_of_a_python_caller_are_written_as_keys() -> None:
    given: dict[str, Any] = {"dtype": torch.bfloat16, "max_num_seqs": np.int64(8), "seed": None}
    given |= {"download_dir": Path("a b"), "hf_overrides": {"to": Path("x"), "by": np.float32(0.5)}}
    written = ("dtype=bfloat16", "max_num_seqs=8", "download_dir=a b", 'hf_overrides={"to": "x", "by": 0.5}')
    assert with_settings(["a=b"], given) == ("a=b", *written)


@pytest.mark.parametrize("value", [len, {1}, [torch.ones(1)], {(1, 2): 3}])
def test_a_setting_that_no_recipe_can_have_is_named(value: object) -> None:
    with pytest.raises(RecipeError, match=r"^hf_overrides: .*; give a text, a number") as refused:
        with_settings((), {"hf_overrides": value})
    assert "\n" not in str(refused.value)


@each_of(
    "template, keys",
    [
        (r'<tool_call>\n{\"name\": <function-name>} {% if "</think>" in x %}', ("hermes", "think")),
        ("<tool_call>\n<function=name>", ("qwen3_coder", None)),
        ("<seed:tool_call>\n<function=name><seed:think>", ("seed_oss", "seed")),
        ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value></think>", ("glm45", "think")),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>", ("glm47", None)),
        ("<minimax:tool_call><invoke></think>", ("minimax_m2", "think")),
        ("<tool_calls:opensource><tool_sep:opensource><arg_key:opensource>", ("hy_v3", None)),
        ("<tool_calls>[{}]</tool_calls><answer></think>", ("hunyuan_a13b", "hunyuan")),
        ("<tool_calls_section_begin|><|tool_call_argument_begin|>", ("kimi_k2", None)),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ n }}<｜tool▁sep｜>", ("deepseek_v31", None)),
        ("[TOOL_CALLS]{{ n }}[ARGS][THINK]", ("mistral_v11", "mistral")),
        ("<|tool_call>call:{{ n }}<|channel>thought", ("gemma4", "gemma4")),
        ("<function_calls>", ("olmo3", None)),
        (r'<tool_call>\n{"name": <response> </think>', ("hermes", "ernie")),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", ("mistral", None)),
        ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜></think>", ("deepseek", "think")),
        ('<|python_tag|>{"name": f, "parameters": p}', ("llama3_json", None)),
        ("<|start|>assistant<|channel|>commentary to=functions.f", ("harmony", "harmony")),
        ("{{ message.content }}", (None, None)),
        (
            'within <tool_calls></tool_calls>:\n<tool_calls>\n{"name": n, "arguments": a}\n</tool_calls>',
            (None, None),
        ),
        ("<longcat_tool_call>{{ n }}\n<longcat_arg_key>k</longcat_arg_key>", (None, None)),
        ('<longcat_tool_call>\\n{"name": n, "arguments": a}', ("longcat", None)),
        ('in the format {"name": function name, "parameters": dictionary of', ("llama3_json", None)),
        ("""{{- '{"name": "' + c.name + '", ' }}\n{{- '"parameters": ' }}""", ("llama3_json", None)),
        ("""{{ '{"name": "' + t.name + '", "description": "' + d }}""", (None, None)),
        (
            '<|python_start|><|python_end|>{{- \'{"name": "\' + n }}{{- \'"parameters": \' }}',
            ("llama3_json", None),
        ),
        ("<|python_start|>[f(a=1)]<|python_end|>", ("pythonic", None)),
    ],
)
def test_the_template_says_how_calls_and_thoughts_are_written(
    template: str, keys: tuple[str | None, str | None], tmp_path: Path
) -> None:
    model = folder(tmp_path, LLAMA_8B)
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    names = "server.tool_format", "server.reasoning"
    expected = {name: value for name, value in zip(names, keys) if value is not None}
    assert chosen_keys(model, ascend("910B")) == expected
    assert chosen_keys(model, ascend("910B"), *(f"{name}=none" for name in names)) == {}


def test_named_templates_are_read_as_one_template_is(tmp_path: Path) -> None:
    template = r"""{{- 'in <tool_call></tool_call>:\n<tool_call>\n{"name": n, "arguments": a}' }}</think>"""
    named = [{"name": "default", "template": "{{ x }}"}, {"name": "tool_use", "template": template}]
    model = folder(tmp_path, LLAMA_8B)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    expected = {"server.tool_format": "hermes", "server.reasoning": "think"}
    assert chosen_keys(model, ascend("910B")) == expected


def test_a_name_is_looked_up_in_both_caches(tmp_path: Path) -> None:
    hub = tmp_path / "hub" / "models--org--Qwen2.5"
    for revision in ("aaa", "bbb"):
        folder(hub / "snapshots" / revision, LLAMA_8B)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("aaa\n")
    scope = Path(folder(tmp_path / "scope/models/org/Qwen2___5-7B", LLAMA_8B))
    caches = {"HF_HUB_CACHE": str(tmp_path / "hub"), "MODELSCOPE_CACHE": str(tmp_path / "scope")}
    assert model_folder("org/Qwen2.5", caches) == hub / "snapshots/aaa"
    assert model_folder(str(hub), {}) == hub / "snapshots/aaa"
    assert model_folder("org/Qwen2.5-7B", caches) == scope
    absent = "hf download org/other, or modelscope download --model org/other"
    with pytest.raises(ValueError, match=absent):
        model_folder("org/other", caches)


@each_of(
    "folder, name",
    [
        (
            "c/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca",
            "Qwen/Qwen3-0.6B",
        ),
        ("c/hub/models--gpt2/snapshots/aaa", "gpt2"),
        ("modelscope/hub/models/Qwen/Qwen3-0___6B", "Qwen/Qwen3-0.6B"),
        ("modelscope/hub/Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("mine/models/Qwen/Qwen2___5-7B", "Qwen/Qwen2.5-7B"),
        ("mine/Qwen2___5-7B", "Qwen2.5-7B"),
        ("models/Qwen/Qwen3-8B", "Qwen3-8B"),
        ("models/Qwen3-8B", "Qwen3-8B"),
        ("recipes/llama/weights", "llama"),
    ],
)
def test_a_model_of_a_cache_is_served_by_the_name_that_it_was_downloaded_by(folder: str, name: str) -> None:
    assert name_of(Path("/a") / folder, "recipes/llama/cpu.yaml") == name


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("m.gguf", "is a GGUF file of llama.cpp"),
        ("pytorch_model.bin", "PyTorch's pickle"),
        ("model.safetensors", "give its folder"),
        ("m.om", "compiled for one Ascend product"),
        ("consolidated.safetensors", "Mistral's own format, .* take config.json and model.safetensors, or"),
        ("consolidated-00001-of-00002.safetensors", "Mistral's own format, which is not read; take config"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_files_of_other_programs_are_refused_by_their_kind(
    file: str, words: str, whole: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_bytes(b"")
    if whole:  # a folder that holds nothing else
        words = "holds no config.json" if file == "model.safetensors" else words
    given = str(tmp_path if whole else tmp_path / file)
    with pytest.raises(ValueError, match=words) as refused:
        with_recipe("scripts.generate", [given, "--prompt", "a"])
    assert "\n" not in str(refused.value)
    if not whole:
        with pytest.raises(ValueError, match=words):
            generate.main(["recipes/any/cpu.yaml", f"model.path={given}", "--prompt", "a"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipes/tiny"], "did you mean recipes/tiny/agent.yaml?"),
        (["recipes/any/cpu.yaml", TINY], f"give model.path={TINY}, or the folder alone in place of the"),
        (["recipes/any/cpu.yaml"], "add model.path=FOLDER, or name the folder in place of the recipe"),
        (["nowhere"], "or the folder of a checkpoint"),
        (["recipes/any/cpu.yaml", "model.path=${NO_SUCH}/m"], "export NO_SUCH=FOLDER, or write the path out"),
        ([TINY, "device.kind=npu"], "leave it out"),
    ],
)
def test_a_mistake_names_the_command_that_works(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        generate.main([*arguments, "--prompt", "a"])


def test_a_folder_answers_and_says_which_command_gives_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    generate.main([TINY, *SMALL, "--prompt", "348+275=", "--max-tokens", "8"])
    printed = capsys.readouterr()
    assert printed.out == "623\n"
    same = shlex.split(printed.err.partition("the same is ")[2].splitlines()[0])
    assert same[:5] == ["python", "-m", "scripts.generate", "recipes/any/cpu.yaml", f"model.path={TINY}"]
    generate.main(same[3:])
    assert capsys.readouterr().out == "623\n"


def test_llm_takes_a_folder(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    llm = LLM(None, *SMALL, model=TINY)
    params = SamplingParams(temperature=0, max_tokens=8)
    assert llm.generate("348+275=", params, use_tqdm=False)[0].outputs[0].text == "623"
    assert "the same is LLM('recipes/any/cpu.yaml', 'model.path=recipes/tiny/weights'" in caplog.text
    with pytest.raises(ValueError, match="give one of the two"):
        LLM("recipes/tiny/cpu.yaml", model=TINY)


@pytest.mark.slow
def test_the_launcher_runs_the_recipe_that_was_chosen(tmp_path: Path) -> None:
    given = ["generate", "--prompt", "a\nb", "--max-num-seqs", "2", TINY, "device.kind=cpu"]
    command = ["bash", "scripts/launch.sh", "--dry-run", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0
    chosen = "'recipes/any/cpu.yaml' 'model.path=recipes/tiny/weights' 'max_num_seqs=2' 'device.kind=cpu'"
    assert f"'--prompt' $'a\\nb' {chosen}" in done.stderr


@pytest.mark.parametrize("verb", [["scripts.benchmark", "offline"], ["recipes", "show"], ["scripts.serve"]])
def test_every_verb_with_a_recipe_takes_a_folder(verb: list[str]) -> None:
    module, *before = verb
    chosen = ["recipes/any/cpu.yaml", f"model.path={TINY}", "device.kind=cpu", "--json"]
    assert with_recipe(module, [*before, TINY, "device.kind=cpu", "--json"]) == [*before, *chosen]
    recipe = [*before, "recipes/tiny/cpu.yaml", "cache.page_size=32"]
    assert with_recipe(module, recipe) == recipe
    others = with_recipe(module, [*before, "-tp", "2", "recipes/tiny/cpu.yaml"])
    assert others == [*before, "recipes/tiny/cpu.yaml", "tp=2"]


def test_mistrals_own_weights_are_passed_over_beside_others_and_refused_alone(
    tmp_path: Path,
) -> None:
    for name in ("consolidated.safetensors", "params.json", "config.json", SINGLE):
        (tmp_path / name).write_text("{}")
    assert checkpoint_files(tmp_path) == [tmp_path / SINGLE]
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ValueError, match=r"consolidated\.safetensors is in Mistral's own format"):
        checkpoint_files(tmp_path)


VOCABULARY = "tokenizer.model"
SHARD = "model-0000{}-of-00002.safetensors"


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / SINGLE).rename(folder / SHARD.format(1)), "and shards 2 of 2; download"),
        (lambda folder: relinked(folder / SINGLE, "/no/such/blob"), "is a link that leads to no file"),
        (lambda folder: relinked(folder / SINGLE, SINGLE), "is a link that leads to no file"),
        (lambda folder: relinked(folder / "config.json", "config.json"), "the link leads to itself"),
        (lambda folder: relinked(folder / VOCABULARY, VOCABULARY), "the link leads to itself"),
        (lambda folder: (folder / SINGLE).write_bytes(b"version https://git-lfs\n"), "git lfs pull"),
    ],
)
def test_a_broken_folder_is_one_line(break_it: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / TINY, tmp_path / "m")
    break_it(tmp_path / "m")
    with pytest.raises((ValueError, OSError)) as refused:
        generate.main([str(tmp_path / "m"), *SMALL, "--prompt", "a"])
    assert words in in_one_line(refused.value)


REFUSED = """
import sys
from borders.files import in_one_line
from scripts import generate

for folder in sys.argv[1:]:
    try:
        generate.main([folder, "cache.memory_gib=0.05", "--prompt", "a"])
    except (OSError, ValueError) as error:
        print(in_one_line(error), flush=True)
"""


@pytest.mark.slow
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    """The folder, its configuration or its weights, by one process without the rights of root."""
    files = {tmp_path / name: name for name in ("m", "m1/config.json", f"m2/{SINGLE}")}
    folders = [tmp_path / name for name in ("m", "m1", "m2")]
    for made in folders:
        shutil.copytree(ROOT / TINY, made)
    for path in files:
        path.chmod(0)
    lost = "-dac_override,-dac_read_search"  # root with these capabilities reads what nobody may
    unprivileged = ["setpriv", f"--bounding-set={lost}", f"--inh-caps={lost}"] if os.geteuid() == 0 else []
    command = [*unprivileged, sys.executable, "-c", REFUSED, *map(str, folders)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    folders[0].chmod(0o755)  # it is removed afterwards
    said = done.stdout.splitlines()
    assert len(said) == len(files), done.stderr
    for line, path in zip(said, files):
        assert "permission denied" in line, line
        assert str(path) in line


def relinked(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def test_shards_without_an_index_are_read_if_all_are_there(tmp_path: Path) -> None:
    for shard in ("model-0000{}-of-000002.safetensors", SHARD):  # DeepSeek counts with six digits
        files = [tmp_path / shard.format(number) for number in (1, 2)]
        for each in files:
            each.touch()
        assert checkpoint_files(tmp_path) == files
        if shard != SHARD:
            for each in files:
                each.unlink()
    for other in ("model-00003-of-00003.safetensors", "model-2-of-2.safetensors"):
        (tmp_path / other).touch()
        with pytest.raises(ValueError, match=r"holds model-.*: keep the shards of one checkpoint"):
            checkpoint_files(tmp_path)
        (tmp_path / other).unlink()
    (tmp_path / SHARD.format(1)).unlink()
    with pytest.raises(ValueError, match="and shards 1 of 2; download what is missing"):
        checkpoint_files(tmp_path)
