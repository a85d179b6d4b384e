"""What README and docs show, as steps: Python, and commands of `chipwise`.

`run(page)` takes the steps of a page in the current folder as they are written. Before them come the names
and files that the page speaks of (`FILES`, `BEFORE`). A command that would take hours gets the settings of
`SMALL` too.
"""

import glob
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETUP = ("pip", "python3", ".", "make", "apt-get", "eval", "srun", "bash")
"""How lines begin that install something on the machine: the test's own environment is installed."""
SMALL = {
    "train gpt2-124m --data tokens$": "--set depth=2 --set width=64 --set heads=2 --set replicas=8 "
    "--set batch=8 --set duration=2st",
    "(train|sweep) mnist|train cifar10": "--set duration=3st",
    "train examples/own_photos": "--set duration=2st --set batch=8",
    "train examples/own_text": "--set duration=2st",
    "examples/plan_tokens.py gpt2": "--set depth=2 --texts 1,8",
    "plan mnist --like": "--target eval/accuracy=0.1 --batch 128,256 --on t4",
    "bench mnist": "--steps 2 --warmup 2",
    "bench cifar10": "--steps 2 --warmup 2 --set batch=64",
    "referee digits": "--set duration=1ep --set-base duration=1ep --spend 20s",
    "referee examples/techniques.py": "--set-base duration=1st --set hidden=false --spend 20s",
    "referee base.py": "--set duration=1ep --set-base duration=1ep --spend 20s",
}
"""Settings that make the commands small that begin like this."""
VERDICTS = range(10, 16)
"""Exit codes of the referee that are no errors: what a change did, beside 0 for "better"."""
NOT_HERE = {
    "train llama-8b": "16 GB of weights: tests/models/test_large_nets.py has a small one",
    "train digits --track": "needs a service's library: tests/explain/test_services.py",
    "track runs/": "the same",
    "train mnist --data DIR --kernels": "needs an NVIDIA GPU: tests/machine/test_kernels.py",
    "chips rtx-4090 --prices live": "needs a network: tests/chips/test_live_prices.py",
    "plan gpt2-124m --on rtx-4090,h100 --prices": "the same",
    "plan hf://": "needs the Hub: tests/deploy/test_fine_tuning.py",
    "plan llama-8b": "tests/recipes/test_large_recipes.py",
    'recipe = cw.pretrained("hf://': "needs the Hub: tests/deploy/test_huggingface.py",
    "here = cw.machine.hosts.hosts": "waits for three more hosts: tests/machine/test_hosts_leave.py",
}
"""How steps begin that no single machine can take, and what takes them."""

