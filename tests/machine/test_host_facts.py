import os

import pytest

from chipwise.machine.host_facts import gather


def write(root, path, text=""):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_this_host_can_be_read():
    facts = gather()
    assert facts.packages["jax"] and facts.environment == dict(os.environ)


def test_an_empty_root_has_nothing(tmp_path):
    facts = gather(tmp_path, environment={})
    assert (facts.paths, facts.nvidia_driver, facts.pci_tpu_chips) == (frozenset(), None, 0)


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("sys/module/nvidia/version", "580.65.06\n", "580.65.06"),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
            "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n",
            "535.104.05",
        ),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.51  Release Build  (dvs)",
            "575.51",
        ),
        ("proc/driver/nvidia/version", "something else", None),
    ],
)
def test_the_nvidia_driver(tmp_path, file, text, version):
    write(tmp_path, file, text)
    write(tmp_path, "dev/nvidia0")
    write(tmp_path, "dev/nvidiactl")
    facts = gather(tmp_path)
    assert facts.nvidia_driver == version
    assert facts.matching(r"/dev/nvidia\d+") == ["/dev/nvidia0"]


def test_tpu_cards_are_told_from_googles_other_cards_and_laptop_npus(tmp_path):
    for slot, device in enumerate(["0x0063", "0x0063", "0x0042"]):
        write(tmp_path, f"sys/bus/pci/devices/{slot}/vendor", "0x1ae0\n")
        write(tmp_path, f"sys/bus/pci/devices/{slot}/device", f"{device}\n")
    write(tmp_path, "sys/bus/pci/devices/9/vendor", "0x8086\n")
    write(tmp_path, "sys/bus/pci/devices/9/device", "0x0063\n")
    write(tmp_path, "dev/accel/accel0")
    facts = gather(tmp_path)
    assert facts.pci_tpu_chips == 2 and not facts.matching(r"/dev/accel\d+")
