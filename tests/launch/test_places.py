"""What is written for each place: by its own tools where they are installed, by running the scripts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from chipwise.base.errors import DeviceError, RecipeError
from chipwise.chips.targets import names, parse
from chipwise.launch import places
from chipwise.launch.launch_job import LaunchJob, check, local_data, name_of, packages, recipe_file
from chipwise.launch.places import PLACES, offered, place, write
from chipwise.machine.host_facts import installed
from refusals import refused

AWKWARD = 'note=it\'s $HOME "here" {x}'


def job(target: str, **changes) -> LaunchJob:
    """A job whose bucket is Google's."""
    plain = LaunchJob(
        name="chipwise-digits",
        target=parse(target),
        words=("digits", "--set", AWKWARD),
        packages=packages(parse(target), None, "chipwise-1-py3-none-any.whl"),
        carried={"chipwise-1-py3-none-any.whl": b"a wheel"},
        bucket="gs://my-runs/a",
    )
    return replace(plain, **changes)


EXAMPLES = [
    ("skypilot", "v5e-8"), ("skypilot", "h100:16"), ("skypilot", "t4"), ("slurm", "h100:16"),
    ("gcloud", "v5e-16"), ("docker", "t4"), ("docker", "v5e-8"),
    ("kaggle", "t4:2"), ("colab", "v5e-1"), ("dstack", "h100:8"),
]  # fmt: skip


BUCKETS = {"dstack": "s3://my-runs/a"}


def write_in(folder, where: str, one: LaunchJob, cloud: str | None = None) -> dict[str, str]:
    there = place(where).at(cloud)
    bucket = one.bucket.replace("gs://", "s3://") if there.scheme == "s3" else one.bucket
    files = write(there, replace(one, bucket=bucket))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return {name: content for name, content in files.items() if isinstance(content, str)}


@pytest.mark.parametrize("where", PLACES)
def test_every_offered_target_has_files(where):
    targets = offered(place(where))
    assert targets
    for target in targets:
        assert all(
            write(place(where), job(target.name, bucket=BUCKETS.get(where, "gs://my-runs/a"))).values()
        )


def test_what_is_rented_is_what_was_planned():
    assert "v5e-8" in [target.name for target in offered(place("kaggle"))]
    assert places.skypilot(parse("v5e-8")) == "tpu-v5litepod-8"
    assert places.skypilot(parse("a100-80gb:16")) == "A100-80GB:8"
    assert places.google_type(parse("v3-8")) == "v3-8" and places.google_type(parse("tpu7x-8")) is None


def test_versions_are_those_of_the_plan():
    import jax

    pinned = packages(parse("v5e-8"), "gs://data/x", None)
    assert f"jax[tpu]=={jax.__version__}" in pinned and "gcsfs" in pinned
    assert any(one.startswith("libtpu==") for one in pinned)
    assert packages(parse("t4"), None, "https://example.org/chipwise.whl")[0].endswith(".whl")


def test_a_recipe_has_a_name_that_every_place_takes():
    for recipe in ("digits", "My_Task.py:recipe", "a/b/Übung.py:big", "x" * 90):
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name_of(recipe)), recipe
    assert recipe_file("digits") is None and recipe_file("a/b.py:c").name == "b.py"
    assert local_data("gs://x/y") is None and local_data("data").name == "data"


@pytest.mark.parametrize("where, target", EXAMPLES)
def test_settings_arrive_as_they_were_typed(where, target, tmp_path):
    """The command that each file holds, read by a shell, has the setting's own characters."""
    texts = write_in(tmp_path, where, job(target)).values()
    if where in ("kaggle", "colab"):
        notebook = json.loads(next(iter(texts)))
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        sources = ["".join(cell["source"]) for cell in notebook["cells"]]
        lines = [
            source.split("\n")[1] for source in sources if "%%bash\nchipwise --restart 9 train" in source
        ]
    else:
        lines = [line for text in texts for line in text.splitlines() if AWKWARD[:8] in line]
    for line in lines:
        words = re.sub(r"^.*?(?=chipwise (--restart 9 )?train)", "", line).removesuffix(" &")
        echoed = subprocess.run(
            ["bash", "-c", f'chipwise() {{ printf "%s\\n" "$@"; }}; {words}'], capture_output=True, text=True
        )
        assert AWKWARD in echoed.stdout.splitlines()


