"""A recipe's replicas on a machine's devices: the choice, and how it is said."""

from __future__ import annotations

from typing import Any

from ..machine.detect import Machine
from .layout import Layout, usable


def lay_out(
    machine: Machine, batch: int, replicas: int, *, asked: bool, exact: bool
) -> tuple[Layout, list[str]]:
    """The layout, and warnings. All the machine's devices, or as many as the replicas can use; when a number
    was `asked` for, that number or a `DeviceError`."""
    found = len(machine.devices)
    used = found if asked else usable(replicas, found, exact)
    warnings = []
    if used < found:
        same = " with the same bits" if exact else ""
        warnings.append(
            f"{found} devices found, {used} used: {replicas} replicas cannot be shared by more{same}."
        )
    return Layout(batch, replicas, used, exact), warnings


def start_line(machine: Machine, layout: Layout, precision: str) -> str:
    """Platform, device kind, count, replicas a device, precision and batches in one line."""
    simulated = " (simulated)" if machine.simulated else ""
    exact = "" if layout.exact else ", not exact: bits depend on the device count"
    return (
        f"{machine.platform}: {layout.devices} × {machine.kind}{simulated}, "
        f"{layout.replicas_per_device} of {layout.replicas} replicas each, {precision}, "
        f"batch {layout.batch} = {layout.replicas} × {layout.replica_batch}{exact}"
    )


def describe(machine: Machine, layout: Layout) -> dict[str, Any]:
    """The same as plain JSON values."""
    return {
        "platform": machine.platform,
        "kind": machine.kind,
        "count": layout.devices,
        "simulated": machine.simulated,
        "replicas": layout.replicas,
        "replicas_per_device": layout.replicas_per_device,
        "batch": layout.batch,
        "replica_batch": layout.replica_batch,
        "exact": layout.exact,
    }
