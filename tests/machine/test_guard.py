"""The reasoning about missing accelerators, on hosts described as values."""

import pytest

from chipwise.errors import DeviceError
from chipwise.machine import guard
from chipwise.machine.detect import no_devices, refuse_fallback
from chipwise.machine.facts import Holder, HostFacts

JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}
CUDA = {**JAX, "jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}
TPU = {**JAX, "libtpu": "0.0.42.1"}
GPU_NODES = frozenset({"/dev/nvidia0", "/dev/nvidia1", "/proc/driver/nvidia"})
V3_NODES = frozenset(f"/dev/accel{i}" for i in range(4))
V5E = {"paths": frozenset({"/dev/vfio/0"}), "pci_tpu_chips": 1}


def refusal(facts, jax_error="", jax_platforms=None):
    """The message of `detect` on such a host when JAX found only CPUs; `None` when it goes on."""
    try:
        refuse_fallback(facts, jax_platforms, lambda platforms: dict.fromkeys(platforms, jax_error))
    except DeviceError as error:
        return str(error)
    return None


def test_a_plain_host_goes_on():
    assert refusal(HostFacts(packages=JAX)) is None


def test_a_gpu_without_the_cuda_plugin():
    message = refusal(HostFacts(paths=GPU_NODES, packages=JAX, nvidia_driver="580.65.06"))
    assert message.startswith("This host has a GPU (/dev/nvidia0, /dev/nvidia1)")
    assert "JAX 0.10.2 is installed without its CUDA plugin" in message
    assert 'pip install "chipwise[cuda]"' in message
    assert "--devices cpu" in message and "JAX_PLATFORMS=cpu" in message


@pytest.mark.parametrize(
    ("driver", "plugin", "fix"),
    [
        ("470.82.01", "jax-cuda12-plugin", "Update the driver to 525"),
        ("470.82.01", "jax-cuda13-plugin", "Update the driver to 580"),
        ("535.104.05", "jax-cuda13-plugin", 'pip install "chipwise[cuda]"'),
    ],
)
def test_an_old_driver(driver, plugin, fix):
    message = refusal(HostFacts(paths=GPU_NODES, packages={**JAX, plugin: "0.10.2"}, nvidia_driver=driver))
    assert f"driver {driver} is too old" in message and fix in message


@pytest.mark.parametrize("driver", ["525", "525.60.13", "580.65.06"])
def test_a_new_enough_driver_is_not_blamed(driver):
    assert guard.driver_too_old(HostFacts(packages=CUDA, nvidia_driver=driver)) is None


def test_a_plugin_of_another_release():
    message = refusal(HostFacts(paths=GPU_NODES, packages={**CUDA, "jax-cuda12-plugin": "0.9.0"}))
    assert "jax-cuda12-plugin 0.9.0 does not belong to jaxlib 0.10.2" in message
    assert 'pip install --upgrade "jax[cuda12]"' in message


def test_jaxs_own_error_is_quoted_when_nothing_better_is_known():
    said = "Backend 'cuda' failed to initialize: CUDA_ERROR_UNKNOWN: unknown error"
    message = refusal(HostFacts(paths=GPU_NODES, packages=CUDA, nvidia_driver="580.65.06"), said)
    assert said in message and "nvidia-smi" in message


def test_a_full_gpu():
    said = "Backend 'cuda' failed to initialize: INTERNAL: no supported devices found for platform CUDA"
    message = refusal(HostFacts(paths=GPU_NODES, packages=CUDA), said)
    assert "taken by another process" in message and said in message


def test_a_container_started_without_its_gpu():
    message = refusal(HostFacts(paths=frozenset({"/proc/driver/nvidia"}), packages=CUDA))
    assert "docker run --gpus all" in message


@pytest.mark.parametrize(
    "environment",
    [{"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}, {"NVIDIA_VISIBLE_DEVICES": "void"}],
)
def test_a_hidden_gpu_is_a_wish(environment):
    assert refusal(HostFacts(environment=environment, paths=GPU_NODES, packages=CUDA)) is None


def test_choosing_one_gpu_does_not_hide_it():
    facts = HostFacts(environment={"CUDA_VISIBLE_DEVICES": "1"}, paths=GPU_NODES, packages=JAX)
    assert "CUDA plugin" in refusal(facts)


@pytest.mark.parametrize("setting", ["cpu", "cpu,cuda"])
def test_jax_platforms_is_a_wish(setting):
    facts = HostFacts(environment={"JAX_PLATFORMS": setting}, paths=GPU_NODES, packages=JAX)
    assert refusal(facts) is None
    assert refusal(HostFacts(paths=GPU_NODES, packages=JAX), jax_platforms=setting) is None


def test_jax_platforms_with_an_accelerator_first_is_not():
    facts = HostFacts(environment={"JAX_PLATFORMS": "tpu,cpu"}, paths=V3_NODES, packages=JAX)
    assert "libtpu" in refusal(facts, jax_platforms="tpu,cpu")


def test_a_tpu_vm_without_libtpu():
    message = refusal(HostFacts(paths=V3_NODES | {"/lib/libtpu.so"}, packages=JAX))
    assert 'pip install "chipwise[tpu]"' in message


def test_a_held_tpu_names_the_process():
    facts = HostFacts(paths=V3_NODES, packages=TPU, tpu_holders=(Holder(2718, "python3", "/dev/accel0"),))
    message = refusal(facts, "Backend 'tpu' failed to initialize: ABORTED: The TPU is already in use")
    assert "process 2718 (python3) holds /dev/accel0" in message and "kill 2718" in message


def test_a_held_tpu_whose_holder_only_jax_knows():
    said = "ABORTED: The TPU is already in use by process with pid 176028. Not attempting to load libtpu.so"
    message = refusal(HostFacts(**V5E, packages=TPU), said)
    assert "process 176028 holds it" in message


def test_a_stale_lock_file():
    facts = HostFacts(paths=V3_NODES | {"/tmp/libtpu_lockfile"}, packages=TPU)
    message = refusal(
        facts, "ABORTED: libtpu.so already in use by another process probably owned by another user"
    )
    assert "sudo rm /tmp/libtpu_lockfile" in message and "lsof" in message


def test_a_tpu_that_may_not_be_opened():
    said = "TPU initialization failed: open(/dev/accel0): Operation not permitted"
    message = refusal(HostFacts(paths=V3_NODES, packages=TPU), said)
    assert "may not open" in message and "--privileged" in message


def test_a_tpu_that_does_not_start_quotes_jax():
    message = refusal(HostFacts(**V5E, packages=TPU), "Backend 'tpu' failed: something new")
    assert "something new" in message and 'pip install --upgrade "chipwise[tpu]"' in message


def test_colabs_old_network_tpu():
    facts = HostFacts(environment={"COLAB_TPU_ADDR": "10.0.0.2:8470", "COLAB_GPU": "0"}, packages=JAX)
    assert "Runtime > Change runtime type" in refusal(facts)


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
    assert guard.accelerators(facts) == [] and refusal(facts) is None


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
    message = refusal(HostFacts(paths=GPU_NODES | V3_NODES, packages=JAX))
    assert "chipwise[cuda]" in message and "chipwise[tpu]" in message and message.count("--devices cpu") == 1


@pytest.mark.parametrize(
    ("facts", "platform", "jax_platforms", "words"),
    [
        (HostFacts(packages=JAX), "gpu", None, "shows no GPU"),
        (HostFacts(paths=GPU_NODES, packages=JAX), "tpu", None, "shows no TPU (GPU)"),
        (HostFacts(paths=GPU_NODES, packages=JAX), "gpu", None, "chipwise[cuda]"),
        (
            HostFacts(environment={"JAX_PLATFORMS": "cpu"}, paths=GPU_NODES),
            "gpu",
            "cpu",
            "JAX_PLATFORMS=cpu in the",
        ),
        (
            HostFacts(environment={"CUDA_VISIBLE_DEVICES": ""}, paths=GPU_NODES),
            "gpu",
            None,
            "CUDA_VISIBLE_DEVICES=''",
        ),
        (HostFacts(paths=V3_NODES, packages=JAX), None, "tpu,cpu", "chipwise[tpu]"),
        (HostFacts(), None, "bogus", "JAX did not start: no such backend"),
    ],
)
def test_a_platform_that_jax_refuses(facts, platform, jax_platforms, words):
    assert words in no_devices(facts, platform, jax_platforms, "no such backend")