@pytest.mark.parametrize("where, target", [e for e in EXAMPLES if e[0] in ("slurm", "gcloud", "docker")])
def test_scripts_are_sound(where, target, tmp_path):
    files = write_in(tmp_path, where, job(target, spot=where == "gcloud"))
    scripts = [name for name in files if name.endswith((".sh", ".sbatch"))]
    for name in scripts:
        subprocess.run(["bash", "-n", name], cwd=tmp_path, check=True)
    if shutil.which("shellcheck"):
        command = ["shellcheck", "--exclude=SC2016", *scripts]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


CELLS = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
nbclient.NotebookClient(notebook, timeout=120).execute()
"""


@pytest.mark.slow
@pytest.mark.parametrize("where, target", [e for e in EXAMPLES if e[0] in ("kaggle", "colab")])
def test_a_notebook_runs(where, target, tmp_path):
    """Every cell, in a kernel; programs in the place of pip and chipwise say how they were called."""
    pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    file = tmp_path / "my_task.py"
    file.write_text("recipe = 1\n")
    own = job(target, words=(f"{file}:recipe", "--set", AWKWARD), file=file)
    (name,) = write_in(tmp_path, where, own)
    (tmp_path / "google" / "colab").mkdir(parents=True)
    (tmp_path / "google" / "colab" / "__init__.py").write_text("")
    (tmp_path / "google" / "colab" / "drive.py").write_text(
        "def mount(path): assert path == '/content/drive'"
    )
    tools, ran = tmp_path / "tools", tmp_path / "ran"
    tools.mkdir(), ran.mkdir()
    called = f'echo "$(basename "$0") $*" >> {tools}/called'
    environment = programs(tools, pip=called, chipwise=called) | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", CELLS, str(tmp_path / name)]
    done = subprocess.run(command, cwd=ran, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    calls = (tools / "called").read_text().splitlines()
    wanted = ["pip install", "chipwise --restart 9 train", "chipwise report"]
    assert [call.startswith(f"{words} ") for call, words in zip(calls, wanted, strict=True)] == [True] * 3
    assert AWKWARD in calls[1] and (ran / "my_task.py").read_text() == "recipe = 1\n"
    assert (ran / "chipwise-1-py3-none-any.whl").read_bytes() == b"a wheel"


@pytest.mark.parametrize("cloud", places.CLOUDS)
@pytest.mark.parametrize("where", ["skypilot", "dstack"])
def test_a_cloud_is_the_only_one_and_its_needs_are_in_the_file(where, cloud, tmp_path):
    there = place(where).at(cloud)
    one = job("h100:8" if where == "dstack" else "b200:8", about=there.needs)
    (text,) = write_in(tmp_path, where, one, cloud).values()
    document = yaml.safe_load(text)
    assert all(f"# {need}\n" in text for need in there.needs)
    assert {need.code for need in there.needs} >= {f"launch-needs-{where}"}
    if where == "dstack":
        assert (document["backends"], document["resources"]) == (
            [there.cloud.backend],
            {"gpu": "H100:80GB:8"},
        )
        assert document["files"] == ["./chipwise-digits-files:/carried"]
    else:
        assert document["resources"]["infra"] == cloud and document["num_nodes"] == 1
        assert (
            "/runs" in document["file_mounts"]
        ) is there.cloud.mounts  # SkyPilot mounts no bucket at others
        assert document.get("secrets", {}).keys() == set(there.begin("x")) & {*places._SECRETS[1::2]}


SOLD = {
    "runpod": {
        "A100-80GB": "a100-pcie", "A100-80GB-SXM": "a100-80gb", "A30": "a30", "A40": "a40", "B200": "b200",
        "H100": "h100-pcie", "H100-NVL": "h100-nvl", "H100-SXM": "h100", "H200-SXM": "h200", "L4": "l4",
        "L40S": "l40s", "RTX3070": "rtx-3070", "RTX3090": "rtx-3090", "RTX4080": "rtx-4080",
        "RTX4090": "rtx-4090", "RTX5080": "rtx-5080", "RTX5090": "rtx-5090", "RTX6000-Ada": "rtx-6000-ada",
        "RTXA4000": "rtx-a4000", "RTXA5000": "rtx-a5000", "RTXA6000": "rtx-a6000",
        "RTXPRO6000-WK": "rtx-pro-6000", "V100-16GB-PCIe": "v100-pcie", "V100-16GB-SXM2": "v100",
        "V100-32GB-SXM2": "v100-32gb",
    },
    "vast": {
        "A10": "a10", "A40": "a40", "B200": "b200", "L4": "l4", "L40S": "l40s", "RTX6000-Ada": "rtx-6000-ada",
        "RTXA4000": "rtx-a4000", "RTXA5000": "rtx-a5000", "RTXA6000": "rtx-a6000",
        "RTXPRO6000WS": "rtx-pro-6000", "T4": "t4",
    },
    "lambda": {
        "A10": "a10", "A100": "a100", "A100-80GB": "a100-80gb", "A6000": "rtx-a6000", "B200": "b200",
        "H100": "h100", "V100": "v100",
    },
}  # fmt: skip
"""The chips that SkyPilot's own names mean at each cloud, where it is one alone."""
OF_EIGHT = {("lambda", "a100"), ("lambda", "h100")}  # a smaller machine may have PCIe cards


