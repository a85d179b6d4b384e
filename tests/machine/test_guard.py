"""The reasoning about missing accelerators, on hosts described as values."""

import pytest

from chipwise.base.errors import DeviceError
from chipwise.base.facts import fact, say
from chipwise.machine import guard
from chipwise.machine.detect import no_devices
from chipwise.machine.host_facts import HostFacts
from refusals import refused

JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}
CUDA = {**JAX, "jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}
TPU = {**JAX, "libtpu": "0.0.42.1"}
GPU_NODES = frozenset({"/dev/nvidia0", "/dev/nvidia1", "/proc/driver/nvidia"})
V3_NODES = frozenset(f"/dev/accel{i}" for i in range(4))
V5E = {"paths": frozenset({"/dev/vfio/0"}), "pci_tpu_chips": 1}


def refusal(facts, jax_error="", jax_platforms=None):
    """The reasons of `detect` on such a host when JAX found only CPUs, a fact each; `[]` when it goes on."""
    try:
        if left := guard.unused(facts, jax_platforms):
            raise guard.refusal(facts, left, {one.platform: jax_error for one in left})
    except DeviceError as error:
        assert error.code == "cpu-fallback" and "\n" not in str(error)
        return [unused["reason"] for unused in error.facts["unused"]]
    return []


def reason(*arguments, **named):
    """The one reason, both texts of which can be said."""
    (only,) = refusal(*arguments, **named)
    assert say(only) and say(only, "remedy")
    return only


def test_a_plain_host_goes_on():
    assert refusal(HostFacts(packages=JAX)) == []


def test_the_error_names_what_shows_the_accelerator():
    with refused(DeviceError, "cpu-fallback") as caught:
        facts = HostFacts(paths=GPU_NODES, packages=JAX)
        raise guard.refusal(facts, guard.unused(facts), {})
    (unused,) = caught.value.facts["unused"]
    assert (unused["platform"], unused["evidence"]) == ("GPU", ("/dev/nvidia0", "/dev/nvidia1"))
    assert str(unused["reason"]) in str(caught.value) and "--devices cpu" in str(caught.value)


def test_a_gpu_without_the_cuda_plugin():
    facts = HostFacts(paths=GPU_NODES, packages=JAX, nvidia_driver="580.65.06")
    assert reason(facts) == fact("cuda-plugin-missing", jax="0.10.2")


@pytest.mark.parametrize(
    ("driver", "cuda", "code", "oldest"),
    [
        ("470.82.01", "12", "driver-too-old", 525),
        ("470.82.01", "13", "driver-too-old", 580),
        ("535.104.05", "13", "driver-of-cuda-12", 580),
    ],
)
def test_an_old_driver(driver, cuda, code, oldest):
    packages = {**JAX, f"jax-cuda{cuda}-plugin": "0.10.2"}
    told = reason(HostFacts(paths=GPU_NODES, packages=packages, nvidia_driver=driver))
    assert told == fact(code, driver=driver, cuda=cuda, oldest=oldest)


@pytest.mark.parametrize("driver", ["525", "525.60.13", "580.65.06"])
def test_a_new_enough_driver_is_not_blamed(driver):
    assert guard.driver_too_old(HostFacts(packages=CUDA, nvidia_driver=driver)) is None


def test_a_plugin_of_another_release():
    told = reason(HostFacts(paths=GPU_NODES, packages={**CUDA, "jax-cuda12-plugin": "0.9.0"}))
    assert told == fact("cuda-plugin-mismatch", cuda="12", plugin="0.9.0", jaxlib="0.10.2")


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("Backend 'cuda' failed to initialize: CUDA_ERROR_UNKNOWN: unknown error", "cuda-plugin-fails"),
        (
            "Backend 'cuda' failed to initialize: INTERNAL: no supported devices found for platform CUDA",
            "gpu-memory-taken",
        ),
    ],
)
def test_jaxs_own_error_is_quoted_when_nothing_better_is_known(said, code):
    told = reason(HostFacts(paths=GPU_NODES, packages=CUDA, nvidia_driver="580.65.06"), said)
    assert told == fact(code, said=said) and said in str(told)


def test_that_a_platform_is_missing_is_not_quoted():
    assert reason(HostFacts(paths=GPU_NODES, packages=CUDA), "Unknown backend cuda")["said"] == ""


def test_a_container_started_without_its_gpu():
    told = reason(HostFacts(paths=frozenset({"/proc/driver/nvidia"}), packages=CUDA))
    assert told.code == "gpu-not-in-container"


