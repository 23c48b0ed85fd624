"""Check that torch and torch_npu can be imported, and say what they lack where they cannot."""

from __future__ import annotations

from doctor.facts import MachineFacts
from doctor.finding import Check, Finding
from doctor.software import CPU_TORCH, MATCHING


def _static_tls(facts: MachineFacts) -> Finding | None:
    error = facts.torch_error or facts.npu_error
    if error is None or "static TLS block" not in error:
        return None
    return Finding(
        f"a library finds no room when it is loaded: {error}",
        "on aarch64 libgomp wants to be loaded first, and something else was",
        "export LD_PRELOAD=$(ls .venv/lib/python3*/site-packages/torch.libs/libgomp*.so* | head -1)",
        "pytorch and scikit-learn on aarch64: NVIDIA/DALI #5519, dmlc/xgboost #8488",
    )


def _torch_fails(facts: MachineFacts) -> Finding | None:
    error = facts.torch_error
    if error is None or _is_autoloaded(facts) or "static TLS" in error:
        return None
    return Finding(
        f"`import torch` fails: {error}",
        "it loads nothing of Ascend here: torch itself is not whole, or lacks a library of the system",
        CPU_TORCH.replace("VERSION", facts.packages["torch"].partition("+")[0]) + " --force-reinstall",
        "pytorch.org, Get Started",
    )


def _autoload(facts: MachineFacts) -> Finding | None:
    error = facts.torch_error
    if error is None or not _is_autoloaded(facts) or "static TLS" in error:
        return None
    return Finding(
        f"`import torch` fails: {error}",
        "torch loads torch_npu by itself, and that fails; the fault is the one of torch_npu",
        "source CANN's set_env.sh; for work without an NPU export TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        "torch_npu 2.13.0 without CANN",
    )


def _no_atb(facts: MachineFacts) -> Finding | None:
    error = facts.npu_error or facts.torch_error or ""
    if "libatb" not in error:
        return None
    where = f"{facts.nnal_home}/atb" if facts.nnal_home else "the installation of NNAL"
    return Finding(
        f"libatb.so is not found: {error}",
        "the operators of ATB come with NNAL, a package of its own with an environment of its own",
        f"install Ascend-cann-nnal of CANN's version, then source {where}/set_env.sh",
        "vllm-ascend, docs/source/installation.md; Ascend/pytorch #152",
    )


def _no_library(facts: MachineFacts) -> Finding | None:
    error = facts.npu_error or ""
    if "cannot open shared object" not in error or "libatb" in error or "static TLS" in error:
        return None
    return Finding(
        f"`import torch_npu` finds a library missing: {error}",
        "libhccl, libascendcl and the like come with CANN and are found by LD_LIBRARY_PATH alone",
        "source CANN's set_env.sh in this shell; where it is libascend_hal, mount the driver's lib64",
        "vllm-ascend #262",
    )


def _import_fails(facts: MachineFacts) -> Finding | None:
    error = facts.npu_error
    known = ("cannot open shared object", "static TLS block", "libatb")
    if error is None or any(word in error for word in known):
        return None
    return Finding(
        f"`import torch_npu` fails: {error}",
        "an undefined symbol means versions that do not fit; anything else is in CANN's log, ~/ascend/log",
        "compare torch, torch_npu and CANN with the table of versions",
        MATCHING,
    )


def _sees_none(facts: MachineFacts) -> Finding | None:
    if facts.num_devices != 0 or not facts.nodes:
        return None
    return Finding(
        "torch_npu loads and sees no device, though there are device files",
        "ASCEND_RT_VISIBLE_DEVICES hides them all, or the driver's libraries are not found",
        "unset ASCEND_RT_VISIBLE_DEVICES; add /usr/local/Ascend/driver/lib64 to LD_LIBRARY_PATH",
        "CANN environment variables",
    )


def _is_autoloaded(facts: MachineFacts) -> bool:
    """Return whether `import torch` also imports torch_npu."""
    return "torch_npu" in facts.packages and facts.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0"


CHECKS: tuple[Check, ...] = (
    _static_tls,
    _torch_fails,
    _autoload,
    _no_atb,
    _no_library,
    _import_fails,
    _sees_none,
)
