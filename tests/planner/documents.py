"""A realistic plan document, made of the real classes, with invented figures.

Seven targets: five that run, one whose memory is too small and one that the compiler refused; on-demand and
spot prices, one of them without its host.
"""

from typing import Any

from chipwise.base.facts import Fact, fact, plain
from chipwise.base.prediction import Range
from chipwise.planner.plans import SCHEMA, Cost, Feeding, Memory, Plan
from chipwise.planner.ranking import judge

BATCH, REPLICAS, STEPS, PARAMETERS = 512, 8, 4768, 124_439_808
FLOPS = 6.0 * PARAMETERS * BATCH * 1024  # of a step, global
TPU_PRICES = "skypilot-catalog catalogs/v8/gcp/vms.csv@006059e", "2026-02-26..2026-03-15 (inferred)"
GPU_PRICES = "Cyclenerd/google-cloud-pricing-cost-calculator pricing.yml@fd66b26", "2026-07-30"
GB = 10**9


def memory(activations: float, available: float, source: Fact, replicas: int = 1) -> Memory:
    """GB in; a replica's gradients wait while the next is computed."""
    return Memory(
        parameters=4 * PARAMETERS,
        optimizer=8 * PARAMETERS,
        state=96,
        replica_sums=4 * PARAMETERS * replicas,
        activations=int(activations * GB),
        data=int(0.27 * GB),
        program=31_000_000,
        available=int(available * GB),
        available_source=source,
    )


def plan(
    target: str,
    chip: str,
    *,
    held: Memory | None,
    step: float = 0,
    spread: float = 0.1,
    peak: float = 1,
    devices: int = 8,
    rates: tuple[tuple[float, bool, str, str], ...] = (),
    includes: str = "whole VM",
    bound: str = "compute",
    **rest: Any,
) -> Plan:
    """A plan whose step takes `step` seconds, 0 where it does not run. `rates`: ($/hour, spot, instance,
    region); `peak`: FLOP/s of one device."""
    known: dict[str, Any] = {}
    if step:
        seconds = Range(step, step * (1 - spread), step * (1 + spread))
        parts = {"start": 10.0, "compile": 42.0, "train": step * STEPS, "evaluate": step * 40}
        wall = seconds.times(STEPS).plus(Range(*[52.0 + step * 40] * 3))
        source, date = TPU_PRICES if chip.startswith("TPU") else GPU_PRICES
        known = {
            "step_seconds": seconds,
            "step_parts": {"replica": 0.93 * step, "reduce": 0.05 * step, "update": 0.02 * step},
            "bound": bound,
            "examples_per_second": seconds.inverse(BATCH),
            "share_of_peak": FLOPS / devices / step / peak,
            "steps": STEPS,
            "seconds": parts,
            "wall_seconds": wall,
            "costs": tuple(
                Cost(
                    cloud="gcp",
                    instance=instance,
                    region=region,
                    usd_per_hour=rate,
                    usd=wall.times(rate / 3600),
                    spot=spot,
                    includes=includes,
                    date=date,
                    source=source,
                    note="without its host" if includes == "accelerator alone" else "",
                )
                for rate, spot, instance, region in rates
            ),
            "feeding": Feeding(
                resident=False,
                bytes_per_example=4100,
                wanted_examples_per_second=BATCH / step,
                wanted_bytes_per_second=4100 * BATCH / step,
                examples_per_second_per_core=88_000.0,
                cores_needed=BATCH / step / 88_000,
                cores=8,
                measured_on=fact("feed-measured-here"),
            ),
        }  # fmt: skip
    return Plan(
        target=target,
        chip=chip,
        chips=devices // 2 if chip == "TPU v3" else devices,
        devices=devices,
        devices_found=devices,
        batch=BATCH,
        replicas=REPLICAS,
        replicas_per_device=REPLICAS // devices,
        precision="bf16",
        parameters=PARAMETERS,
        memory=held,
        flops_per_step_per_device=FLOPS / devices,
        wire_bytes_per_step_per_device=4.0 * PARAMETERS * 7 / 4,
        **{
            "notes": (COMPILED if chip.startswith("TPU") else TIMED,),
            **known,
            **rest,
        },
    )