FILES = """
import hashlib, os, struct
from pathlib import Path
import numpy as np
from PIL import Image
import chipwise as cw
from chipwise.cli import main
from chipwise.data import originals

rng = np.random.default_rng(0)
DIR = os.environ["CHIPWISE_DATA"] = "DIR"


def photographs(folder, side=64):
    for name in ("cat", "dog"):
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        for i in range(20):
            Image.fromarray(rng.integers(0, 255, (side, side, 3), np.uint8)).save(f"{folder}/{name}/{i}.jpg")


def mnist():  # files of the right shapes, and their checksums
    Path(DIR).mkdir()
    for name in list(originals.MNIST_FILES):
        shape = (60_000 if name.startswith("train") else 10_000, *((28, 28) if "images" in name else ()))
        content = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
        content += np.resize(np.arange(10, dtype=np.uint8), shape).tobytes()
        Path(DIR, name).write_bytes(content)
        originals.MNIST_FILES[name] = ("", hashlib.sha256(content).hexdigest())


def done(words):
    assert not main(words.split()), words


digits = cw.datasets.digits()
recipe = cw.load("digits", ["duration=1ep"])
"""
FITTED = 'result = cw.fit(recipe, on=cw.On(devices=1), progress="none")\n'
PLAIN = """
import jax, jax.numpy as jnp

def init(key):
    return {"w": jax.random.normal(key, (64, 10)) / 8}, {}


def model(params, image):
    return image.reshape(-1, 64).astype(jnp.float32) / 16 @ params["w"]


def loss(params, state, batch, key, train):
    values = cw.losses.softmax_cross_entropy(model(params, batch["image"]), batch["label"])
    return {"loss": cw.Sum.of(values)}, state


train, held_out = digits.train, digits.eval
"""
BEFORE = {
    "README": "",
    "after": f"""
mnist(); photographs("PHOTOS")
Path("book.txt").write_text("One morning he woke up and was still a classifier. " * 100)
done("train mnist --set duration=1st --run runs/mnist --quiet")
done("train my_task.py:recipe --set duration=1st --run runs/mine --quiet")
images = np.stack([digits.eval[i]["image"] for i in range(9)])
np.savez("new.npz", image=images)
{FITTED}
from flax import nnx
import jax.numpy as jnp


class Net(nnx.Module):
    def __init__(self, rngs):
        self.backbone, self.classifier = nnx.Linear(64, 8, rngs=rngs), nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, image):
        return self.classifier(nnx.relu(self.backbone(image.reshape(-1, 64).astype(jnp.float32))))


import jax, torch
from chipwise.models.resnet50 import ResNet50

init, _ = cw.nnx.functional(lambda rngs: ResNet50(classes=10, rngs=rngs))
params, state = jax.jit(init)(jax.random.key(0))
leaves = jax.tree_util.tree_leaves_with_path({{"params": params, "state": state}})
named = {{jax.tree_util.keystr(k, simple=True, separator="."): torch.tensor(np.array(v)) for k, v in leaves}}
torch.save(named, "resnet50.pth")
loss = cw.losses.softmax_cross_entropy
task = cw.nnx.task(lambda rngs: Net(rngs), loss, train=digits.train, inputs="image")
net = cw.fit(cw.Recipe(task=task, batch=64, duration="1st", optimizer=cw.sgd(lr=0.1)), progress="none")
cw.export(net, "safetensors", "net.safetensors")
data, sgd = cw.Arrays(image=np.zeros((64, 32, 32, 3), np.uint8), label=np.zeros(64, np.int32)), cw.sgd(lr=0.1)
""",
    "agents": """
import subprocess
edits = [("import chipwise as cw", "import chipwise as cw  # an idea")]
commit = ["commit", "-qm", "The recipe"]
named = (["config", "user.name", "A Reader"], ["config", "user.email", "reader@example.com"])
for words in (["init", "-q"], *named, ["add", "my_task.py"], commit):
    subprocess.run(["git", *words], check=True)
""",
    "attention": "query, key, value = (rng.normal(size=(2, 6, h, 8)).astype(np.float32) for h in (4, 2, 2))",
    "augment": PLAIN,
    "bench": "mnist()",
    "compare": """
for name in ("bench", "bench-b"):
    Path(name).mkdir()
    for i in (1, 2):
        done(f"bench digits --steps 2 --out {name}/{i}.json")
for name in ("a", "b"):
    done(f"train digits --set duration=2ep --run runs/{name} --quiet")
for name, batch in (("small", 32), ("large", 128)):
    done(f"sweep digits --set duration=1ep --set batch={batch} --seeds 2 --run runs/{name}-5 --quiet")
""",
    "feed": 'photographs("photos")',
    "find": "mnist()",
    "format": """
photographs("photos")
done("pack photos PACK --size 32 --store raw")
done("pack photos PACK_OF_JPEGS --size 32 --store jpeg")
""",
    "metrics": PLAIN,
    "overview": """
mnist(); photographs("PHOTOS")
Path("book.txt").write_text("One morning he woke up and was still a classifier. " * 100)
done("pack book.txt tokens --tokens 65 --split 0.1")
sizes = "--set context=64 --set vocabulary=257 --set depth=1 --set width=16 --set heads=2 --set batch=64"
done(f"train gpt2-124m --data tokens {sizes} --set duration=2st --run runs/text --quiet")
""",
    "packing": """
import shutil, tokenizers
photographs("photos")
shutil.make_archive("photos", "xztar", "photos")
Path("labels.csv").write_text("file,label\\n" + "".join(f"photos/cat/{i}.jpg,cat\\n" for i in range(20)))
Path("ages.csv").write_text("file,age\\nphotos/cat/0.jpg,31\\nphotos/cat/1.jpg,2.5\\n")
Path("wide.csv").write_text("scan,year,finding\\nphotos/cat/0.jpg,1999,flu\\nphotos/cat/1.jpg,2001,cold\\n")
Path("bare.csv").write_text("photos/cat/0.jpg,cat\\nphotos/cat/1.jpg,dog\\n")
Path("books").mkdir()
Path("books", "one.txt").write_text("One morning he woke up and was still a classifier. " * 30_000)
words = tokenizers.models.WordLevel({"a": 0, "[UNK]": 1, "<eos>": 2}, unk_token="[UNK]")
tokens = tokenizers.Tokenizer(words)
tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokens.save("tokenizer.json")
import pyarrow, pyarrow.parquet
table = {"body": ["a text"] * 20, "label": [0, 1] * 10}
pyarrow.parquet.write_table(pyarrow.table(table), "reviews.parquet")
""",
    "plan": "mnist()",
    "public_models": """
photographs("photos")
import sys, types
import torch, transformers
from torch import nn


class Net(nn.Module):  # in the place of a ResNet, since neither library is here
    def __init__(self, *_, num_classes=1000, **__):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, stride=4), nn.Linear(8, num_classes)

    def forward(self, x):
        return self.fc(self.conv(x).relu().mean((2, 3)))


for library in ("timm", "torchvision"):
    sys.modules[library] = types.ModuleType(library)
sys.modules["timm"].create_model = Net
sys.modules["torchvision"].models = types.SimpleNamespace(resnet18=Net)
torch.save(Net().state_dict(), "resnet18.pth")
texts = [f"one morning he woke up and was {i % 2}" for i in range(32)]
labels = np.arange(32) % 2
test_texts, test_labels = texts[:8], labels[:8]
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(" ".join(texts).split()))]
Path("words.txt").write_text("\\n".join(words))
config = transformers.BertConfig(
    vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)
transformers.BertForSequenceClassification(config).save_pretrained("bert")
transformers.BertTokenizer("words.txt").save_pretrained("bert")
""",
    "referee": """
import subprocess
rows = [(i, 3.278 + i % 3 / 1000, 3.272 + i % 2 / 1000) for i in range(7)]
for name, column in (("muon", 1), ("soap", 2)):
    Path(f"{name}.csv").write_text("seed,val_loss\\n" + "".join(f"{r[0]},{r[column]}\\n" for r in rows))
sides = "".join(f"{name},{row[i]}\\n" for row in rows for i, name in ((1, "muon"), (2, "soap")))
Path("all.csv").write_text("optimizer,val_loss\\n" + sides)
recipe = Path("my_task.py").read_text()
Path("base.py").write_text(recipe)
Path("changed.py").write_text(recipe.replace("momentum=0.9", "momentum=0.8"))
subprocess.run(["git", "init", "--quiet"], check=True)
who = ["-c", "user.name=A Reader", "-c", "user.email=reader@example.com"]
for message in ("The recipe", "A change elsewhere"):
    subprocess.run(["git", "add", "my_task.py"], check=True)
    subprocess.run(["git", *who, "commit", "--quiet", "--allow-empty", "-m", message], check=True)
""",
    "report": """
mnist()
done("train mnist --set duration=2st --run runs/mnist-1 --quiet --keep-best eval/loss")
done("sweep mnist --set duration=2st --seeds 2 --run runs/mnist-5 --quiet")
""",
    "study": "mnist()\nimport dataclasses\nrecipe = dataclasses.replace(recipe, optimizer=cw.adamw(lr=1e-3))",
    "tutorial/data": """
import sys, types
import datasets as huggingface

class FashionMNIST:
    def __init__(self, *_, **__): pass

torchvision = types.ModuleType("torchvision.datasets")
torchvision.FashionMNIST = FashionMNIST
sys.modules |= {"torchvision": types.ModuleType("torchvision"), "torchvision.datasets": torchvision}
huggingface.load_dataset = lambda *_, **__: huggingface.Dataset.from_dict({"label": [0, 1]})
to_array = np.asarray
""",
    "tutorial/language": """
import json
rows = [{"question": f"What is {i} and {i}? ", "answer": f"It is {2 * i}, I think."} for i in range(999)]
Path("chats.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
""",
    "tutorial/models": """
done("train my_task.py:recipe --run runs/mine --set duration=1ep --quiet")
import torch
from torch import nn
net = nn.Sequential(nn.Linear(12, 5))
x = rng.normal(size=(256, 12)).astype(np.float32)
train = held_out = cw.Arrays(image=x, label=(x[:, 0] > 0).astype(np.int32))
""",
}
"""By page, without its ending."""