@pytest.mark.parametrize("cloud", places.CLOUDS)
def test_a_named_cloud_rents_the_chip_of_the_plan_or_none(cloud):
    where, one = place("skypilot").at(cloud), job("t4")
    for target in map(parse, names()):
        if target.rented_as:
            continue
        chip = target.chip.names[0]
        if chip in SOLD[cloud].values() and (target.chips == 8 or (cloud, chip) not in OF_EIGHT):
            name, _, number = places.skypilot(target, where.cloud).rpartition(":")
            assert (SOLD[cloud][name], number) == (chip, str(target.chips))
            assert where.offers(target)
        else:
            with refused(DeviceError, "launch-not-offered-at", cloud=cloud, target=target.name) as caught:
                write(where, replace(one, target=target))
            assert "b200" in caught.value.facts["has"]


AWS = """
echo "$@" >> "$AWS_FOLDER/calls"
words=("$@")
case "$1 $2" in
  "s3 ls") [ -z "$NO_BUCKET" ] ;;
  "s3 cp") cat > "$AWS_FOLDER/started" ;;
  "s3 sync")
    from=${words[-2]} to=${words[-1]}
    case "$from" in s3://*) from=$AWS_FOLDER/bucket ;; *) to=$AWS_FOLDER/bucket ;; esac
    mkdir -p "$from" "$to"; cp -r "$from/." "$to" ;;
esac
"""


