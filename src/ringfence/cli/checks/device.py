"""Checks of the accelerator: which one, whether it works, pinned memory, and confidential mode as far as it shows at rest."""

from __future__ import annotations

from ringfence.cli.checks.check import Check

DEVICE, PINNED, CONFIDENTIAL = "device", "pinned memory", "confidential"


def checks() -> list[Check]:
    """Return all checks of the accelerator; a single line if there is none."""
    try:
        import torch

        found = torch.accelerator.current_accelerator(check_available=True)
    except (ImportError, RuntimeError) as error:  # the checks of the software say what to do
        reason = str(error).partition("\n")[0]
        return [Check(DEVICE, f"unknown: torch cannot be imported ({reason})", None)]
    if found is None:
        return [Check(DEVICE, "none that torch can use; tensors on the CPU need none", None)]
    try:
        count = torch.accelerator.device_count()
        torch.ones(4, device=found).cpu()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        fix = f"repair the driver, or install a build of torch that fits it: {found.type} must work without ringfence"
        return [Check(DEVICE, f"{found.type} does not work: {reason}", found.type, False, fix)]
    what = f"{count} x {found.type}{_model(found.type)}"
    staged = f"{what}; collectives stage its tensors through host memory. Test them: ringfence selftest"
    return [Check(DEVICE, staged, found.type, True), *_memory(found)]


def _model(kind: str) -> str:
    import torch

    try:
        return f" ({torch.get_device_module(kind).get_device_name(0)})"
    except (AttributeError, RuntimeError):
        return ""


def _memory(found: object) -> list[Check]:
    """Check pinned memory and confidential mode. In that mode torch reports pinned memory as not pinned."""
    import torch

    from ringfence.cli.selftest import confidential

    signs = confidential.signs(torch.device(str(found)))
    mode, reasons = confidential.verdict(signs)
    if signs.pinned:
        pinned = Check(PINNED, "works: copies between host and device run beside computing", True)
    elif signs.pinned is None:
        pinned = Check(PINNED, "host memory cannot be pinned: copies between host and device are slow", False)
    else:
        text = "allocated, but torch reports it as not pinned, as in confidential mode: copies are slow"
        pinned = Check(PINNED, text, False)
    measured = "ringfence selftest measures how copies behave"
    return [pinned, Check(CONFIDENTIAL, f"{mode}: {'; '.join(reasons)}. {measured}", mode)]
