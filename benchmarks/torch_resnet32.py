"""ResNet-32 of `examples/cifar10_resnet32.py` in PyTorch, for `cpu_vs_pytorch.py`."""

import torch
import torch.nn.functional as F
from torch import nn


class Unit(nn.Module):
    """`examples/cifar10_resnet32.py.Unit`, `(b, c, h, w)`."""

    def __init__(self, c_in: int, c_out: int, stride: int, first: bool):
        super().__init__()
        self.norm1, self.norm2 = norm(c_in), norm(c_out)
        # With stride 2 the extra zero is at the end, as in TensorFlow
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1 if stride == 1 else 0, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.widen, self.stride, self.first = c_out - c_in, stride, first

    def forward(self, x):
        active = F.leaky_relu(self.norm1(x), 0.1)
        y = self.conv1(active if self.stride == 1 else F.pad(active, (0, 1, 0, 1)))
        y = self.conv2(F.leaky_relu(self.norm2(y), 0.1))
        shortcut = active if self.first else x
        if self.stride == 2:
            shortcut = F.avg_pool2d(shortcut, 2)
        side = self.widen // 2
        return y + (F.pad(shortcut, (0, 0, 0, 0, side, self.widen - side)) if self.widen else shortcut)


class ResNet32(nn.Module):
    """`examples/cifar10_resnet32.py.ResNet32`: images `(b, 32, 32, 3)` uint8 -> logits `(b, 10)`."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.units = nn.Sequential(
            *(
                Unit(
                    c_in if unit == 0 else c_out,
                    c_out,
                    stride=2 if unit == 0 and stage > 0 else 1,
                    first=stage == unit == 0,
                )
                for stage, (c_in, c_out) in enumerate([(16, 16), (16, 32), (32, 64)])
                for unit in range(5)
            )
        )
        self.norm = norm(64)
        self.classifier = nn.Linear(64, 10)

    def forward(self, images):
        x = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        std, mean = torch.std_mean(x, (1, 2, 3), correction=0, keepdim=True)
        x = (x - mean) / std.clamp(min=x[0].numel() ** -0.5)
        if self.stem.weight.is_contiguous(memory_format=torch.channels_last):
            x = x.contiguous(memory_format=torch.channels_last)
        return self.logits(x)

    def logits(self, x):
        """The logits of standardised images `(b, 3, 32, 32)`."""
        x = F.leaky_relu(self.norm(self.units(self.stem(x))), 0.1)
        return self.classifier(x.mean((2, 3)))


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1)
