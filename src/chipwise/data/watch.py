"""Does the device wait for its data, for which part of the work, and what would help?"""

from __future__ import annotations

import math
import time
from typing import Any

from ..machine.limits import usable_cores
from ..recipe.task import Source
from ..words.figures import byte_size
from .sources import Arrays, Lazy, example_bytes, has, nbytes, spec_of
from .stages import NAMES
from .stream import Stream

FED = 0.02  # share of the time: below it waiting is noise
_DOING = {
    "read": "reading",
    "decode": "decoding",
    "transform": "transforming on the host",
    "transfer": "transferring",
}


class Watch:
    """Keeps account of a run's feed.

    *Arguments:* `source`, the training data; `stream`, how it comes; `None` when it lives on the device.
    """

    def __init__(self, source: Source, stream: Stream | None):
        self.source, self.stream = source, stream
        self._waited, self._seconds, self._at = 0.0, dict.fromkeys(NAMES, 0.0), time.perf_counter()

    @property
    def waited(self) -> float:
        """Seconds for which the device had nothing to do but wait for data."""
        return self.stream.waited if self.stream is not None else 0.0

    def row(self, seconds: float) -> dict[str, float]:
        """What a line of metrics says of the last `seconds` of training.

        The share of them in which the device waited for data; and for each stage how many workers it kept
        busy since the last line, evaluations included, since reading goes on meanwhile.
        """
        if self.stream is None:
            return {"wait_data_seconds": 0.0, "wait_data_share": 0.0}
        waited, busy = self.stream.waited, self.stream.stages.seconds
        made = {"wait_data_seconds": waited, "wait_data_share": min(1.0, (waited - self._waited) / seconds)}
        now = time.perf_counter()
        made |= {f"feed/{n}_cores": (busy[n] - self._seconds[n]) / (now - self._at) for n in NAMES}
        self._waited, self._seconds, self._at = waited, busy, now
        return made

    def report(self, steps: int, batch: int, train_seconds: float) -> dict[str, Any]:
        """The account of `steps` steps of `batch` examples (global), which took `train_seconds`.

        *Returns* JSON values: where the data was, the share and seconds waited, by stage; the examples/s
        that the host can deliver and that the steps would take without waiting; the cores that each stage
        would need for these; and `verdict`, one line.
        """
        if self.stream is None:
            return {
                "data": "on the device",
                "waited_share": 0.0,
                "waited_seconds": 0.0,
                "verdict": "the data lives on the device: nothing to wait for",
            }
        stream, spent = self.stream, self.stream.stages.seconds
        delivered, total = max(1, stream.delivered), max(sum(spent.values()), 1e-9)
        waited = min(stream.waited, train_seconds)
        share = waited / train_seconds if train_seconds > 0 else 0.0
        wanted = steps * batch / max(train_seconds - waited, 1e-9) if steps else None
        each = {name: seconds / delivered for name, seconds in spent.items()}  # core-seconds an example
        by_workers = sum(each[name] for name in NAMES if name != "transfer") / stream.workers.count
        made: dict[str, Any] = {
            "data": "streamed",
            "workers": str(stream.workers),
            "batches_in_memory": stream.batches,
            "batch_bytes": stream.batch_bytes,
            "waited_share": round(share, 5),
            "waited_seconds": round(waited, 4),
            "waited_seconds_by_stage": {n: round(waited * s / total, 4) for n, s in spent.items()},
            "host_examples_per_second": round(1 / max(by_workers, each["transfer"], 1e-9), 1),
            "step_examples_per_second": wanted and round(wanted, 1),
            "cores_needed_by_stage": {n: round((wanted or 0.0) * each[n], 3) for n in NAMES},
        }
        return {**made, "verdict": self._verdict(made, share, spent)}

    def _verdict(self, made: dict[str, Any], share: float, spent: dict[str, float]) -> str:
        assert self.stream is not None
        if made["step_examples_per_second"] is None:
            return "no step was made: nothing to judge"
        speeds = made["host_examples_per_second"] / made["step_examples_per_second"]
        if share < FED:
            return (
                f"fed: the device waited {share:.1%} of the time; {self.stream.workers} can deliver "
                f"{speeds:.1f} × what the step takes"
            )
        worst = max(NAMES, key=spent.__getitem__)
        cores, here = math.ceil(made["cores_needed_by_stage"][worst]), usable_cores()
        faster = 1 / (1 - share) if share < 0.9995 else 2000.0
        return (
            f"input-bound: the device waited {share:.0%} of the time, the step could run "
            f"{'more than ' * (share >= 0.9995)}{faster:,.1f} × faster; {_DOING[worst]} needs "
            f"{cores:,} core{'s' * (cores != 1)}, you have {here}; {self._advice(worst, here)}"
        )

    def _advice(self, stage: str, here: int) -> str:
        assert self.stream is not None
        ours = has(self.source, "fill")
        if stage == "decode" and ours:
            return f"pack with --store raw ({byte_size(nbytes(self.source))}) to remove it"
        if stage == "transfer":
            kinds = {s.dtype.name for s in spec_of(self.source).values() if s.dtype.itemsize > 1 and s.shape}
            fewer = f"send fewer than {example_bytes(spec_of(self.source)):,} bytes an example"
            if not kinds:
                return f"{fewer}: smaller images"
            return f"{fewer}: store uint8 instead of {', '.join(sorted(kinds))} and convert on the device"
        if stage == "transform":
            return "do it on the device with Task(augment=...), or once with chipwise pack"
        if isinstance(self.source, (Arrays, Lazy)) or getattr(self.source, "store", None) == "raw":
            return "keep the data on the device with --feed device, or store fewer bytes an example"
        if ours:
            return "copy the data to a faster disk, or pack it into few files with chipwise pack"
        if self.stream.workers.count < here:
            return f"read with --workers processes:{here}, or pack it once with chipwise.data.pack.pack"
        return f"pack it once with chipwise.data.pack.pack (raw: {byte_size(nbytes(self.source))})"