@pytest.mark.parametrize("where, cloud, at", [("dstack", None, "commands"), ("skypilot", "vast", "run")])
@pytest.mark.parametrize("no_bucket", ["", "1"])
def test_a_run_is_copied_back_and_forth_where_no_bucket_is_mounted(tmp_path, where, cloud, at, no_bucket):
    """A stopped run begins with what the bucket has, its last state gets there, and its exit code stays."""
    (text,) = write_in(tmp_path, where, job("t4"), cloud).values()
    script = yaml.safe_load(text)[at]
    tools, home = tmp_path / "tools", tmp_path / "home"
    tools.mkdir(), home.mkdir()
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "checkpoint").write_text("5")
    train = 'while [ $# -gt 1 ]; do shift; done; echo "$(cat "$1/checkpoint") 9" > "$1/checkpoint"; exit 75'
    environment = programs(tools, aws=AWS, chipwise=train, python3="")
    environment |= {"HOME": str(home), "AWS_FOLDER": str(tmp_path), "NO_BUCKET": no_bucket}
    command = ["bash", "-c", script if at == "run" else script[0]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    kept = (tmp_path / "bucket" / "checkpoint").read_text()
    if no_bucket:
        assert done.returncode not in (0, 75) and kept == "5"
    else:
        assert (done.returncode, kept) == (75, "5 9\n") and (tmp_path / "started").exists()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "s3 ls s3://my-runs/" and len(calls) == (1 if no_bucket else 4)


KEEPS = """
echo "$@" >> "$FOLDER/calls"
[ "$2" != sync ] && [ "$2" != rsync ] && exit
case "$*" in
  *--delete*) [ ! -e "$FOLDER/broken" ] && [ -s "$FOLDER/ends" ] && rm "$FOLDER/ends" && exit 1
    [ ! -e "$FOLDER/broken" ] && touch "$FOLDER/kept" ;;
esac
"""
TRAINS = """
trap 'echo saved > "$FOLDER/saved"; exit 75' TERM
touch "$FOLDER/trains"
case "$HOW" in
  keeper) for pid in $(ps -o pid= --ppid $PPID); do [ $pid = $$ ] || kill $pid 2>/dev/null; done; exit 75 ;;
  stopped) for _ in $(seq 600); do sleep 0.05; done ;;
esac
exit 75
"""


@pytest.mark.parametrize("where, cloud", [("dstack", None), ("skypilot", "vast"), ("gcloud", None)])
@pytest.mark.parametrize("how", ["keeper", "stopped", "once", "broken"])
def test_the_last_state_is_kept_and_the_exit_code_stays(tmp_path, where, cloud, how):
    """Where the copier is gone, a copy fails once or always, or the job is told to stop."""
    texts = write_in(tmp_path, where, job("v5e-8" if where == "gcloud" else "t4"), cloud)
    tools = tmp_path / "tools"
    tools.mkdir()
    environment = programs(tools, aws=KEEPS, gcloud=KEEPS, chipwise=TRAINS, curl="echo 0", python3="")
    environment |= {"HOME": str(tmp_path / "home"), "FOLDER": str(tmp_path), "HOW": how}
    if where == "gcloud":
        (tmp_path / "chipwise" / "bin").mkdir(parents=True)
        programs(tmp_path / "chipwise" / "bin", chipwise=TRAINS)
        wanted = ["chipwise-digits-files/chipwise-1-py3-none-any.whl", *job("v5e-8").packages[1:], ""]
        (tmp_path / "chipwise" / "wanted").write_text("\n".join(wanted))
        command = ["bash", "chipwise-digits.host.sh"]
    else:
        (text,) = texts.values()
        document = yaml.safe_load(text)
        shells = {"skypilot": ["bash", "-c"], "dstack": ["bash", "-i", "-c"]}
        command = [*shells[where], document["run"] if where == "skypilot" else document["commands"][0]]
    if how == "once":
        (tmp_path / "ends").write_text("1")
    elif how == "broken":
        (tmp_path / "broken").touch()
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        if how == "stopped":
            wait_for(tmp_path / "trains", started)
            # dstack's runner tells the whole group, others only the script
            (os.killpg if where == "dstack" else os.kill)(started.pid, signal.SIGTERM)
        said = started.communicate(timeout=60)[1]
    assert started.returncode == 75, said
    assert (tmp_path / "kept").exists() == (how != "broken")
    assert ("did not reach" in said) == (how == "broken")
    assert (tmp_path / "saved").exists() == (how == "stopped")


def wait_for(file, process):
    while not file.exists():
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.skipif(not installed("skypilot"), reason="SkyPilot is not installed")
def test_skypilot_reads_its_tasks(tmp_path):
    for target in ("v5e-8", "h100:16", "t4"):
        (name,) = write_in(tmp_path, "skypilot", job(target))
        read = "import sys, sky; sky.Task.from_yaml(sys.argv[1])"
        subprocess.run([sys.executable, "-c", read, name], cwd=tmp_path, check=True, timeout=120)


def programs(folder, **scripts: str) -> dict[str, str]:
    """An environment in which each named program is a script."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


GCLOUD = """
cd "$(dirname "$0")"
echo "$3 $4" >> calls
case "$3 $4" in
  "queued-resources describe")
    [ -s state ] || { echo "ERROR: NOT_FOUND: no such" >&2; exit 1; }
    echo "WARNING: an update is available" >&2; cat state ;;
  "queued-resources create") echo ACTIVE > state ;;
  "queued-resources delete") rm -f state ;;
  "tpu-vm ssh")
    n=$(($(cat tries 2>/dev/null || echo 0) + 1)); echo $n > tries
    if [ $n = 1 ]; then echo SUSPENDED > state; exit 1; fi  # preempted
    if [ $n = 3 ]; then touch result; fi  # n=2: failed once by itself
    ;;
