"""What an NVIDIA GPU does while it trains, by its driver: clock, power limit, PCIe link, processes.

The driver is asked by `nvidia-ml-py`, NVML's own bindings, which `chipwise[cuda]` installs. Where
they are missing, or a value is not known for a card, nothing is stated about it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from ..base import Fact, fact

SECONDS = 0.5  # between two looks
_SLOWED = 0.85  # of the highest clock. A card at its usual power limit trains at 0.85 to 1.
_REASONS = {
    0x04: "its power limit",
    0x08: "the hardware",
    0x20: "its temperature",
    0x40: "its temperature",
    0x80: "the power supply",
}
"""The bits of NVML's clock event reasons that slow a busy card."""


@dataclass(frozen=True)
class GpuState:
    """What was seen of a GPU. `None` is unknown."""

    clock_MHz: float | None = None  # of its multiprocessors, the median of all looks
    highest_clock_MHz: float | None = None
    slowed_by: tuple[str, ...] = ()  # the driver's reasons, in any look
    power_limit_W: float | None = None
    usual_power_limit_W: float | None = None
    pcie_generation: int | None = None  # the highest of all looks: an idle link is slow
    pcie_lanes: int | None = None
    highest_pcie_generation: int | None = None  # that card and board allow
    highest_pcie_lanes: int | None = None
    processes: int | None = None  # that compute on it, this one included

    def findings(self, device: int) -> Iterator[Fact]:
        """What may make it slower than others of its kind. *Arguments:* `device`: JAX's number."""
        given = {"device": device, **asdict(self)}
        if _below(self.clock_MHz, self.highest_clock_MHz, _SLOWED):
            yield fact("gpu-clock-low" if self.slowed_by else "gpu-clock-low-unsaid", **given)
        if _below(self.power_limit_W, self.usual_power_limit_W):
            yield fact("gpu-power-limited", **given)
        lanes = _below(self.pcie_lanes, self.highest_pcie_lanes)
        if lanes or _below(self.pcie_generation, self.highest_pcie_generation):
            yield fact("gpu-link-narrow", **given)
        if (self.processes or 0) > 1:
            yield fact("gpu-shared", device=device, others=(self.processes or 0) - 1)


def _below(value: float | None, usual: float | None, share: float = 0.99) -> bool:
    return value is not None and usual is not None and value < share * usual


class Watched:
    """The states of GPUs, looked at every half second in a thread of its own while a `with` block
    runs. `states` is there after the block, by JAX's number of the device, without those that NVML
    does not show.

    *Arguments:* `library`: NVML's bindings, by default those that are installed.
    """

    def __init__(self, devices: Sequence[jax.Device], library: Any = None):
        self.states: dict[int, GpuState] = {}
        here = jax.process_index()
        gpus = [d for d in devices if d.platform == "gpu" and d.process_index == here]
        self._nvml = library or (_library() if gpus else None)
        found = {} if self._nvml is None else {d.id: _found(self._nvml, d) for d in gpus}
        self._handles = {number: handle for number, handle in found.items() if handle is not None}
        self._looks: dict[int, list[dict[str, Any]]] = {number: [] for number in self._handles}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-state", daemon=True)

    def __enter__(self) -> Watched:
        if self._handles:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._handles:
            self._over.set()
            self._thread.join()
            seen = {number: looks for number, looks in self._looks.items() if looks}
            self.states = {number: _summary(looks) for number, looks in seen.items()}

    def _watch(self) -> None:
        while True:
            for number, handle in self._handles.items():
                self._looks[number].append(_look(self._nvml, handle))
            if self._over.wait(SECONDS):
                return


def _library() -> Any:
    """NVML's bindings, started, or `None`."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return None
    return pynvml


def _found(nvml: Any, device: jax.Device) -> Any:
    """NVML's handle of `device`, or `None` where it is not sure. JAX counts the visible devices,
    in an order that only cards of one kind share with NVML."""
    with contextlib.suppress(nvml.NVMLError):
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        if len({nvml.nvmlDeviceGetName(handle) for handle in handles}) != 1:
            return None
        numbered = {str(number): handle for number, handle in enumerate(handles)}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(numbered)).split(",")
        name = dict(enumerate(visible)).get(device.local_hardware_id, "").strip()
        if name.startswith("GPU-"):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        return numbered.get(name)
    return None


def _look(nvml: Any, handle: Any) -> dict[str, Any]:
    def asked(name: str, *more: Any) -> Any:
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *more)
        except (nvml.NVMLError, AttributeError):  # of this card, or these bindings
            return None

    clock, processes = nvml.NVML_CLOCK_SM, asked("ComputeRunningProcesses")
    limit, usual = asked("EnforcedPowerLimit"), asked("PowerManagementDefaultLimit")
    return {
        "clock_MHz": asked("ClockInfo", clock),
        "highest_clock_MHz": asked("MaxClockInfo", clock),
        "reasons": asked("CurrentClocksEventReasons") or 0,
        "power_limit_W": limit and limit / 1000,
        "usual_power_limit_W": usual and usual / 1000,
        "pcie_generation": asked("CurrPcieLinkGeneration"),
        "pcie_lanes": asked("CurrPcieLinkWidth"),
        "highest_pcie_generation": asked("MaxPcieLinkGeneration"),
        "highest_pcie_lanes": asked("MaxPcieLinkWidth"),
        "processes": None if processes is None else len(processes),
    }


def _summary(looks: list[dict[str, Any]]) -> GpuState:
    def known(name: str) -> list[Any]:
        return [look[name] for look in looks if look[name] is not None]

    whole = {name: max(known(name), default=None) for name in looks[0] if name != "reasons"}
    clocks = known("clock_MHz")
    whole["clock_MHz"] = statistics.median(clocks) if clocks else None
    seen = {text for bit, text in _REASONS.items() for look in looks if look["reasons"] & bit}
    return GpuState(**whole, slowed_by=tuple(sorted(seen)))
