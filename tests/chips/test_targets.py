import fcntl
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from chipwise.base.errors import DeviceError
from chipwise.base.facts import fact
from chipwise.chips.targets import EXAMPLES, MOST_CHIPS, SLICES, names, parse
from chipwise.machine.host_facts import installed
from refusals import refused


@pytest.mark.parametrize(
    ("typed", "name", "chips", "devices", "hosts"),
    [
        ("v2-8", "v2-8", 4, 8, 1),
        ("v2-32", "v2-32", 16, 32, 4),
        ("v3-8", "v3-8", 4, 8, 1),
        ("v3-64", "v3-64", 32, 64, 8),
        ("v4-8", "v4-8", 4, 4, 1),
        ("v4-512", "v4-512", 256, 256, 64),
        ("v5e-1", "v5e-1", 1, 1, 1),
        ("v5litepod-8", "v5e-8", 8, 8, 1),
        ("v5e-8", "v5e-8", 8, 8, 1),
        ("v5e-16", "v5e-16", 16, 16, 4),
        ("v5p-8", "v5p-8", 4, 4, 1),
        ("v6e-8", "v6e-8", 8, 8, 1),
        ("trillium-8", "v6e-8", 8, 8, 1),
        ("tpu7x-2", "tpu7x-2", 1, 2, 1),
        ("tpu7x-8", "tpu7x-8", 4, 8, 1),
        ("ironwood-8", "tpu7x-8", 4, 8, 1),
        ("a100", "a100", 1, 1, 1),
        ("a100-80gb:8", "a100-80gb:8", 8, 8, 1),
        ("h100-pcie", "h100-pcie", 1, 1, 1),
        ("h100:8", "h100:8", 8, 8, 1),
        ("h100:16", "h100:16", 16, 16, 2),
        ("h200", "h200", 1, 1, 1),
        ("k80", "k80", 1, 1, 1),
        ("t4", "t4", 1, 1, 1),
        ("v100:8", "v100:8", 8, 8, 1),
        ("gb200:4", "gb200:4", 4, 4, 1),
        ("gb200:8", "gb200:8", 8, 8, 2),
        ("gh200:2", "gh200:2", 2, 2, 2),
        ("RTX 4070 Ti SUPER", "rtx-4070-ti-super", 1, 1, 1),
        ("rtx-4060-ti-16gb:2", "rtx-4060-ti-16gb:2", 2, 2, 1),
        ("a100:1", "a100", 1, 1, 1),
        # letter case, spaces, underscores, makers
        ("V3-8", "v3-8", 4, 8, 1),
        (" TPU v3-8 ", "v3-8", 4, 8, 1),
        ("tpu_v5litepod-4", "v5e-4", 4, 4, 1),
        ("v5e 16", "v5e-16", 16, 16, 4),
        ("A100_80GB : 8", "a100-80gb:8", 8, 8, 1),
        ("NVIDIA RTX 4090", "rtx-4090", 1, 1, 1),
        ("a100-80gb", "a100-80gb", 1, 1, 1),  # a chip's name, not 80 of a chip
        ("h100-sxm5-80gb", "h100", 1, 1, 1),
        ("NVIDIA A100-SXM4-40GB", "a100", 1, 1, 1),
    ],
)
def test_names_people_type(typed, name, chips, devices, hosts):
    target = parse(typed)
    assert (target.name, target.chips, target.devices, target.hosts) == (name, chips, devices, hosts)
    assert (target.topology is None) == (target.chip.kind != "TPU")


def test_every_canonical_name_is_its_own():
    assert len(set(names())) == len(names())
    for name in names():
        target = parse(name)
        assert target.name == name and target.chips <= MOST_CHIPS
        assert target.devices == target.chips * target.chip.jax_devices_per_chip, name
        assert target.chips % target.hosts == 0, name
        assert target.chips // target.hosts <= target.chip.chips_per_host, name


def test_the_number_counts_cores_or_chips_as_google_does():
    for name, per_chip in {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "tpu7x": 2, "v5e": 1, "v6e": 1}.items():
        for size, shape in SLICES[name].items():
            chips = math.prod(int(side) for side in shape.split("x"))
            assert int(size) == chips * per_chip, (name, size)
            assert parse(f"{name}-{size}").chips == chips


@pytest.mark.parametrize(("typed", "rented"), [("v2-1", "v2-8"), ("v3-1", "v3-8"), ("tpu7x-1", "tpu7x-2"),
                                               ("tpu-v2-core", "v2-8")])  # fmt: skip
