"""Which programs a process refuses to compile."""

import pytest

from chipwise.base.errors import DeviceError
from chipwise.run import programs


def test_after_tuned_programs_a_process_refuses_exact_ones(monkeypatch):
    monkeypatch.setattr(programs, "_tuned", set())
    for exact in (True, True, False, False):
        programs.check_tuned("gpu", exact)
    with pytest.raises(DeviceError) as caught:
        programs.check_tuned("gpu", True)
    assert caught.value.code == "kernels-tuned"
    for platform in ("cpu", "cpu", "tpu"):
        programs.check_tuned(platform, platform == "tpu")
        programs.check_tuned("cpu", True)
