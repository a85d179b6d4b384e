"""Built-in recipes, one file each. A recipe is a function: `recipe(data=None, ...) -> Recipe`.

Each docstring states the command, the accuracy to expect and the time it takes, measured or with
its source.
"""

BUILT_IN = {
    "digits": "digits",
    "mnist": "mnist",
    "cifar10-airbench": "airbench",
    "cifar10-davidnet": "davidnet",
    "cifar10-resnet32": "resnet32",
    "imagenet-resnet50": "imagenet_resnet50",
    "vit-s16": "vit_s16",
    "gpt2-124m": "gpt2_124m",
    "gpt2-xl": "gpt2_xl",
    "llama-8b": "llama_8b",
    "bert-base": "bert_base",
}
