"""Check that CANN, torch and torch_npu fit each other and can be imported."""

from __future__ import annotations

from os.path import realpath

from devices.ascend_limits import PRODUCTS, AscendProduct
from devices.present import product_of
from devices.torch_npu_calls import calls_of
from devices.torch_npu_releases import public, releases, supported
from doctor.facts import Check, Finding, MachineFacts, numbers

PYTHONS = ((3, 10), (3, 12))
MATCHING = "Ascend/pytorch, COMPATIBILITY.md"
# The CANN with which each release of torch_npu was made: from that page, and 2.14.0 from the README in its
# wheel. Of others it is unknown; one that is newer than those of the page needs at least their newest.
CANN_OF = {
    "2.14.0": (9, 1),
    "2.12.0": (9, 1), "2.12.0.post2": (9, 1), "2.11.0": (9, 1), "2.11.0.post2": (9, 1),
    "2.10.0": (9, 0), "2.10.0.post4": (9, 1), "2.10.0.post6": (9, 1),
    "2.9.0": (8, 5), "2.9.0.post2": (9, 0), "2.9.0.post6": (9, 1), "2.9.0.post8": (9, 1),
    "2.8.0": (8, 3), "2.8.0.post2": (8, 5), "2.8.0.post4": (9, 0),
    "2.7.1": (8, 3), "2.7.1.post2": (8, 5), "2.7.1.post4": (9, 0), "2.7.1.post8": (9, 1),
    "2.7.1.post10": (9, 1),
    "2.6.0": (8, 2), "2.6.0.post3": (8, 3), "2.6.0.post5": (8, 5), "2.5.1": (8, 1), "2.5.1.post1": (8, 2),
}  # fmt: skip
_LISTED = tuple(version for version in CANN_OF if version != "2.14.0")  # the releases of that page
DRIVER_OF = {
    (8, 1): (25, 0),
    (8, 2): (25, 2),
    (8, 3): (25, 3),
    (8, 5): (25, 5),
    (9, 0): (25, 5),
    (9, 1): (25, 5),
}
# The releases that scripts/setup.sh installs by name: an extra, and what requirements/EXTRA.txt has
EXTRAS = {"npu-2.10": "2.10.0.post4", "npu-2.9": "2.9.0.post2"}
CANN_NEEDS = ("attrs", "cffi", "decorator", "protobuf", "psutil", "pyyaml", "scipy", "sympy")
CPU_TORCH = "pip install torch==VERSION+cpu --index-url https://download.pytorch.org/whl/cpu"


def _python(facts: MachineFacts) -> Finding | None:
    if PYTHONS[0] <= facts.python <= PYTHONS[1]:
        return None
    return Finding(
        f"this is Python {facts.python[0]}.{facts.python[1]}",
        "this project's requirements are pinned for 3.10 to 3.12, for which torch_npu has wheels too",
        "PYTHON=python3.11 bash scripts/setup.sh",
        "scripts/setup.sh; pypi.org/project/torch-npu",
    )


def _old_glibc(facts: MachineFacts) -> Finding | None:
    if facts.glibc is None or facts.wheel_glibc is None or facts.glibc >= facts.wheel_glibc:
        return None
    return Finding(
        f"glibc is {_dotted(facts.glibc)}; the wheel of torch_npu asks for {_dotted(facts.wheel_glibc)}",
        "the system is older than the one that the wheel was built on",
        "use a newer system, such as the image quay.io/ascend/cann",
        "PEP 600",
    )


def _no_cann(facts: MachineFacts) -> Finding | None:
    if facts.cann_home is not None:
        return None
    return Finding(
        "CANN is not found in /usr/local/Ascend, in ~/Ascend, nor where ASCEND or its own variables say",
        "the toolkit is not installed, or lies elsewhere: ASCEND=DIR names the folder that holds it",
        "install the CANN toolkit and the operator package of your product, then source its set_env.sh",
        "vllm-ascend, docs/source/installation.md",
    )


def _not_sourced(facts: MachineFacts) -> Finding | None:
    home, environment = facts.cann_home, facts.environment
    said = environment.get("ASCEND_TOOLKIT_HOME") or environment.get("ASCEND_HOME_PATH")
    if home is None or said:
        return None
    return Finding(
        f"CANN is in {home} and its environment is not set",
        "set_env.sh was not sourced in this shell, so that no library of CANN is found",
        f"source {home.rstrip('/').removesuffix('/latest')}/set_env.sh, or start by bash scripts/launch.sh",
        "vllm-ascend #262",
    )


def _several_cann(facts: MachineFacts) -> Finding | None:
    if not facts.other_cann:
        return None
    return Finding(
        f"CANN is in {facts.cann_home} and in {', '.join(facts.other_cann)}",
        f"of several installations the one in {facts.cann_home} is used; torch_npu may be made for another",
        "remove the other, or source the set_env.sh of the right one before each start",
        "vllm-ascend, docs/source/installation.md",
        is_fatal=False,
    )


