"""What keeps hosts from meeting, and hosts that differ: one line, which names the host."""

import math
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import chipwise as cw
import processes
import tasks
from chipwise.base.errors import DeviceError, RecipeError
from chipwise.base.facts import fact
from chipwise.machine import cluster, detect, hosts, jax_settings
from chipwise.machine.cluster import Seat
from chipwise.machine.host_facts import installed
from chipwise.run import placement
from chipwise.step.layout import usable_devices
from refusals import refused

HERE = "127.0.0.1"


@pytest.fixture
def join(monkeypatch):
    """Joins as one host of several, before JAX has started."""
    monkeypatch.setattr(jax_settings, "started", lambda: False)
    return lambda index, count, port, wait=10.0: hosts._join(Seat(index, count, HERE, port), wait, 5.0)


def test_a_missing_host(join):
    port = processes.free_port()
    with refused(DeviceError, "hosts-missing", missing=[1, 2], hosts=3, address=HERE, port=port):
        join(0, 3, port, wait=0.0)


def test_a_port_in_use(join):
    with socket.create_server((HERE, 0)) as other:
        port = other.getsockname()[1]
        with refused(DeviceError, "hosts-port-taken", port=port, host_name=socket.gethostname()) as caught:
            join(0, 2, port)
    assert 1024 < caught.value.facts["other"] < 65536


def test_hosts_that_count_differently(join):
    port = processes.free_port()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join, 1, 3, port)
        for joining in (lambda: join(0, 2, port), other.result):
            with refused(DeviceError, "host-twice", host=1, other=3, hosts=2):
                joining()


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "9999999", ""])
def test_seconds_that_are_none(monkeypatch, text):
    monkeypatch.setenv("CHIPWISE_WAIT", text)
    with refused(DeviceError, "variable-not-seconds", variable="CHIPWISE_WAIT", value=text):
        hosts._seconds("WAIT", None, 5.0)
    monkeypatch.setenv("CHIPWISE_WAIT", "2.5")
    assert [hosts._seconds("WAIT", asked, 5.0) for asked in (None, 7.0)] == [2.5, 7.0]
    for asked in (-1.0, float("inf"), float("nan")):
        with refused(RecipeError, "hosts-seconds"):
            hosts._seconds("WAIT", asked, 5.0)


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,3", "JAX_PLATFORMS": "cpu"}, 0),
    ],
)
def test_a_process_on_the_cpu_sees_no_gpu(monkeypatch, variables, gpus):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster, "found", lambda environment, visible: visible)
    assert hosts._seat() == gpus


def test_after_jax_has_started():
    detect.detect(1)
    with refused(DeviceError, "hosts-too-late", hosts=2):
        hosts._join(Seat(0, 2, HERE), 0.0, 5.0)


def test_more_hosts_than_blocks():
    recipe = tasks.recipe()
    assert usable_devices(recipe, 9, hosts=3) == usable_devices(recipe, 8, hosts=8) == 8
    with refused(DeviceError, "hosts-above-blocks", hosts=9, blocks=8, last=7):
        usable_devices(recipe, 9, hosts=9)


class Told:
    """A channel on which the hosts have said `rows`."""

    def __init__(self, *rows):
        self.rows = rows

    def everyone(self, what, value):
        return list(self.rows)


@pytest.mark.parametrize("code", ["host-differs-version", "host-differs-recipe"])
def test_the_host_that_differs_is_named(code):
    alike, other = {code: {"jax": "1", "seed": None}}, {code: {"jax": "2", "seed": None}}
    here = hosts.Hosts(Seat(1, 3, HERE), Told(alike, alike, other), ("a", "b", "c"))
    with refused(DeviceError, code, host=2, host_name="c", name="jax", here="2", there="1"):
        here.compare("program", alike)
    here = hosts.Hosts(Seat(1, 2, HERE), Told({code: {"libtpu": None}}, {code: {"libtpu": "2"}}), ("a", "b"))
    said = "host-differs" if code == "host-differs-version" else code  # nothing of host 0's to install
    with refused(DeviceError, said, host=1, host_name="b", name="libtpu", here="2", there=None):
        here.compare("program", {code: {"libtpu": "2"}})
    with refused(DeviceError, said, host=1, name="libtpu"):  # and so says the host that knows no such name
        hosts.Hosts(Seat(0, 2, HERE), Told({}, {code: {"libtpu": "2"}}), ("a", "b")).compare("program", {})
    here = hosts.Hosts(Seat(1, 2, HERE), Told(alike, {}), ("a", "b"))  # an older chipwise
    with refused(DeviceError, code, host=1, here=None, there="1"):
        here.compare("program", alike)
    hosts.Hosts(Seat(1, 2, HERE), Told(alike, alike), ("a", "b")).compare("program", alike)


class Several:
    """A channel on which this host's values stand beside `rows`, those of the others."""

    def __init__(self, *rows):
        self.rows = rows

    def everyone(self, what, value):
        return [value, *self.rows]


@pytest.mark.parametrize("there", [-math.inf, None])
def test_infinity_is_no_missing_value(there):
    code = "host-differs-recipe"
    here = hosts.Hosts(Seat(0, 2, HERE), Several({code: {"most": there}}), ("a", "b"))
    with refused(DeviceError, code, host=1, name="most", here=there, there=math.inf):
        here.compare("program", {code: {"most": math.inf}})