def name(page):
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def blocks(page, *languages):
    """(language, text) of each block."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [(language, text) for language, text in found if language in languages]


def steps(page):
    """(kind, text): `"python"`, or `"command"` with what stands after `chipwise`."""
    for language, text in blocks(page, "python", "py", "sh"):
        if language != "sh":
            yield "python", text
            continue
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["chipwise"]:
                yield "command", shlex.join(words[1:])
            elif words[:1] == ["python"]:
                yield "program", shlex.join(words[1:])
            else:
                assert not words or words[0] in SETUP, f"{page.name}: {line}"


def complete_recipe():
    """The tutorial's own."""
    return next(t for _, t in blocks(ROOT / "docs" / "tutorial" / "train.md", "python") if "def recipe" in t)


def smaller(text):
    """The further arguments of a step."""
    return next((more for begin, more in SMALL.items() if re.match(begin, text)), "").split()


def run(page):
    """Every step of the page in this folder."""
    from chipwise.cli import main

    page = Path(page)
    shutil.copytree(ROOT / "examples", "examples")
    Path("my_task.py").write_text(complete_recipe())
    names = {}
    exec(compile(FILES + BEFORE.get(name(page), ""), f"before {page.name}", "exec"), names)
    for kind, text in steps(page):
        if any(text.startswith(begin) for begin in NOT_HERE):
            continue
        print(f"=== {text}", file=sys.stderr, flush=True)
        if kind == "python":
            if (
                door := re.search(r"task = cw\.(?:(\w+)\.task|Task)\(", text)
                if name(page) == "models"
                else None
            ):
                names |= runpy.run_path(f"examples/my_{door[1] or 'functions'}.py")
                names |= {"data": names["digits"], "dropout": 0.2}
                names |= {"module": names["net"]()} if door[1] == "torch" else {}
                names |= {} if door[1] else {"loss": names["recipe"]().task.loss}
            exec(compile(text, f"{page.name}", "exec"), names)
        elif kind == "program":
            sys.argv = [*shlex.split(text), *smaller(text)]
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            words = [w for word in shlex.split(text) for w in glob.glob(word) or [word]]
            code = main([*words, *smaller(text)])
            assert not code or (words[0] == "referee" and code in VERDICTS), f"{text}: {code}"