COMPILED, TIMED = fact("compiled-by-own-compiler"), fact("kernels-timed")
STATED, LIMIT = fact("memory-of-tpu", gib=16.0), fact("memory-of-gpu", gb=80.0, share=0.75)


def plans() -> list[Plan]:
    """In the order that a user might ask for them."""
    return [
        plan(
            "v5e-8",
            "TPU v5e",
            held=memory(9.4, 16.9, STATED),
            step=0.498,
            peak=197e12,
            includes="slice with its host",
            rates=((9.6, False, "v5litepod-8", "us-central1"), (1.95944, True, "v5litepod-8", "us-central1")),
        ),
        plan(
            "v6e-8",
            "TPU v6e (Trillium)",
            held=memory(9.1, 33.5, STATED),
            step=0.131,
            peak=918e12,
            includes="slice with its host",
            rates=((21.6, False, "v6e-8", "us-central1"), (2.90339, True, "v6e-8", "asia-southeast1")),
        ),
        plan(
            "v3-8",
            "TPU v3",
            held=memory(11.9, 16.9, STATED),
            step=1.62,
            spread=0.15,
            peak=61.5e12,
            includes="slice with its host",
            rates=((8.0, False, "v3-8", "us-central1"), (2.04, True, "v3-8", "us-central1")),
            advice=(fact("advice-interconnect"),),
        ),
        plan(
            "v100:8",
            "V100-SXM2",
            held=memory(10.2, 16.5, LIMIT),
            step=0.742,
            spread=0.28,
            peak=125e12,
            includes="accelerator alone",
            rates=((19.84, False, "V100 on N1", "us-central1"), (5.0848, True, "V100 on N1", "asia-east1")),
        ),
        plan(
            "h100:8",
            "H100-SXM5-80GB",
            held=memory(10.2, 84.3, LIMIT),
            step=0.124,
            spread=0.3,
            peak=989.5e12,
            bound="memory",
            rates=(
                (88.49, False, "a3-highgpu-8g", "us-central1"),
                (92.9376, False, "a3-megagpu-8g", "us-east4"),
                (50.6095, True, "a3-highgpu-8g", "us-central1"),
                (22.8588, True, "a3-megagpu-8g", "us-west4"),
            ),
            advice=(fact("advice-launches"),),
        ),
        plan(
            "t4",
            "T4",
            devices=1,
            held=memory(16.4, 15.0, LIMIT, replicas=2),
            largest_batch=256,
            problem=fact("batch-does-not-fit", needed=19_200_000_000, available=15_000_000_000, largest=256),
        ),
        plan(
            "v2-8",
            "TPU v2",
            held=None,
            problem=fact("refused", program="replica", message="UNIMPLEMENTED: <no> such thing & more"),
            notes=(fact("fused-step"),),
        ),
    ]  # fmt: skip


def wrap(made: list[Plan], name: str = "gpt2-124m") -> dict[str, Any]:
    """`made` as `chipwise plan --json` prints it."""
    return {
        "schema": SCHEMA,
        "chipwise": "0.1.0",
        "created": "2026-11-21T12:00:00+00:00",
        "recipe": {
            "name": name,
            "parameters": PARAMETERS,
            "batch": BATCH,
            "replicas": REPLICAS,
            "precision": "bf16",
            "steps": STEPS,
            "examples": 2_441_406,
            "evaluations": 1,
            "rows": [
                ["recipe", name],
                ["training examples", "2,441,406"],
                ["evaluation examples", "61,440"],
                ["batch", "512 = 8 replicas × 64"],
                ["duration", "1ep = 4,768 steps (4768 an epoch)"],
                ["optimizer", "adamw"],
                ["  lr", "warmup_cosine(0.0018, warmup=2%)"],
                ["  weight_decay", "0.1"],
                ["precision", "bf16"],
                ["seed", "0"],
            ],
        },
        "plans": [p.to_json() for p in made],
        "verdict": plain(judge(made)),
    }


def document() -> dict[str, Any]:
    """The seven targets."""
    return wrap(plans())