def devices_of(*counts):
    return [SimpleNamespace(process_index=host) for host, n in enumerate(counts) for _ in range(n)]


def test_a_group_over_hosts():
    def over(shards, *counts):
        return placement._over_hosts(np.reshape(np.asarray(devices_of(*counts), object), (-1, shards)))

    assert over(8, 4, 4) and over(4, 4, 2, 2) and not over(2, 4, 2) and not over(1, 3, 1)
    for counts, here in (((3, 3), 3), ((1, 4, 1), 1), ((3, 4, 1), 3)):  # a part of a group on each
        with refused(DeviceError, "shards-over-hosts", shards=2, here=here):
            over(2, *counts)


@pytest.mark.parametrize(
    "counts, wanted, taken",
    [((4, 2, 1), 7, [4, 2, 1]), ((4, 2, 1), 5, [2, 2, 1]), ((1, 3), 3, [1, 2]), ((4, 4), 3, [2, 1])],
)
def test_devices_are_taken_from_all_hosts(counts, wanted, taken):
    devices = devices_of(*counts)
    chosen = detect.shared(devices, wanted, len(counts))
    assert [sum(d.process_index == host for d in chosen) for host in range(len(counts))] == taken
    assert [id(d) for d in chosen] == [id(d) for d in devices if any(d is one for one in chosen)]
    for few in range(1, len(counts)):
        with refused(DeviceError, "devices-below-hosts", count=few, hosts=len(counts), host=few):
            detect.shared(devices, few, len(counts))


def test_hosts_have_whole_groups_where_they_can():
    chosen = detect.shared(devices_of(4, 4), 6, 2, group=2)
    assert [sum(d.process_index == host for d in chosen) for host in (0, 1)] == [4, 2]
    chosen = detect.shared(devices_of(4, 4), 4, 2, group=4)  # otherwise host 1 would have none
    assert [sum(d.process_index == host for d in chosen) for host in (0, 1)] == [2, 2]


# ---- as two processes say it

RECIPE = """
import os
import tasks

def recipe(**changes):
    other = os.environ["CHIPWISE_HOST"] == "1" and os.environ.get("OTHER_DATA")
    train = tasks.data(seed=2 if other == "all" else 0)
    if other == "one label":
        train.columns["label"][7] = (train.columns["label"][7] + 1) % tasks.CLASSES
    return tasks.recipe(duration="4st", task=tasks.task(train=train), **changes)
"""
START = """
import os, sys
from chipwise.cli import main
from chipwise.machine import arithmetic, detect
how = "--quiet --json --set duration=4st".split()
if os.environ["CHIPWISE_HOST"] == "1":
    if "OTHER_JAX" in os.environ:
        found = arithmetic.installed
        arithmetic.installed = lambda package: "0.1.2" if package == "jax" else found(package)
    how += os.environ.get("OTHER_RECIPE", "").split()
sys.argv = ["chipwise", "train", sys.argv[1], *how]
main()
"""
OTHER = {
    "host-differs-version": ({"OTHER_JAX": ""}, {"name": "jax", "here": "0.1.2", "there": installed("jax")}),
    "host-differs-recipe": ({"OTHER_RECIPE": "--set seed=4"}, {"name": "seed", "here": 4, "there": 3}),
    "host-differs-data": ({"OTHER_DATA": "all"}, {"name": "training", "what": ["examples"]}),
    "host-differs-data, in a label": (
        {"OTHER_DATA": "one label"},
        {"name": "training", "what": ["examples"]},
    ),
}


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE)
    return f"{tmp_path / 'mine.py'}:recipe"


@pytest.mark.slow
@pytest.mark.parametrize("code", OTHER)
def test_two_processes_that_differ_say_so_once(recipe, code):
    environment, facts = OTHER[code]
    told = processes.ends(processes.start(START, 2, 1, recipe, **environment))
    sentence = str(fact(code.partition(",")[0], host=1, host_name=socket.gethostname(), **facts))
    assert [exit_code for exit_code, _, _ in told] == [DeviceError.exit_code] * 2, told
    assert [err.count("error: ") for _, _, err in told] == [1, 0], told
    assert f"error: {sentence}" in told[0][2]
    print(sentence)


@pytest.mark.slow
def test_a_host_that_waits_in_vain(recipe):
    started = processes.start(START, 2, 1, recipe, CHIPWISE_WAIT="4")
    started[1].kill()
    (code, _, err), _ = processes.ends(started)
    assert code == DeviceError.exit_code and err.count("error: ") == 1
    assert "waiting for host" in err and "host 1 of 2" in err.split("error: ")[1], err
    print(err)


@pytest.mark.slow
def test_proxies_do_not_stand_in_the_way(recipe):
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    proxies = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https", "all", "grpc")}
    proxies |= {name.upper(): value for name, value in proxies.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - kept.keys():
            patch.delenv(name)
        said = processes.answer(processes.start(START, 2, 1, recipe, **proxies))
    alone = cw.fit(tasks.recipe(duration="4st"), on=cw.On(devices=1), progress="none")
    assert said["fingerprint"] == alone.fingerprint and said["devices"]["hosts"] == 2