def _wrong_home(facts: MachineFacts) -> Finding | None:
    names = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
    said = {name: place for name in names if (place := facts.environment.get(name))}
    found = facts.cann_home and realpath(facts.cann_home)  # `latest` and 8.5.0 may be the same folder
    wrong = [name for name, place in said.items() if realpath(place) != found]
    if not wrong:
        return None
    return Finding(
        f"{wrong[0]} is {said[wrong[0]]}, and CANN is found in {facts.cann_home or 'no place'}",
        "the variable is left from an installation that was removed, or two set_env.sh were sourced",
        "open a new shell and source one set_env.sh",
        "Ascend/pytorch #152, #117, #99",
    )


def _no_kernels(facts: MachineFacts) -> Finding | None:
    if facts.cann_home is None or facts.has_kernels:
        return None
    return Finding(
        "CANN has no compiled operators (opp/built-in/op_impl/ai_core/tbe/kernel is empty)",
        "the toolkit is installed without the operator package of the product",
        "install Ascend-cann-kernels (from CANN 8.5 on Ascend-cann-ops) for your chip, as old as the toolkit",
        "CANN installation guide",
    )


def _no_hccl(facts: MachineFacts) -> Finding | None:
    if facts.cann_home is None or facts.has_hccl:
        return None
    return Finding(
        f"there is no libhccl.so in {facts.cann_home}",
        "the toolkit is not whole; torch_npu needs the collective library to load, on one chip too",
        "install the CANN toolkit again",
        "vllm-ascend #262",
    )


def _old_driver(facts: MachineFacts) -> Finding | None:
    cann, driver = numbers(facts.cann_version), numbers(facts.driver_version)
    wanted = DRIVER_OF.get(cann) if cann else None
    if driver is None or wanted is None or driver >= wanted:
        return None
    return Finding(
        f"CANN is {facts.cann_version} and the driver {facts.driver_version}; {_dotted(cann)} was released"
        f" with {_dotted(wanted)}",
        "a runtime newer than its driver asks for what the driver does not know",
        f"install Ascend HDK {_dotted(wanted)} or newer, or an older CANN",
        "vllm-ascend, docs/source/installation.md; Ascend deployer, version_match.json",
        is_fatal=False,
    )


def _no_torch(facts: MachineFacts) -> Finding | None:
    if "torch" in facts.packages:
        return None
    return Finding(
        "torch is not installed for this Python",
        "the project's environment was not set up, or another Python is in use",
        "bash scripts/setup.sh, then run everything by .venv/bin/python",
        "scripts/setup.sh",
    )


def _no_torch_npu(facts: MachineFacts) -> Finding | None:
    if "torch_npu" in facts.packages:
        return None
    torch = facts.packages.get("torch", "the version of torch").partition("+")[0]
    return Finding(
        "torch_npu is not installed for this Python",
        "it is no part of torch, and has to be of its very version",
        f"pip install torch-npu=={torch}",
        MATCHING,
    )


def _versions_apart(facts: MachineFacts) -> Finding | None:
    torch, npu = facts.packages.get("torch"), facts.packages.get("torch_npu")
    if torch is None or npu is None or _base(torch) == _base(npu):
        return None
    return Finding(
        f"torch is {torch} and torch_npu {npu}",
        "torch_npu is compiled against one version of torch: all three numbers must agree",
        f"pip install torch-npu=={_base(torch)}, or the torch {_base(npu)}",
        MATCHING,
    )


def _too_old(facts: MachineFacts) -> Finding | None:
    version, chip = facts.packages.get("torch_npu", ""), _product(facts)
    lacks = _lacks(facts)
    if not lacks:
        return None
    return Finding(
        f"torch_npu {version} does not fit this project: it lacks {'; '.join(lacks)}",
        f"it is too old, or was built without what is called on a {chip.name}: a call ends in a TypeError",
        _another_release(chip, numbers(facts.cann_version)),
        "the schemas in the wheels of torch_npu: devices/torch_npu_releases.json",
    )


def _unknown_pair(facts: MachineFacts) -> Finding | None:
    version, cann = facts.packages.get("torch_npu"), facts.cann_version
    if version is None or facts.cann_home is None or _lacks(facts) or _cann_apart(facts):
        return None
    partners = []
    if _lacks(facts) is None:
        partners.append("this project")
    if numbers(cann) is None:
        partners.append(f"the CANN in {facts.cann_home}, whose version is not found")
    elif public(version) not in CANN_OF:
        partners.append(f"CANN {cann}")
    if not partners:
        return None
    return Finding(
        f"whether torch_npu {version} fits {' and '.join(partners)} is unknown",
        "it stands in no table; what does not fit ends in a symbol or an argument that is unknown",
        "run bash scripts/verify_npu.sh, which tries the operators; or "
        + _another_release(_product(facts), numbers(cann)),
        f"{MATCHING}; devices/torch_npu_releases.json",
        is_fatal=False,
    )


def _lacks(facts: MachineFacts) -> tuple[str, ...] | None:
    """Return what torch_npu lacks of what this project calls; None where that is not known.

    What the installed library says of itself comes before what is known of its version.
    """
    if facts.npu_lacks is not None:
        return facts.npu_lacks
    release = releases().get(public(facts.packages.get("torch_npu", "")))
    return None if release is None else release.lacks(calls_of(_product(facts)))


