"""Run all checks on the facts of a machine, and format the findings for a person or a program."""

from __future__ import annotations

from dataclasses import asdict

from doctor import device, settings, software
from doctor.facts import Check, Finding, MachineFacts

CHECKS: tuple[Check, ...] = device.CHECKS + software.CHECKS + software.LOADING_CHECKS + settings.CHECKS


def diagnose(facts: MachineFacts) -> dict[str, Finding]:
    """Return the findings by the name of their check, fatal ones first."""
    found = {name_of(check): finding for check in CHECKS if (finding := check(facts)) is not None}
    return dict(sorted(found.items(), key=lambda item: not item[1].is_fatal))


def name_of(check: Check) -> str:
    """Return a check's name without its leading underscore."""
    return check.__name__.strip("_")


def summary(facts: MachineFacts) -> list[tuple[str, str]]:
    """Return what was found on the machine, faulty or not, as labelled lines."""
    chips = ", ".join(
        f"{chip.name} {chip.total_mib - chip.used_mib:,} of {chip.total_mib:,} MiB free"
        for chip in facts.chips
    )
    return [
        ("machine", f"{facts.system} {facts.architecture}{' in a container' * facts.in_container}"),
        ("Python", ".".join(map(str, facts.python))),
        ("driver", facts.driver_version or "not found"),
        ("chips", chips or f"{len(facts.nodes)} device files" if facts.nodes or chips else "none"),
        (
            "CANN",
            f"{facts.cann_version or 'of unknown version'} in {facts.cann_home}"
            if facts.cann_home
            else "not found",
        ),
        (
            "torch",
            facts.packages.get("torch", "not found")
            + (f", CUDA {facts.torch_cuda}" if facts.torch_cuda else ""),
        ),
        ("HCCL", "found" if facts.has_hccl else "not found"),
        ("torch_npu", facts.packages.get("torch_npu", "not found")),
        ("devices seen", "not asked" if facts.num_devices is None else str(facts.num_devices)),
    ]


def in_words(facts: MachineFacts, findings: dict[str, Finding]) -> str:
    """Format the whole diagnosis for a person."""
    lines = [f"{label:14}{text}" for label, text in summary(facts)]
    for finding in findings.values():
        lines += ["", ("PROBLEM  " if finding.is_fatal else "advice   ") + finding.problem]
        lines += [f"  because  {finding.cause}", f"  fix      {finding.fix}", f"  source   {finding.source}"]
    num_fatal = sum(finding.is_fatal for finding in findings.values())
    advice = f"{len(findings) - num_fatal} pieces of advice, {len(CHECKS)} checks"
    verdict = "fit to compute on an NPU" if not num_fatal else f"not fit: {num_fatal} problems"
    return "\n".join([*lines, "", f"{verdict}; {advice}"])


def in_json(facts: MachineFacts, findings: dict[str, Finding]) -> dict[str, object]:
    """Return the diagnosis as data for a program.

    Only the environment variables that matter here are kept, since a report is sent to others.
    """
    kept = {
        name: value
        for name, value in sorted(facts.environment.items())
        if name.startswith(("ASCEND", "ATB", "HCCL", "PYTORCH_NPU", "TASK_QUEUE", "TORCH", "OMP"))
    }
    return {
        "is_fit": not any(finding.is_fatal for finding in findings.values()),
        "facts": asdict(facts) | {"environment": kept},
        "findings": {name: asdict(finding) for name, finding in findings.items()},
    }