@pytest.mark.parametrize(
    "environment",
    [{"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}, {"NVIDIA_VISIBLE_DEVICES": "void"}],
)
def test_a_hidden_gpu_is_a_wish(environment):
    assert refusal(HostFacts(environment=environment, paths=GPU_NODES, packages=CUDA)) == []


def test_choosing_one_gpu_does_not_hide_it():
    facts = HostFacts(environment={"CUDA_VISIBLE_DEVICES": "1"}, paths=GPU_NODES, packages=JAX)
    assert reason(facts).code == "cuda-plugin-missing"


@pytest.mark.parametrize("setting", ["cpu", "cpu,cuda"])
def test_jax_platforms_is_a_wish(setting):
    facts = HostFacts(environment={"JAX_PLATFORMS": setting}, paths=GPU_NODES, packages=JAX)
    assert refusal(facts) == []
    assert refusal(HostFacts(paths=GPU_NODES, packages=JAX), jax_platforms=setting) == []


def test_jax_platforms_with_an_accelerator_first_is_not():
    facts = HostFacts(environment={"JAX_PLATFORMS": "tpu,cpu"}, paths=V3_NODES, packages=JAX)
    assert reason(facts, jax_platforms="tpu,cpu").code == "libtpu-missing"


def test_a_tpu_vm_without_libtpu():
    assert reason(HostFacts(paths=V3_NODES | {"/lib/libtpu.so"}, packages=JAX)).code == "libtpu-missing"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("ABORTED: The TPU is already in use by process with pid 176028. Not", "tpu-in-use"),
        ("ABORTED: The TPU is already in use", "tpu-in-use"),
        ("Cannot take the lockfile /tmp/libtpu_lockfile", "tpu-in-use"),
        ("TPU initialization failed: open(/dev/accel0): Operation not permitted", "tpu-not-permitted"),
    ],
)
def test_what_jax_says_of_a_tpu(said, code):
    assert reason(HostFacts(**V5E, packages=TPU), said) == fact(code, said=said)


def test_another_failure_of_libtpu_is_quoted_with_its_version():
    told = reason(HostFacts(**V5E, packages=TPU), "Backend 'tpu' failed: something new")
    assert told == fact("libtpu-fails", libtpu="0.0.42.1", said="Backend 'tpu' failed: something new")


def test_colabs_old_network_tpu():
    facts = HostFacts(environment={"COLAB_TPU_ADDR": "10.0.0.2:8470", "COLAB_GPU": "0"}, packages=JAX)
    assert reason(facts).code == "tpu-over-network"


@pytest.mark.parametrize(
    "facts",
    [
        HostFacts(environment={"TPU_NAME": "my-tpu"}),  # a laptop that drives a TPU elsewhere
        HostFacts(paths=frozenset({"/dev/vfio/12"})),  # a host that lends a device to a virtual machine
        HostFacts(
            environment={
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_ACCELERATOR_TYPE": "v5litepod-8",
            },
            packages=TPU,
        ),  # compiling for an absent TPU
    ],
)
def test_weak_signs_of_a_tpu_are_not_one(facts):
    assert guard.accelerators(facts) == [] and refusal(facts) == []


@pytest.mark.parametrize(
    "facts",
    [
        HostFacts(environment={"TPU_NAME": "node-1", "TPU_WORKER_ID": "0"}),
        HostFacts(environment={"TPU_WORKER_ID": "0"}, paths=frozenset({"/dev/vfio/0", "/dev/vfio/1"})),
        HostFacts(pci_tpu_chips=8),
    ],
)
def test_strong_or_two_weak_signs_are(facts):
    assert [a.platform for a in guard.accelerators(facts)] == ["tpu"]


def test_both_accelerators_are_explained():
    reasons = refusal(HostFacts(paths=GPU_NODES | V3_NODES, packages=JAX))
    assert [told.code for told in reasons] == ["cuda-plugin-missing", "libtpu-missing"]


@pytest.mark.parametrize(
    ("facts", "platform", "jax_platforms", "code", "numbers"),
    [
        (HostFacts(packages=JAX), "gpu", None, "platform-absent", {"accelerators": []}),
        (HostFacts(paths=GPU_NODES, packages=JAX), "tpu", None, "platform-absent", {"accelerators": ["GPU"]}),
        (HostFacts(paths=GPU_NODES, packages=JAX), "gpu", None, "cpu-fallback", {}),
        (
            HostFacts(environment={"JAX_PLATFORMS": "cpu"}, paths=GPU_NODES),
            "gpu",
            "cpu",
            "platform-kept-out",
            {"setting": fact("environment-variable", variable="JAX_PLATFORMS", value="cpu")},
        ),
        (
            HostFacts(environment={"CUDA_VISIBLE_DEVICES": ""}, paths=GPU_NODES),
            "gpu",
            None,
            "platform-hidden",
            {"setting": fact("environment-variable", variable="CUDA_VISIBLE_DEVICES", value="")},
        ),
        (HostFacts(paths=V3_NODES, packages=JAX), None, "tpu,cpu", "cpu-fallback", {}),
        (HostFacts(), None, "bogus", "jax-does-not-start", {"said": "no such backend"}),
    ],
)
def test_a_platform_that_jax_refuses(facts, platform, jax_platforms, code, numbers):
    with refused(DeviceError, code, **numbers):
        raise no_devices(facts, platform, jax_platforms, "no such backend")
