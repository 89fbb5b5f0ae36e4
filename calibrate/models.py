"""Models: zero-argument constructors of the shipped workloads that need arguments or no library.

transformers is imported only inside the functions that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

MLP_LAYERS = 100
MLP_WIDTH = 128
SOURCE_WORDS = 25
"""Length of the source sentence that seq2seq workloads are traced with."""
TARGET_WORDS = 25
"""The same for the target sentence."""


def small_cnn() -> nn.Module:
    """Return the small MNIST network of data-parallel tutorials: 431 080 parameters, 1x28x28.

    Source: the LeNet of Caffe's MNIST example: 20 and 50 5x5 filters, 500 hidden units.
    """
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 4 * 50, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


def deep_mlp() -> nn.Module:
    """Return 100 small layers, each Linear(128, 128) and ReLU: bound by launches, not by FLOPs."""
    layers: list[nn.Module] = []
    for _ in range(MLP_LAYERS):
        layers += [nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


class LstmAttention(nn.Module):
    """An LSTM encoder and a decoder with attention and input feeding, as OpenNMT's default.

    The encoder is one fused call; the decoder runs a Python loop over the target words, because
    each step is fed the attention of the step before: thousands of small launches.

    Source: Luong, Pham, Manning, EMNLP 2015 (global attention, "general" score, input feeding);
    OpenNMT-py's defaults: 2 layers, 500 hidden units, dropout 0.3, vocabularies of 50 000 words.
    """

    def __init__(
        self, vocabulary: int = 50_004, hidden: int = 500, layers: int = 2, dropout: float = 0.3
    ) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocabulary, hidden)
        self.target_embedding = nn.Embedding(vocabulary, hidden)
        self.encoder = nn.LSTM(hidden, hidden, layers, dropout=dropout, batch_first=True)
        self.cells = nn.ModuleList(
            nn.LSTMCell(2 * hidden if layer == 0 else hidden, hidden) for layer in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.score = nn.Linear(hidden, hidden, bias=False)
        self.attention_output = nn.Linear(2 * hidden, hidden, bias=False)
        self.generator = nn.Linear(hidden, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits (batch, words, vocabulary) for word numbers (batch, words)."""
        memory, (hidden, cell) = self.encoder(self.source_embedding(source))
        states = list(zip(hidden.unbind(0), cell.unbind(0), strict=True))
        keys = self.score(memory)
        fed = hidden[-1].new_zeros(hidden[-1].shape)
        outputs = []
        for word in self.target_embedding(target).unbind(1):
            fed, states = self._step(torch.cat([word, fed], 1), states, memory, keys)
            outputs.append(fed)
        logits: Tensor = self.generator(torch.stack(outputs, 1))
        return logits

    def _step(
        self,
        value: Tensor,
        states: Sequence[tuple[Tensor, Tensor]],
        memory: Tensor,
        keys: Tensor,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        after = []
        for cell, state in zip(self.cells, states, strict=True):
            new = cell(value, state)
            after.append(new)
            value = self.dropout(new[0])
        weights = torch.softmax(torch.bmm(keys, value.unsqueeze(2)).squeeze(2), dim=1)
        context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
        return torch.tanh(self.attention_output(torch.cat([context, value], 1))), after


def lstm_attention() -> nn.Module:
    """Return `LstmAttention` with its defaults; feed it two inputs of 25 word numbers each."""
    return LstmAttention()


def bert_base() -> nn.Module:
    """Return BERT-base uncased with its pre-training heads (masked words and next sentence)."""
    return _bert()


def bert_large() -> nn.Module:
    """Return BERT-large uncased with its pre-training heads."""
    return _bert(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )


def gpt2() -> nn.Module:
    """Return GPT-2 small, 124 million parameters, with its language-model loss."""
    return _gpt2()


def gpt2_medium() -> nn.Module:
    """Return GPT-2 medium, 355 million parameters."""
    return _gpt2(n_embd=1024, n_layer=24, n_head=16)


def gpt2_large() -> nn.Module:
    """Return GPT-2 large, 774 million parameters."""
    return _gpt2(n_embd=1280, n_layer=36, n_head=20)


def _bert(**sizes: int) -> nn.Module:
    from transformers import BertConfig, BertForPreTraining  # noqa: PLC0415 - optional

    model: nn.Module = BertForPreTraining(BertConfig(**sizes))
    return model


def _gpt2(**sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - optional

    # the cache of keys and values is for generation; in training it would be gathered too
    model: Any = GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes))
    model.loss_type = "ForCausalLM"  # the default, but transformers logs that it had to guess
    return cast("nn.Module", model)
