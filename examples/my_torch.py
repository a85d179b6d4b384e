"""A PyTorch module with batch norm and dropout, with PyTorch's loss, optimizer and scheduler.

pip install -e '.[torch]'
chipwise train examples/my_torch.py:recipe --simulate 8
chipwise plan examples/my_torch.py:recipe --on v5e-8,t4
python examples/my_torch.py    # trains, and writes the weights into a module
"""

import torch
from torch import nn

import chipwise as cw


def net(dropout=0.2):
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(512, 10),
    )  # fmt: skip


def recipe(dropout: float = 0.2):
    data = cw.datasets.digits()
    torch.manual_seed(0)  # of the initial weights: they are the module's
    module = net(dropout)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(sgd, max_lr=0.1, total_steps=230)
    task = cw.torch.task(
        module, nn.CrossEntropyLoss(), train=data.train, eval=data.eval,
        inputs=lambda batch: batch["image"].reshape(-1, 1, 8, 8) / 16,  # in JAX, channels first
        metrics={"accuracy": cw.losses.correct},
    )  # fmt: skip
    optimizer = cw.torch.optimizer(sgd, schedule, step="step")
    return cw.Recipe(name="my-torch", task=task, batch=64, replicas=8, duration="10ep", optimizer=optimizer)


if __name__ == "__main__":
    result = cw.fit(recipe())
    module = result.to_torch(net())  # the trained weights and statistics, ready for torch.save
    print(f"accuracy {result.metrics['eval/accuracy']:.3f}  fingerprint {result.fingerprint[:16]}")