esac
if [ "$1 $2" = "storage ls" ]; then [ -e result ]; fi
"""


def test_gcloud_makes_preempted_machines_again_and_deletes_them(tmp_path):
    tools, folder = tmp_path / "tools", tmp_path / "job"
    tools.mkdir(), folder.mkdir()
    write_in(folder, "gcloud", job("v5e-8", spot=True))
    environment = programs(tools, gcloud=GCLOUD, sleep="")
    done = subprocess.run(
        ["bash", "chipwise-digits.sh"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    calls = (tools / "calls").read_text().splitlines()
    assert calls.count("queued-resources create") == 2 and calls.count("tpu-vm ssh") == 3
    assert calls[-1] == "queued-resources delete" and not (tools / "state").exists()


def test_slurm_tells_the_tasks_and_queues_what_was_stopped_again(tmp_path):
    """SLURM's own signal goes to the tasks: srun would make SIGKILL of a SIGTERM that it is sent."""
    text = write_in(tmp_path, "slurm", job("h100"))["chipwise-digits.sbatch"]
    assert "#SBATCH --signal=SIGTERM@120\n" in text and "trap" not in text
    tools = tmp_path / "tools"
    tools.mkdir()
    chipwise = tmp_path / "chipwise-digits-env" / "bin"
    chipwise.mkdir(parents=True)
    programs(chipwise, chipwise="")
    wanted = "\n".join(["chipwise-digits-files/chipwise-1-py3-none-any.whl", *job("h100").packages[1:], ""])
    (chipwise.parent / "wanted").write_text(wanted)
    for code, queued in ((0, False), (1, False), (75, True)):
        scontrol = '[ "$1" = show ] && echo a || echo "$@" > requeued'
        scripts = {"srun": f"exit {code}", "scontrol": scontrol}
        environment = programs(tools, **scripts) | {
            "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a",
        }  # fmt: skip
        done = subprocess.run(["bash", "chipwise-digits.sbatch"], cwd=tmp_path, env=environment, timeout=60)
        assert done.returncode == code and (tmp_path / "requeued").exists() == queued
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_a_task_of_a_slurm_array_has_its_own_run_and_is_queued_again_alone(tmp_path):
    """`scontrol requeue` with the job id of the last task would queue all tasks again."""
    write_in(tmp_path, "slurm", job("h100"))
    chipwise, tools = tmp_path / "chipwise-digits-env" / "bin", tmp_path / "tools"
    chipwise.mkdir(parents=True), tools.mkdir()
    programs(chipwise, chipwise="")
    wanted = "\n".join(["chipwise-digits-files/chipwise-1-py3-none-any.whl", *job("h100").packages[1:], ""])
    (chipwise.parent / "wanted").write_text(wanted)
    scripts = {
        "srun": 'echo "${@: -1}" >> runs; exit 75',
        "scontrol": '[ "$1" = show ] && echo a || echo "$@" >> requeued',
    }
    told = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "a", "SLURM_ARRAY_JOB_ID": "40"}
    for task, number in (("1", "41"), ("2", "40")):
        about = {"SLURM_ARRAY_TASK_ID": task, "SLURM_JOB_ID": number}
        environment = programs(tools, **scripts) | told | about
        subprocess.run(["bash", "chipwise-digits.sbatch"], cwd=tmp_path, env=environment, timeout=60)
    assert (tmp_path / "runs").read_text().split() == ["runs/chipwise-digits-1", "runs/chipwise-digits-2"]
    assert (tmp_path / "requeued").read_text() == "requeue 40_1\nrequeue 40_2\n"


