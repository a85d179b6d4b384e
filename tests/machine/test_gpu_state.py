"""What NVML tells of a GPU. The library here is made up: it answers as the driver of a described card."""

from types import SimpleNamespace

import pytest

from chipwise.machine.gpu_state import GpuState, Watched


class NVMLError(Exception):
    pass


def driver(cards=1, missing=(), names=None, **changes):
    """The bindings, for cards in good order but for `changes`."""
    answers = {
        "ClockInfo": 1900,
        "MaxClockInfo": 1980,
        "CurrentClocksEventReasons": 0,
        "EnforcedPowerLimit": 700_000,
        "PowerManagementDefaultLimit": 700_000,
        "CurrPcieLinkGeneration": 5,
        "MaxPcieLinkGeneration": 5,
        "CurrPcieLinkWidth": 16,
        "MaxPcieLinkWidth": 16,
        "ComputeRunningProcesses": ["this one"],
        **changes,
    }

    def asked(name):
        def answer(handle, *_):
            if name in missing:
                raise NVMLError("not supported")
            asked_of.append(handle)
            return answers[name]

        return answer

    asked_of = []
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        asked_of=asked_of,
        nvmlDeviceGetCount=lambda: cards,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetName=lambda i: (names or ["H100"] * cards)[i],
        **{f"nvmlDeviceGet{name}": asked(name) for name in answers},
    )


def gpu(number=0, platform="gpu", process=0):
    return SimpleNamespace(id=number, local_hardware_id=number, platform=platform, process_index=process)


def states(library, *devices):
    with Watched(devices or [gpu()], library) as watched:
        pass
    return watched.states


def codes(library):
    (state,) = states(library).values()
    return [one.code for one in state.findings(0)]


@pytest.fixture(autouse=True)
def all_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_card_in_good_order_has_no_findings():
    (state,) = states(driver()).values()
    assert state == GpuState(1900, 1980, (), 700, 700, 5, 16, 5, 16, 1)
    assert list(state.findings(0)) == []


@pytest.mark.parametrize(
    "code, changes",
    {
        "gpu-clock-low": {"ClockInfo": 1000, "CurrentClocksEventReasons": 0x20 | 0x04},
        "gpu-clock-low-unsaid": {"ClockInfo": 1000, "CurrentClocksEventReasons": 0x01},
        "gpu-power-limited": {"EnforcedPowerLimit": 350_000},
        "gpu-link-narrow": {"CurrPcieLinkWidth": 4},
        "gpu-shared": {"ComputeRunningProcesses": ["this one", "another"]},
    }.items(),
)
def test_what_slows_a_card_is_named(code, changes):
    assert codes(driver(**changes)) == [code]


def test_a_slower_generation_is_a_narrow_link():
    assert codes(driver(CurrPcieLinkGeneration=3)) == ["gpu-link-narrow"]


def test_the_drivers_reasons_are_said():
    low = driver(ClockInfo=1000, CurrentClocksEventReasons=0x40 | 0x04)
    (state,) = states(low).values()
    assert state.slowed_by == ("its power limit", "its temperature")
    (found,) = state.findings(3)
    assert found.numbers["device"] == 3 and "its power limit and its temperature" in str(found)


@pytest.mark.parametrize("share, found", [(0.84, 1), (0.86, 0)])
def test_a_clock_at_the_usual_power_limit_is_none(share, found):
    assert len(codes(driver(ClockInfo=share * 1980))) == found


def test_what_a_card_does_not_support_is_unknown():
    everything = [n.removeprefix("nvmlDeviceGet") for n in vars(driver()) if n.startswith("nvmlDeviceGet")]
    library = driver(missing=everything)
    assert states(library) == {0: GpuState()} and codes(library) == []


def test_bindings_that_lack_a_function_leave_it_unknown():
    library = driver()
    del library.nvmlDeviceGetCurrentClocksEventReasons, library.nvmlDeviceGetClockInfo
    (state,) = states(library).values()
    assert state.clock_MHz is None and state.pcie_lanes == 16


@pytest.mark.parametrize("visible, handle", [("1,0", 1), ("GPU-5", "GPU-5"), (" 1", 1)])
def test_the_visible_devices_are_counted(monkeypatch, visible, handle):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    library = driver(cards=2)
    assert states(library) and set(library.asked_of) == {handle}


@pytest.mark.parametrize("visible", ["MIG-1", "7"])
def test_a_part_of_a_card_or_a_missing_one_is_not_stated(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert states(driver()) == {}


def test_cards_of_several_kinds_are_not_stated():
    assert states(driver(cards=2, names=["H100", "A100"])) == {}


def test_only_gpus_of_this_host_are_looked_at():
    library = driver(cards=2)
    assert states(library, gpu(0), gpu(1), gpu(1, process=1), gpu(0, "cpu")).keys() == {0, 1}
    assert states(None, gpu(platform="cpu")) == {}
