"""Models and weights that cannot be, through the command line: one line, nothing executed or written."""

import pickle

import numpy as np
import pytest

import tasks
from chipwise.step import keys

HEAD = """
import numpy as np
import torch
import chipwise as cw

DATA = cw.Arrays(x=np.ones((24, 4), np.float32), label=np.zeros(24, np.int32))

def of(module):
    task = cw.torch.task(module, torch.nn.CrossEntropyLoss(), train=DATA)
    return cw.Recipe(task=task, batch=8, replicas=1, duration="1st", optimizer=cw.sgd(lr=0.1))
"""


class Harm:
    """What a pickle does when it is loaded as it stands."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture
def refused(chipwise, tmp_path):
    """Trains; asserts the exit code, the error's code, its line alone and an untouched folder."""

    def check(code, error, *arguments, source=None, **facts):
        if source is not None:
            (tmp_path / "net.py").write_text(HEAD + source)
            arguments = (f"{tmp_path / 'net.py'}:recipe", *arguments)
        there = sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts)
        said = chipwise("train", *arguments, "--run", tmp_path / "run", "--devices", 1, "--quiet")
        assert said.refused(code, error, **facts)
        assert sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts) == there

    return check


@pytest.fixture
def weights(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    params, _ = tasks.init(keys.init_key(0))
    file = tmp_path / "w.safetensors"
    numpy.save_file({name: np.asarray(a, order="C") for name, a in params.items()}, file)
    return file


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_in_it(refused, tmp_path, zipped):
    torch = pytest.importorskip("torch")
    file = tmp_path / "harm.pth"
    if zipped:
        torch.save({"w": Harm(tmp_path / "mark")}, file)
    else:
        file.write_bytes(pickle.dumps(Harm(tmp_path / "mark")))
    refused(3, "weights-damaged", "digits", "--from", file, path=file)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("kept", [6, 0.5])
def test_a_truncated_safetensors_file(refused, weights, kept):
    whole = weights.read_bytes()
    weights.write_bytes(whole[: kept if kept > 1 else int(len(whole) * kept)])
    refused(3, "weights-damaged", "digits", "--from", weights, path=weights)


def test_weights_of_another_model(refused, weights):
    refused(2, "weights-of-another-model", "digits", "--from", weights, matched=0)


AIRY = """
class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.special.airy_ai(x).sum()

def recipe():
    return of(Net(4, 3))
"""
ELSEWHERE = """
class Away(torch.nn.Parameter):
    device = torch.device("cuda:0")  # which may be absent

def recipe():
    module = torch.nn.Linear(4, 3)
    for name, tensor in list(module.named_parameters()):
        setattr(module, name, Away(tensor.detach()))
    return of(module)
"""
UNMOVED = """
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        if type(x) is torch.Tensor:  # eager PyTorch's alone
            self.seen.numpy()[:] += 1
        return super().forward(x)

def recipe():
    return of(Net())
"""


@pytest.mark.parametrize(
    "source, error, facts",
    [
        (AIRY, "torch-operation-missing", {"module": "Net"}),
        (ELSEWHERE, "torch-elsewhere", {"value": ["cuda:0"]}),
        (UNMOVED, "torch-buffers-unmoved", {"names": ["seen"]}),
    ],
    ids=["an operation without a lowering", "a model on cuda:0", "buffers that would not move"],
)
def test_a_module_that_would_not_train_here(refused, source, error, facts):
    pytest.importorskip("torchax")
    refused(2, error, source=source, **facts)