def test_no_place_overwrites_a_file_of_another():
    endings = [ending for one in PLACES.values() for ending in one.templates]
    assert len(endings) == len(set(endings))


def test_slurm_goes_on_with_the_nodes_that_are_left(tmp_path):
    write_in(tmp_path, "slurm", job("h100:24"))
    chipwise, tools = tmp_path / "chipwise-digits-env" / "bin", tmp_path / "tools"
    chipwise.mkdir(parents=True), tools.mkdir()
    programs(chipwise, chipwise="")
    wanted = "\n".join(["chipwise-digits-files/chipwise-1-py3-none-any.whl", *job("h100").packages[1:], ""])
    (chipwise.parent / "wanted").write_text(wanted)
    count = 'n=$(($(cat n 2>/dev/null || echo 0) + 1)); echo $n > n; echo "$@" >> calls\n'
    scripts = {
        "scontrol": "printf 'node%s\\n' 1 2 3",
        "sinfo": "echo node3 mixed\necho node1 allocated\necho node2 'down*'\n",
        "srun": count + "exit $((n < 3 ? 75 + n : 0))",  # 76, 77, then done
    }
    told = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]"}
    done = subprocess.run(
        ["bash", "chipwise-digits.sbatch"], cwd=tmp_path, env=programs(tools, **scripts) | told, timeout=60
    )
    calls = [
        dict(re.findall(r"--(\w+)=(\S+)", line)) for line in (tmp_path / "calls").read_text().splitlines()
    ]
    assert done.returncode == 0 and [one["nodelist"] for one in calls] == [
        "node1,node2,node3",
        *["node1,node3"] * 2,
    ]
    assert [one["ntasks"] for one in calls] == [one["nodes"] for one in calls] == ["3", "2", "2"]


def test_skypilot_mounts_a_whole_bucket(tmp_path):
    text = write_in(tmp_path, "skypilot", job("t4", bucket="s3://my-runs/a/b"))["chipwise-digits.yaml"]
    assert 'source: "s3://my-runs"\n' in text and "--run /runs/a/b/chipwise-digits\n" in text


def test_a_container_has_what_installs_it():
    fetched = job("t4", packages=("git+https://example.org/chipwise",), carried={})
    assert "-slim\n" not in write(place("docker"), fetched)["chipwise-digits.Dockerfile"]
    also = job("t4", packages=("chipwise==1", "git+https://example.org/mine"))
    assert "-slim\n" not in write(place("docker"), also)["chipwise-digits.Dockerfile"]
    assert "-slim\n" in write(place("docker"), job("t4"))["chipwise-digits.Dockerfile"]


HOST_GCLOUD = """
case "$*" in
  "storage ls gs://my-runs") [ ! -e unreachable ] ;;
  "storage cp chipwise-digits.host.sh gs://my-runs/a/chipwise-digits.started") [ ! -e readonly ] ;;
  "storage ls gs://my-runs/a/chipwise-digits")
    [ ! -e unlisted ] || { echo "ERROR: HTTPError 503" >&2; exit 1; }
    [ -e kept ] || { echo "ERROR: One or more URLs matched no objects." >&2; exit 1; } ;;
  "storage rsync --recursive gs://"*) cp -r kept/. "$5" ;;
  "storage rsync --recursive --delete"*) rm -rf kept; cp -r "$5" kept ;;
esac
"""


def test_a_host_never_starts_anew_over_a_bucket_that_it_cannot_read(tmp_path):
    write_in(tmp_path, "gcloud", job("v5e-8"))
    tools, chipwise = tmp_path / "tools", tmp_path / "chipwise" / "bin"
    tools.mkdir(), chipwise.mkdir(parents=True)
    train = 'run="${@: -1}"; echo $(($(cat "$run/steps" 2>/dev/null || echo 0) + 1)) > "$run/steps"'
    programs(chipwise, chipwise=train)
    wanted = "\n".join(["chipwise-digits-files/chipwise-1-py3-none-any.whl", *job("v5e-8").packages[1:], ""])
    (tmp_path / "chipwise" / "wanted").write_text(wanted)
    environment = programs(tools, gcloud=HOST_GCLOUD, curl="echo 0")
    command = ["bash", "chipwise-digits.host.sh"]
    for steps in (1, 2):
        assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=60).returncode == 0
        assert (tmp_path / "kept" / "steps").read_text() == f"{steps}\n"
        shutil.rmtree(tmp_path / "runs")  # another machine
    for state in ("unreachable", "unlisted", "readonly"):  # or over one that it cannot write
        (tmp_path / state).touch()
        assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=60).returncode != 0
        (tmp_path / state).unlink()
    assert (tmp_path / "kept" / "steps").read_text() == "2\n"


