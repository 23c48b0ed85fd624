"""Find the checkpoint folder that a user names: by its path, or as ORG/NAME in a cache of downloads.

The caches are those of Hugging Face and of ModelScope; nothing is downloaded. Files of other programs are
refused by their kind, with the way to a folder that can be read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from borders.files import MOST_JSON_BYTES
from models.checkpoint.files import MISTRALS, mistrals_own

CONFIG = "config.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DOT = "___"  # what ModelScope writes for the dots of a model's name
_DOWNLOAD = "download the model's safetensors: hf download ORG/NAME, or modelscope download --model ORG/NAME"
_CONVERT = (
    'write it as safetensors: python -c "from transformers import AutoModelForCausalLM as M;'
    " M.from_pretrained('{folder}').save_pretrained('OUT')\""
)
# The formats of calls: the mark in a template, and what must stand beside it
_CALLS = (
    ("deepseek_v32", "｜DSML｜", ""),
    ("deepseek", "<｜tool▁calls▁begin｜>", "```json|function<｜tool▁sep｜>"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    ("kimi_k2", "<|tool_call_argument_begin|>", ""),
    ("mistral_v11", "[TOOL_CALLS]", r"\[ARGS\]"),
    ("mistral", "[TOOL_CALLS]", ""),
    ("gemma4", "<|tool_call>", "call:"),
    ("minimax_m2", "<minimax:tool_call>", ""),
    ("seed_oss", "<seed:tool_call>", ""),
    ("longcat", "<longcat_tool_call>", r"<longcat_tool_call>(\\n|\s)*\{+\\*[\"']name"),
    ("hy_v3", "<tool_calls", "<tool_sep"),
    ("hunyuan_a13b", "<tool_calls>", r"<tool_calls>[^<{\[]{0,20}\["),
    ("olmo3", "<function_calls>", ""),
    ("qwen3_coder", "<tool_call>", "<function="),
    ("glm47", "<arg_key>", "</arg_key><arg_value>"),
    ("glm45", "<arg_key>", ""),
    ("hermes", "<tool_call>", r"<tool_call>(\\n|\s)*\{+\\*[\"']name"),
    ("llama3_json", "<|python_tag|>", r"[\"']parameters"),
    ("llama3_json", '{"name": ', r"""(?s)\{"name": ([^"'{}]{1,40}, |"'.{1,200}?')"parameters": """),
    ("pythonic", "<|python_start|>", ""),
)
# The same for thoughts
_THOUGHTS = (
    ("seed", "<seed:think>", ""),
    ("mistral", "[THINK]", ""),
    ("gemma4", "<|channel>", "thought"),
    ("hunyuan", "</think>", "<answer>"),
    ("ernie", "</think>", "<response>"),
    ("think", "</think>", ""),
)
OTHER_KINDS = {  # A suffix of files: what they are, and how to get a folder that can be read
    ".gguf": ("a GGUF file of llama.cpp", _DOWNLOAD),
    ".ggml": ("a GGML file of llama.cpp", _DOWNLOAD),
    ".bin": ("PyTorch's pickle, which may run any code when it is read", _CONVERT),
    ".pt": ("PyTorch's pickle, which may run any code when it is read", _CONVERT),
    ".pth": ("PyTorch's pickle, which may run any code when it is read", _CONVERT),
    ".ckpt": ("a training checkpoint", _CONVERT),
    ".onnx": ("an ONNX graph", _DOWNLOAD),
    ".om": ("a graph compiled for one Ascend product", _DOWNLOAD),
    ".mindir": ("a graph of MindSpore", _DOWNLOAD),
}


def names_model(given: str) -> bool:
    """Return whether an argument names a model's folder or file, or ORG/NAME, rather than a recipe."""
    path = Path(given).expanduser()
    if path.suffix in (".yaml", ".yml") or (re.match(r"[a-z_]+\.[a-z_.]+=", given) and not path.exists()):
        return False
    is_of_a_model = path.suffix == ".safetensors" or path.suffix in OTHER_KINDS
    return path.is_dir() or is_of_a_model or _HUB_NAME.fullmatch(given) is not None


def model_folder(given: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the checkpoint that was named; raises ValueError with the way to one."""
    path = Path(given).expanduser()
    if not path.exists() and _HUB_NAME.fullmatch(given):
        return _downloaded(given, environment)
    check_kind(path)
    if not path.exists():
        raise ValueError(f"{given} does not exist; give a checkpoint's folder, or a recipe ending in .yaml")
    if path.is_dir() and "snapshots" in _names(path):
        path = _snapshot(path) or path
    return checked(path)


def name_of_folder(folder: Path) -> str:
    """Return what a checkpoint is called: ORG/NAME in a cache of downloads, and elsewhere as its folder."""
    repository = folder.parent.parent
    if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
        return repository.name.removeprefix("models--").replace("--", "/")  # no name on the hub has --
    name, above = folder.name.replace(_DOT, "."), repository.parent.name
    is_cached = (repository.name, above) == ("hub", "modelscope") or (
        repository.name == "models" and (above == "hub" or name != folder.name)
    )
    return f"{folder.parent.name}/{name}" if is_cached else name


def check_kind(path: Path) -> None:
    """Raise ValueError for a file, of any kind, where a folder is wanted."""
    folder = path.parent
    if path.suffix in OTHER_KINDS and not path.is_dir():
        kind, fix = OTHER_KINDS[path.suffix]
        raise ValueError(f"{path} is {kind}; only safetensors are read: {fix.format(folder=folder)}")
    if path.match(MISTRALS) and not path.is_dir():
        raise mistrals_own(path)
    if path.suffix == ".safetensors" and not path.is_dir():
        raise ValueError(f"{path} is one file of a checkpoint; give its folder, {folder}")


def checked(folder: Path) -> Path:
    """Return a checkpoint's folder as it is; raises ValueError where it holds no checkpoint."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a checkpoint's folder, or a recipe ending in .yaml")
    names = _names(folder)
    others = [name for name in names if Path(name).suffix in OTHER_KINDS]
    has_weights = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    if others and not has_weights:
        check_kind(folder / others[0])
    if CONFIG in names:
        return folder
    if mistrals := sorted(folder.glob(MISTRALS)):
        raise mistrals_own(mistrals[0])
    recipes = [name for name in names if name.endswith(".yaml")]
    inner = [name for name in names if (folder / name / CONFIG).is_file()]
    if recipes or inner:
        raise ValueError(f"{folder} holds no {CONFIG}; did you mean {folder / (recipes or inner)[0]}?")
    raise ValueError(f"{folder} holds no {CONFIG} of Hugging Face's layout, so no checkpoint; {_DOWNLOAD}")


def answer_keys(folder: Path) -> dict[str, tuple[str, str]]:
    """Return how a chat template says that the model writes calls and thoughts: by key, value and mark."""
    text = _templates(folder)
    if "<|channel|>" in text and "functions." in text:
        return dict.fromkeys(("server.tool_format", "server.reasoning"), ("harmony", "<|channel|>"))
    named = {"server.tool_format": _named(_CALLS, text), "server.reasoning": _named(_THOUGHTS, text)}
    return {key: found for key, found in named.items() if found is not None}


def _named(formats: tuple[tuple[str, str, str], ...], text: str) -> tuple[str, str] | None:
    """Return the first of the formats whose mark is in a template, and that mark."""
    for name, mark, beside in formats:
        if mark in text and re.search(beside, text):
            return name, mark
    return None


def _templates(folder: Path) -> str:
    """Return the chat templates of a folder, one after the other; empty where there is none to be read."""
    texts = []
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file() and path.stat().st_size <= MOST_JSON_BYTES and os.access(path, os.R_OK):
            text = path.read_text(encoding="utf-8", errors="replace")
            texts.append(text if name.endswith(".jinja") else _unescaped(text))
    return "\n".join(texts)


def _unescaped(text: str) -> str:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):  # whoever reads the tokenizer refuses the file by name
        return ""
    given = said.get("chat_template") if isinstance(said, dict) else None
    named = given if isinstance(given, list) else [{"template": given}]
    texts = [each.get("template") for each in named if isinstance(each, dict)]
    return "\n".join(each for each in texts if isinstance(each, str))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(each.name for each in folder.iterdir())
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        raise ValueError(f"{folder} cannot be read ({reason}); see its owner and rights") from error


def _downloaded(name: str, environment: Mapping[str, str]) -> Path:
    for folder in (*_of_hugging_face(name, environment), *_of_modelscope(name, environment)):
        if (folder / CONFIG).is_file():
            return checked(folder)
    raise ValueError(
        f"{name} is neither a folder here nor in the caches of Hugging Face and ModelScope; download it:"
        f" hf download {name}, or modelscope download --model {name}"
    )


def _of_hugging_face(name: str, environment: Mapping[str, str]) -> Iterator[Path]:
    home = Path(environment.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    hub = Path(environment.get("HF_HOME", home)) / "hub"
    hub = Path(environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or hub)
    folder = _snapshot(hub.expanduser() / f"models--{name.replace('/', '--')}")
    if folder is not None:
        yield folder


def _snapshot(repository: Path) -> Path | None:
    """Return the revision of a repository in Hugging Face's cache: what `main` is, else the newest."""
    revisions, main = repository / "snapshots", repository / "refs" / "main"
    if not revisions.is_dir():
        return None
    if main.is_file() and (named := revisions / main.read_text(encoding="utf-8").strip()).is_dir():
        return named
    found = [each for each in revisions.iterdir() if (each / CONFIG).is_file()]
    return max(found, key=lambda each: each.stat().st_mtime, default=None)


def _of_modelscope(name: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield where ModelScope's versions put a model."""
    said = environment.get("MODELSCOPE_CACHE")
    caches = [Path("~/.cache/modelscope/hub")] if said is None else [Path(said), Path(said) / "hub"]
    organization, _, model = name.partition("/")
    for cache in caches:
        for models in (cache / "models", cache):
            for written in (model.replace(".", _DOT), model):
                yield models.expanduser() / organization / written
