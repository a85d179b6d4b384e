"""Measures whether the device waits for data, at which stage, and what would help."""

from __future__ import annotations

import math
import time
from typing import Any

from ..base import Fact, fact
from ..machine.limits import usable_cores
from ..recipe.source import Source
from .sources import Arrays, Lazy, example_bytes, has, nbytes, spec_of
from .stages import NAMES
from .stream import Stream

FED = 0.02  # share of the time below which waiting is noise
_MOST = 0.9995  # share of waiting above which the step's own speed is unknown


class Watch:
    """Collects statistics of a feed from now on.

    *Arguments:* `source`: the training data. `stream`: its stream, `None` if the data is on the
    device. `share`: the share of each batch that this host reads.
    """

    def __init__(self, source: Source, stream: Stream | None, share: float = 1.0):
        self.source = source
        self.stream = stream
        self._share = share
        self._began = (0.0, 0, dict.fromkeys(NAMES, 0.0))
        if stream is not None:
            self._began = (stream.waited, stream.delivered, dict(stream.stages.seconds))
        self._waited = 0.0
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self._at = time.perf_counter()

    @property
    def waited(self) -> float:
        """Seconds in which the device was idle, waiting for data."""
        return self.stream.waited - self._began[0] if self.stream is not None else 0.0

    def _busy(self, stream: Stream) -> dict[str, float]:
        """Core-seconds by stage."""
        now = stream.stages.seconds
        return {name: now[name] - before for name, before in self._began[2].items()}

    def row(self, seconds: float) -> dict[str, float]:
        """The fields for a line of metrics, about the last `seconds` of training.

        They are the share in which the device waited for data, and the number of workers that were
        busy in each stage since the last line. This includes evaluations, since reading continues
        meanwhile.
        """
        if self.stream is None:
            return {"wait_data_seconds": 0.0, "wait_data_share": 0.0}
        waited = self.waited
        busy = self._busy(self.stream)
        now = time.perf_counter()
        row = {
            "wait_data_seconds": waited,
            "wait_data_share": min(1.0, (waited - self._waited) / seconds),
        }
        row |= {f"feed/{n}_cores": (busy[n] - self._seconds[n]) / (now - self._at) for n in NAMES}
        self._waited = waited
        self._seconds = busy
        self._at = now
        return row

    def report(self, steps: int, batch: int, train_seconds: float) -> dict[str, Any]:
        """The statistics of `steps` steps of `batch` examples (global), which took `train_seconds`.

        *Returns* JSON values of this host:

        - where the data was,
        - the share and the seconds of waiting, by stage,
        - the examples/s that the host can deliver, and those of the steps without waiting,
        - the cores that each stage would need for the latter,
        - `code` and `verdict`: the conclusion as a code and a line,
        - `advice`, if the code is "input-bound".
        """
        if self.stream is None:
            verdict = fact("data-resident")
            account = {
                "data": "on the device",
                "waited_share": 0.0,
                "waited_seconds": 0.0,
            }
            return {**account, "code": verdict.code, "verdict": str(verdict)}
        stream = self.stream
        spent = self._busy(self.stream)
        delivered = max(1, stream.delivered - self._began[1])
        total = max(sum(spent.values()), 1e-9)
        waited = min(self.waited, train_seconds)
        share = waited / train_seconds if train_seconds > 0 else 0.0
        own = steps * batch * self._share
        needed = own / max(train_seconds - waited, 1e-9) if steps else None
        # Core-seconds per example
        each = {name: seconds / delivered for name, seconds in spent.items()}
        by_workers = sum(each[name] for name in NAMES if name != "transfer") / stream.workers.count
        possible = 1 / max(by_workers, each["transfer"], 1e-9)
        cores = {name: (needed or 0.0) * each[name] for name in NAMES}
        account = {
            "data": "streamed",
            "workers": str(stream.workers),
            "batches_in_memory": stream.batches,
            "batch_bytes": stream.batch_bytes,
            "waited_share": round(share, 5),
            "waited_seconds": round(waited, 4),
            "waited_seconds_by_stage": {n: round(waited * s / total, 4) for n, s in spent.items()},
            "host_examples_per_second": round(possible, 1),
            "step_examples_per_second": needed and round(needed, 1),
            "cores_needed_by_stage": {n: round(value, 3) for n, value in cores.items()},
        }
        if needed is None:
            verdict = fact("data-unjudged")
        elif share < FED:
            verdict = fact(
                "fed", share=share, workers=stream.workers.count, speeds=possible / needed
            )
        else:
            stage = max(NAMES, key=spent.__getitem__)
            here = usable_cores()
            advice = self._advice(stage, here)
            account["advice"] = advice.json()
            verdict = fact(
                "input-bound",
                share=share,
                faster=1 / (1 - min(share, _MOST)),
                stage=stage,
                cores=math.ceil(cores[stage]),
                here=here,
                advice=advice,
            )
        return {**account, "code": verdict.code, "verdict": str(verdict)}

    def _advice(self, stage: str, here: int) -> Fact:
        """Advice that reduces the load of `stage`, on a host with `here` cores."""
        assert self.stream is not None
        ours = has(self.source, "fill")
        if stage == "decode" and ours:
            return fact("feed-try-raw", raw_bytes=nbytes(self.source))
        if stage == "transfer":
            spec = spec_of(self.source)
            wide = {s.dtype.name for s in spec.values() if s.dtype.itemsize > 1 and s.shape}
            if not wide:
                return fact("feed-try-smaller", example_bytes=example_bytes(spec))
            return fact("feed-try-uint8", example_bytes=example_bytes(spec), dtypes=sorted(wide))
        if stage == "transform":
            return fact("feed-try-augment")
        if isinstance(self.source, (Arrays, Lazy)) or getattr(self.source, "store", None) == "raw":
            return fact("feed-try-device")
        if ours:
            return fact("feed-try-disk")
        if self.stream.workers.count < here:
            return fact("feed-try-processes", cores=here)
        return fact("feed-try-packing", raw_bytes=nbytes(self.source))