def test_a_users_file_goes_along(tmp_path, monkeypatch):
    file = tmp_path / "my_task.py"
    file.write_text("recipe = 1\n")
    mine = {"words": (f"{file}:big",), "file": file, "carried": {"my_task.py": b"recipe = 1\n"}}
    notebook = json.loads(write(place("colab"), job("t4", **mine))["chipwise-digits.colab.ipynb"])
    written = ["".join(c["source"]) for c in notebook["cells"] if "%%writefile" in "".join(c["source"])]
    assert written == ["%%writefile my_task.py\nrecipe = 1\n"]
    assert "/carried/my_task.py:big" in write(place("skypilot"), job("t4", **mine))["chipwise-digits.yaml"]
    assert "/app/my_task.py:big" in write(place("docker"), job("t4", **mine))["chipwise-digits.docker.sh"]
    monkeypatch.chdir(tmp_path)  # the script runs in another folder than the one where the path was typed
    relative = job("t4", words=("my_task.py:big",), file=Path("my_task.py"))
    assert f"train {tmp_path}/my_task.py:big" in write(place("slurm"), relative)["chipwise-digits.sbatch"]


def test_slurm_finds_a_python_and_installs_what_is_wanted_once(tmp_path):
    """The one of the plan first; an older one is passed over, and none is told."""
    folder, tools = tmp_path / "job", tmp_path / "tools"
    folder.mkdir(), tools.mkdir()
    write_in(folder, "slurm", job("h100", partition="gpu", account="abc"))
    python = """
[ "$1" != -c ] || exit 0
echo "venv by $0" >> ran
mkdir -p "$4/bin"
printf '#!/bin/bash\\necho "$(basename "$0") $*" >> ran\\n' | tee "$4/bin/pip" > "$4/bin/chipwise"
chmod +x "$4"/bin/*
"""
    versions = {f"python3{end}": "exit 1" for end in ("", ".10", ".11", ".13", ".14")}
    srun = 'while [ "$1" != chipwise ]; do shift; done; "$1" "$2"'
    environment = programs(tools, srun=srun, scontrol="echo a", **versions, **{"python3.12": python})
    environment |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "a"}
    command = ["bash", "chipwise-digits.sbatch"]
    for _ in range(2):
        assert subprocess.run(command, cwd=folder, env=environment, timeout=60).returncode == 0
    ran = (folder / "ran").read_text().splitlines()
    assert [one.split()[0] for one in ran] == ["venv", "pip", "chipwise", "chipwise"]
    assert ran[0].endswith("python3.12") and "chipwise-digits-files/chipwise-1-py3-none-any.whl" in ran[1]
    text = (folder / "chipwise-digits.sbatch").read_text()
    assert "#SBATCH --partition=gpu\n#SBATCH --account=abc\n" in text
    environment = programs(tools, **{"python3.12": "exit 1"}) | {"SLURM_SUBMIT_DIR": str(folder)}
    (folder / "chipwise-digits-env" / "wanted").write_text("another")
    assert subprocess.run(command, cwd=folder, env=environment, timeout=60).returncode == 1


