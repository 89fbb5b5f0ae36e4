"""Models that the tests trace: known networks, and one for each thing a tracer may stumble over."""

import torch
from torch import nn


class SmallNet(nn.Module):
    """The network whose FLOPs are known by hand: 32x32 images, 8x8 at the end."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.conv2, self.bn2 = nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64)
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(4096, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(x.flatten(1))


class Bottleneck(nn.Module):
    def __init__(self, channels, planes, stride, project):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn3, self.relu = nn.BatchNorm2d(4 * planes), nn.ReLU(inplace=True)
        self.downsample = None
        if project:
            shortcut = nn.Conv2d(channels, 4 * planes, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * planes))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet50(nn.Module):
    """The 50-layer network with the names and the order of calls of torchvision."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        channels = 64
        for number, (planes, count) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
            blocks = []
            for index in range(count):
                stride = 2 if number > 1 and index == 0 else 1
                blocks.append(Bottleneck(channels, planes, stride, index == 0))
                channels = 4 * planes
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2048, 1000)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, groups=1)
        self.conv2 = nn.Conv2d(8, 8, 3, groups=8)

    def forward(self, x):
        return self.conv2(self.conv1(x)).flatten(1)


class Layer(nn.Module):
    """A linear layer; the classes below call it in ways that need more than shapes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class ScalesByItem(Layer):
    def forward(self, x):
        return self.linear(x) * x.mean().item()


class CreatesOnCpu(Layer):
    def forward(self, x):
        return self.linear(x) + torch.ones(4)


class Autocasts(Layer):
    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.linear(x).float()


class BranchesOnItem(Layer):
    def forward(self, x):
        return self.linear(x + 1 if (x * x).sum().item() >= 0 else x)


class BranchesOnPositions(Layer):
    """Asks for a value that follows from shapes, as masks of positions do."""

    def forward(self, x):
        positions = torch.arange(x.size(1), device=x.device)
        in_order = (positions.diff() == 1).all()
        return self.linear(x) if in_order else self.linear(x + 1)


class SelectsByMask(Layer):
    def forward(self, x):
        return self.linear(x)[x * x >= 0].sum().expand(x.size(0), 2)


class SelectsByNonzero(Layer):
    def forward(self, x):
        return self.linear(x)[torch.nonzero(x[:, 0] * x[:, 0] >= 0).squeeze(1)]


class UsesNumpy(Layer):
    def forward(self, x):
        return self.linear(x) * float(x.detach().numpy().mean())


class Raises(Layer):
    def forward(self, x):
        del x
        raise KeyError("no such layer")


class ComparesSamples(Layer):
    def forward(self, x):
        out = self.linear(x)
        return out @ out.t()


class LoopsOverSamples(Layer):
    def forward(self, x):
        return torch.stack([self.linear(row) for row in x])


class BranchesOnBatch(Layer):
    def forward(self, x):
        return self.linear(x).sigmoid() if x.size(0) > 4 else self.linear(x).tanh()


class ReturnsNumber(Layer):
    def forward(self, x):
        del x
        return 3


class EndsInIdentity(Layer):
    def __init__(self):
        super().__init__()
        self.last = nn.Identity()

    def forward(self, x):
        return self.last(self.linear(x))


class SelectsEvenPositions(Layer):
    """Which positions are even follows from the shape: their number needs no data."""

    def forward(self, x):
        even = torch.nonzero(torch.arange(x.size(1), device=x.device) % 2 == 0)
        return self.linear(x)[:, even.squeeze(1)]


class ForgetsPositions(Layer):
    """A value that was known, and is overwritten with data."""

    def forward(self, x):
        positions = torch.arange(4.0, device=x.device)
        positions.copy_(x[0])
        return self.linear(x + 1 if positions.sum().item() > -1e9 else x)


class Complex(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))


class BuildsWithData(Layer):
    """A constructor that reads a value, as schedules of drop rates do."""

    def __init__(self):
        super().__init__()
        self.scale = torch.linspace(0, 1, 3)[1].item()

    def forward(self, x):
        return self.linear(x) * self.scale


class GroupedQueries(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x):
        query = self.query(x).unflatten(-1, (4, 4)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (2, 4)).transpose(1, 2)
        attend = nn.functional.scaled_dot_product_attention
        return attend(query, key, key, is_causal=True, enable_gqa=True)


class HeadlessAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x):
        query = self.query(x)
        return nn.functional.scaled_dot_product_attention(query, query, query)


class ThreeDimensional(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, words):
        return self.head(self.table(words))


class OwnLoss(ThreeDimensional):
    def forward(self, words, labels):
        logits = super().forward(words)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class SideOutput(nn.Module):
    """Two heads in training, as Inception has."""

    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return {"out": self.main(x), "aux": self.side(x)}


class KeywordInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, *, a, b):
        return self.left(a) + self.right(b)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words):
        return self.head(self.table(words).mean(1))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, words):
        return self.head(self.table(words).mean(1))


class PartlyFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.used(self.frozen(x))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, directions=1):
        super().__init__()
        self.rnn = kind(8, 16, 2, batch_first=True, bidirectional=directions == 2)
        self.head = nn.Linear(16 * directions, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def gated_recurrent():
    return Recurrent(nn.GRU)


def bidirectional():
    return Recurrent(directions=2)


class PackedRecurrent(Recurrent):
    def forward(self, x):
        lengths = [x.size(1)] * x.size(0)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.head(self.rnn(packed)[1][0][-1])


class RecurrentOnData(Recurrent):
    def forward(self, x):
        return super().forward(x + 1 if (x * x).sum().item() >= 0 else x)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x):
        return self.cell(x)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0][:, 0])


class AttentionOnData(Attention):
    def forward(self, x):
        return super().forward(x + 1 if (x * x).sum().item() >= 0 else x)


class Masked(Attention):
    def forward(self, x):
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device)
        out = self.attention(x, x, x, need_weights=False, attn_mask=mask.triu(1))[0]
        return self.head(out[:, 0])


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.second, self.first(x), use_reentrant=False)


class NeedsArgument(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)


class NoParameters(nn.Module):
    def forward(self, x):
        return x


def not_a_module():
    return 3


def squared(output, target):
    return ((output - target) ** 2).mean()


def not_scalar(output, target):
    return output


instance = nn.Linear(4, 4)
constant = 3
