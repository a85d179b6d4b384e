"""A trace of some training steps for TensorBoard's profiler, which names the operations that take time."""

from __future__ import annotations

from pathlib import Path

import jax

from ..engine.session import Session
from ..errors import DataError


def make_folder(folder: str | Path) -> None:
    """Creates the folder before the measurement. Raises `DataError` if it cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = "Cannot write a trace to {folder}: {reason}. Give --profile another folder."
        raise DataError("trace-unwritable", text, folder=folder, reason=error) from None


def traced(session: Session, folder: str | Path, seconds_a_step: float) -> dict[str, str | int]:
    """Traces some further steps, about half a second of them, so that the file stays small. *Returns* the
    `folder` and the `steps`. Raises `DataError` if the profiler wrote nothing."""
    steps = max(3, min(20, round(0.5 / seconds_a_step)))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python calls would slow the step
    session.wait()
    with jax.profiler.trace(str(folder), profiler_options=options):
        for number in range(steps):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                session.advance()
        session.wait()
    if not any(Path(folder).glob("plugins/profile/*/*.xplane.pb")):
        text = "The profiler wrote no trace to {folder}. Give --profile another folder."
        raise DataError("trace-missing", text, folder=folder)
    return {"folder": str(folder), "steps": steps}