def test_the_environment_of_slurm_is_made_before_the_job_where_nodes_have_no_network(tmp_path):
    write_in(tmp_path, "slurm", job("h100", sbatch=("--constraint=a100", "--mail-type=END")))
    tools = tmp_path / "tools"
    tools.mkdir()
    python = """
[ "$1" != -c ] || exit 0
mkdir -p "$4/bin"
printf '#!/bin/bash\\n[ ! -e offline ]\\n' | tee "$4/bin/pip" > "$4/bin/chipwise"
chmod +x "$4"/bin/*
"""
    scripts = {"python3": python, "python3.11": python, "srun": "exit 0", "scontrol": "echo a"}
    told = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "a"}
    environment = programs(tools, **scripts) | told

    def ends(script, cwd=tmp_path):
        return subprocess.run(["bash", script], cwd=cwd, env=environment, timeout=60).returncode

    (tmp_path / "offline").touch()
    assert ends("chipwise-digits.sbatch") == 1  # it would install now
    (tmp_path / "offline").unlink()
    assert ends("../chipwise-digits.env.sh", tools) == 0
    (tmp_path / "offline").touch()
    assert ends("chipwise-digits.sbatch") == 0
    text = (tmp_path / "chipwise-digits.sbatch").read_text()
    assert "#SBATCH --constraint=a100\n#SBATCH --mail-type=END\n" in text


@pytest.mark.parametrize(
    "option",
    [
        *("", "constraint=a100", "--a\n#SBATCH --b", "--", "-1"),
        *("-J other", "--job-name=other", "-o log", "--output=log"),
    ],
)
def test_what_is_no_option_of_sbatch_is_refused(option):
    with refused(RecipeError, "launch-sbatch", value=option):
        check(job("h100", sbatch=(option,)))


def test_the_only_number_of_a_chip_is_what_one_gets():
    assert places.lent(place("kaggle"), parse("t4")).name == "t4:2"
    assert places.lent(place("kaggle"), parse("t4:4")).name == "t4:4"  # refused later
    assert places.lent(place("slurm"), parse("t4")).name == "t4"


def test_what_cannot_be_is_refused(tmp_path):
    with refused(RecipeError, "launch-place-unknown", place="skipilot", hint="skypilot"):
        place("skipilot")
    with refused(DeviceError, "launch-not-offered", target="v5e-8"):
        write(place("slurm"), job("v5e-8"))
    with refused(DeviceError, "launch-not-offered", target="k80"):
        write(place("docker"), job("k80"))
    with refused(RecipeError, "launch-without-bucket", place="gcloud"):
        write(place("gcloud"), job("v5e-8", bucket=None))
    with refused(RecipeError, "launch-bucket-scheme", place="gcloud", scheme="gs"):
        write(place("gcloud"), job("v5e-8", bucket="s3://my-runs"))
    with refused(RecipeError, "launch-bucket-scheme", place="skypilot", scheme="s3"):
        write(place("skypilot").at("vast"), job("t4"))
    with refused(RecipeError, "launch-without-bucket", place="dstack", scheme="s3"):
        write(place("dstack"), job("t4", bucket=None))
    with refused(RecipeError, "launch-cloud-unknown", cloud="runpot", hint="runpod"):
        place("dstack").at("runpot")
    with refused(DeviceError, "launch-not-offered-at", target="h100:16"):  # no network between hosts
        write(place("skypilot").at("runpod"), job("h100:16"))
    with refused(DeviceError, "launch-not-offered-at", target="v5e-8"):
        write(place("skypilot").at("lambda"), job("v5e-8"))
    with refused(RecipeError, "launch-no-spot", place="dstack at runpod"):
        write(place("dstack").at("runpod"), job("t4", spot=True, bucket="s3://my-runs"))
    with refused(RecipeError, "launch-data-local", place="gcloud"):
        write(place("gcloud"), job("v5e-8", data=tmp_path))
    with refused(RecipeError, "launch-no-spot", place="slurm"):
        write(place("slurm"), job("t4", spot=True))
    with refused(RecipeError, "launch-bucket", bucket="my runs"):
        check(job("t4", bucket="my runs"))
    with refused(DeviceError, "launch-part", target="v3-1", rented_as="v3-8"):
        check(job("v3-1"))
    with refused(RecipeError, "unprintable"):
        check(job("t4", words=("digits", "--set", "a=\n")))
    with refused(RecipeError, "launch-slurm-name", value="a b"):
        check(job("t4", partition="a b"))
