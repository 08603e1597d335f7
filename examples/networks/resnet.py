# SPDX-License-Identifier: Apache-2.0
"""Define the ResNets of the published experiments: with bottlenecks for ImageNet and CIFAR-100, plain for CIFAR-10."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

DEPTHS = {50: (3, 4, 6, 3), 152: (3, 8, 36, 3)}  # blocks in each stage of a ResNet with bottlenecks
TINY = 8  # channels of the first stage


def bottlenecks(layers: int, classes: int = 1000, small: bool = False, tiny: bool = False) -> nn.Sequential:
    """Return ResNet-50 or -152 (He et al., CVPR 2016), whose middle convolutions have the strides.

    layers: 50 or 152. With 1000 classes they have 25,557,032 parameters in 161 tensors, and 60,192,808 in 467.
    small: for pictures of 32 pixels: it begins with a convolution of 3 x 3 in place of 7 x 7, without a stride and
    without pooling, as the CIFAR-100 experiments do: 23,705,252 parameters for 100 classes. tiny: one block a stage.
    """
    base = TINY if tiny else 64
    first = norm_conv(3, base, 3) if small else norm_conv(3, base, 7, 2)
    modules: list[nn.Module] = [*first, nn.ReLU(inplace=True)]
    if not small:
        modules.append(nn.MaxPool2d(3, 2, padding=1))
    inputs = base
    for stage, blocks in enumerate((1, 1, 1, 1) if tiny else DEPTHS[layers]):
        width = base * 2**stage
        for block in range(blocks):
            modules.append(Bottleneck(inputs, width, stride=2 if stage and not block else 1))
            inputs = 4 * width
    return started(nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)))


def plain(layers: int, classes: int = 10, tiny: bool = False) -> nn.Sequential:
    """Return the ResNet for CIFAR-10 of section 4.2 of He et al. (CVPR 2016): three stages of 16, 32 and 64 channels.

    layers: 6 n + 2, with n blocks a stage: 20, 56 or 110. Shortcuts have no parameters (option A), so that ResNet-20
    has 269,722 in 59 tensors. tiny: one block a stage, of 8, 16 and 32 channels.
    """
    base, blocks = (TINY, 1) if tiny else (16, (layers - 2) // 6)
    modules: list[nn.Module] = [*norm_conv(3, base, 3), nn.ReLU(inplace=True)]
    inputs = base
    for stage in range(3):
        for block in range(blocks):
            modules.append(Basic(inputs, base * 2**stage, stride=2 if stage and not block else 1))
            inputs = base * 2**stage
    return started(nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)))


def norm_conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution that keeps the size but for its stride, and its batch norm."""
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


def started(network: nn.Sequential) -> nn.Sequential:
    """Return the network, its convolutions' weights drawn as by He et al. (ICCV 2015), so that deep ones begin well."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


class Bottleneck(nn.Module):
    """Add three convolutions to a shortcut, the middle one with the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *norm_conv(inputs, width, 1),
            nn.ReLU(inplace=True),
            *norm_conv(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *norm_conv(width, outputs, 1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*norm_conv(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class Basic(nn.Module):
    """Add two convolutions to a shortcut without parameters: every other pixel, and zeros for the new channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.more = outputs - inputs  # channels
        self.body = nn.Sequential(
            *norm_conv(inputs, outputs, 3, stride), nn.ReLU(inplace=True), *norm_conv(outputs, outputs, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more // 2))
        return F.relu(self.body(x) + shortcut, inplace=True)
