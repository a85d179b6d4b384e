"""Built-in recipes, one file each. A recipe is a function: `recipe(data=None, ...) -> Recipe`.

Each docstring states the command, the accuracy to expect and the time it takes, measured or with
its source.
"""

BUILT_IN = (
    "digits",
    "mnist",
    "cifar10-davidnet",
    "imagenet-resnet50",
    "vit-s16",
    "gpt2-124m",
    "llama-8b",
    "bert-base",
)
"""The names of the recipes. `cifar10-davidnet` is in `cifar10_davidnet.py`."""