def _product(facts: MachineFacts) -> AscendProduct:
    """Return the product of the chips; where none is known, the one that most calls are made on."""
    name = next((known for chip in facts.chips if (known := product_of(chip.name))), "910B")
    return next(each for each in PRODUCTS if each.name == name)


def _another_release(chip: AscendProduct, cann: tuple[int, int] | None) -> str:
    """Return the command that installs a release with all calls, for this CANN if there is one."""
    fits = {extra: version for extra, version in EXTRAS.items() if version in supported(chip)}
    same = [extra for extra, version in fits.items() if CANN_OF[version] == cann]
    extra = (same or [*fits])[0]
    command = f"bash scripts/setup.sh {extra}, which installs torch_npu {fits[extra]}"
    return command if same else f"install CANN {_dotted(CANN_OF[fits[extra]])}, then {command}"


def _cann_apart(facts: MachineFacts) -> Finding | None:
    npu, cann = public(facts.packages.get("torch_npu", "")), numbers(facts.cann_version)
    is_newer = npu not in CANN_OF and (numbers(npu) or (0, 0)) > max(filter(None, map(numbers, _LISTED)))
    wanted = max(CANN_OF.values()) if is_newer else CANN_OF.get(npu)
    if wanted is None or cann is None or cann == wanted or (is_newer and cann > wanted):
        return None
    least = f"{_dotted(wanted)}{' or newer' * is_newer}"
    for_it = any(CANN_OF.get(version) == cann for version in supported(_product(facts)))
    return Finding(
        f"torch_npu {npu} was made with CANN {least}, and this is {facts.cann_version}",
        "its calls and CANN's operators may differ in arguments: errors such as 561002, or symbols not found",
        f"install CANN {least}" + f", or the torch_npu of {_dotted(cann)}" * for_it,
        MATCHING,
        is_fatal=cann < wanted,
    )


def _cuda_torch(facts: MachineFacts) -> Finding | None:
    if facts.torch_cuda is None or "torch_npu" not in facts.packages:
        return None
    return Finding(
        f"torch is a build for CUDA {facts.torch_cuda} beside torch_npu",
        "torch has room for one accelerator: torch_npu refuses to load where another is built in",
        CPU_TORCH.replace("VERSION", _base(facts.packages["torch"])),
        "torch_npu 2.13.0, on import",
    )


def _cann_packages(facts: MachineFacts) -> Finding | None:
    absent = [name for name in CANN_NEEDS if name not in facts.packages]
    if facts.cann_home is None or not absent:
        return None
    return Finding(
        f"CANN's operator compiler lacks {', '.join(absent)}",
        "it runs in this Python and imports them; without, the first operator ends in EH9999",
        f".venv/bin/python -m pip install {' '.join(absent)}; bash scripts/setup.sh npu installs them",
        "Ascend/pytorch #7",
    )


def _base(version: str) -> str:
    """Return the base version: 2.9.0.post2+git -> 2.9.0."""
    return ".".join(version.partition("+")[0].split(".")[:3]).partition("rc")[0]


def _dotted(version: tuple[int, int] | None) -> str:
    return ".".join(map(str, version or ()))


CHECKS: tuple[Check, ...] = (
    _python,
    _old_glibc,
    _no_cann,
    _not_sourced,
    _several_cann,
    _wrong_home,
    _no_kernels,
    _no_hccl,
    _old_driver,
    _no_torch,
    _no_torch_npu,
    _versions_apart,
    _too_old,
    _cann_apart,
    _unknown_pair,
    _cuda_torch,
    _cann_packages,
)


def _static_tls(facts: MachineFacts) -> Finding | None:
    error = facts.torch_error or facts.npu_error
    if error is None or "static TLS block" not in error:
        return None
    return Finding(
        f"a library finds no room when it is loaded: {error}",
        "on aarch64 libgomp wants to be loaded first, and something else was",
        'export LD_PRELOAD=$(ls "$(.venv/bin/python -m pip show torch | sed -n "s/^Location: //p")"'
        "/torch.libs/libgomp*.so* | head -1)",
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


def _sees_fewer(facts: MachineFacts) -> Finding | None:
    visible = sum(facts.is_visible(index) for index in range(len(facts.nodes)))
    if not facts.num_devices or facts.num_devices >= visible:
        return None
    return Finding(
        f"torch_npu sees {facts.num_devices} of {visible} devices that have device files",
        "a device is lost or held, or a file has no chip behind it; those after it have other numbers",
        "see `npu-smi info`; name the devices that answer by ASCEND_RT_VISIBLE_DEVICES",
        "CANN environment variables",
        is_fatal=False,
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


LOADING_CHECKS: tuple[Check, ...] = (
    _static_tls,
    _torch_fails,
    _autoload,
    _no_atb,
    _no_library,
    _import_fails,
    _sees_none,
    _sees_fewer,
)