def test_one_core_is_a_plan_and_not_for_rent(typed, rented):
    target = parse(typed)
    assert (target.chips, target.devices, target.rented_as) == (1, 1, rented)
    assert target.note == fact("target-one-core", rented_as=rented)


@pytest.mark.parametrize(
    ("typed", "code", "facts"),
    [
        ("", "target-unknown", {"examples": EXAMPLES}),
        ("xyz", "target-unknown", {"target": "xyz", "hint": None}),
        ("h1000", "target-unknown", {"hint": "h100"}),
        ("v9-8", "target-unknown", {"target": "v9-8"}),
        ("v5", "target-unknown", {"target": "v5"}),
        ("v5e", "slice-unknown", {"counted": "chips", "sizes": [f"v5e-{n}" for n in SLICES["v5e"]]}),
        ("v3-4", "slice-unknown", {"counted": "TensorCores", "chip": "v3"}),
        ("v2-64", "slice-unknown", {"sizes": [f"v2-{n}" for n in (1, 8, 32, 128, 256, 512)]}),
        ("v3-1024", "slice-unknown", {}),
        ("v4-1", "slice-unknown", {"sizes": [f"v4-{n}" for n in SLICES["v4"]]}),
        ("v5e-2", "slice-unknown", {"counted": "chips"}),
        ("v6e-0", "slice-unknown", {}),
        ("a100-8", "gpu-count", {"near": ["a100:8"]}),
        ("v3:8", "slice-unknown", {"chip": "v3"}),
        ("h100:0", "gpu-count", {"near": ["h100:1"]}),
        ("h100:", "gpu-count", {}),
        ("h100:2.5", "gpu-count", {}),
        ("h100:9", "gpu-count", {"most": 8, "near": ["h100:8", "h100:16"]}),
        ("gb200:6", "gpu-count", {"most": 4, "near": ["gb200:4", "gb200:8"]}),
        ("h100:512", "gpu-count", {"near": ["h100:256"]}),
        ("h1000:8", "target-unknown", {"hint": "h100:8"}),
        ("cpu", "target-cpu", {"target": "cpu"}),
        ("rtx-3080", "target-ambiguous", {"names": ["rtx-3080-10gb", "rtx-3080-12gb"]}),
        ("5060Ti:2", "target-ambiguous", {"names": ["rtx-5060-ti-8gb", "rtx-5060-ti-16gb"]}),
    ],
)
def test_impossible_ones_say_why_and_what_is_near(typed, code, facts):
    with refused(DeviceError, code, **facts) as caught:
        parse(typed)
    assert caught.value.exit_code == 4


def test_topology_arguments_are_plain_values():
    assert parse("h100:8").topology_arguments() == {}
    assert parse("v3-8").topology_arguments() == {"topology_name": "v3:2x2"}
    assert parse("v4-8").topology_arguments() == {
        "topology_name": "v4:2x2x1",
        "chip_config_name": "megacore",
    }
    assert parse("v5e-8").topology_arguments()["chips_per_host_bounds"] == [2, 4, 1]
    for name in names():
        arguments = parse(name).topology_arguments()
        assert json.loads(json.dumps(arguments)) == arguments
        if arguments:
            assert re.fullmatch(r"(v\d[ep]?|tpu7x):\d+x\d+(x\d+)?", arguments["topology_name"])


COUNT = """
import json, sys
from jax.experimental import topologies

for arguments in json.load(sys.stdin):
    devices = topologies.get_topology_desc(platform="tpu", **arguments).devices
    print(json.dumps([len(devices), devices[0].device_kind, len({d.process_index for d in devices})]))
"""


@pytest.mark.slow
@pytest.mark.skipif(installed("libtpu") is None, reason="needs libtpu, which TPU wheels bring")
def test_the_compiler_knows_every_topology():
    """libtpu, without a TPU: one process at a time may hold it."""
    targets = [parse(n) for n in (*names(), "v2-1", "v3-1", "tpu7x-1") if parse(n).topology]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    }
    with (Path(tempfile.gettempdir()) / "libtpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "-c", COUNT],
            input=json.dumps([target.topology_arguments() for target in targets]),
            env=environment, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    if "libtpu_lockfile" in done.stderr:
        pytest.skip("another process holds libtpu")
    assert done.returncode == 0, done.stderr
    for target, line in zip(targets, done.stdout.splitlines(), strict=True):
        listed, kind, processes = json.loads(line)
        assert kind in target.chip.device_kinds, target.name
        if target.rented_as:
            assert listed >= target.devices, target.name
        else:
            assert (listed, processes) == (target.devices, target.hosts), target.name
