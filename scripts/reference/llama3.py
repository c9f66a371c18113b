"""Llama 3.1 in plain PyTorch, written from the model's description: the reference for LibTitan's tests, and PyTorch's side of its benchmarks.

Parameter names, initial distributions and numerics follow TorchTitan 0.2. Shape suffixes: B batch, S sequence, D model width, H query
heads, K key/value heads, E head width, F feed-forward width, V vocabulary. A 2 stands for a (real, imaginary) pair.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1 stretches low rotary frequencies: wavelengths above original_length / low_freq_factor by `factor`, wavelengths
    below original_length / high_freq_factor not at all, and those between by a linear mix."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelArgs:
    dim: int = 256
    n_layers: int = 6
    n_heads: int = 16
    n_kv_heads: int | None = None
    vocab_size: int = 2048
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = RopeScaling()
    max_seq_len: int = 2048
    depth_init: bool = True

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def ffn_dim(self) -> int:
        """2/3 of 4 dim, times the multiplier, rounded up, with TorchTitan's two truncations."""
        width = int(2 * 4 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return self.multiple_of * math.ceil(width / self.multiple_of)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """[E/2] radians per position, computed in `dtype`."""
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    mix = (scaling.original_length / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    mixed = (1 - mix) * frequency / scaling.factor + mix * frequency
    stretched = torch.where(wavelength > scaling.original_length / scaling.low_freq_factor, frequency / scaling.factor, mixed)
    return torch.where(wavelength < scaling.original_length / scaling.high_freq_factor, frequency, stretched)


def rope_table(args: ModelArgs, dtype: torch.dtype = torch.float32) -> Tensor:
    """[max_seq_len, E/2] complex rotations."""
    frequency = rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling, dtype)
    angle = torch.outer(torch.arange(args.max_seq_len, dtype=dtype), frequency)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x_BSHE: Tensor, table_SE2: Tensor) -> Tensor:
    """Rotates neighboring features (2i, 2i+1) by the table's angles, in the table's precision."""
    precise = x_BSHE.to(table_SE2.real.dtype)
    pairs = torch.view_as_complex(precise.unflatten(-1, (-1, 2)))
    turned = pairs * table_SE2[: x_BSHE.size(1), None, :]
    return torch.view_as_real(turned).flatten(-2).to(x_BSHE.dtype)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x_BSD: Tensor, rope: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        """`mask`: where a query sees a key; without one, attention is causal."""
        q_BSHE, k_BSKE, v_BSKE = (w(x_BSD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q_BSHE, k_BSKE = rotate(q_BSHE, rope), rotate(k_BSKE, rope)
        out_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BSKE.transpose(1, 2),
            v_BSKE.transpose(1, 2),
            attn_mask=mask_B1SS,
            is_causal=mask_B1SS is None,
            enable_gqa=True,
        )
        return self.wo(out_BHSE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x_BSD: Tensor, rope: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        h_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope, mask_B1SS)
        return h_BSD + self.feed_forward(self.ffn_norm(h_BSD))


class Llama3(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.register_buffer("rope", rope_table(args), persistent=False)

    def set_rope(self, dtype: torch.dtype = torch.float32) -> None:
        """Computes the rotary table in `dtype`, whatever the buffer contained."""
        self.rope = rope_table(self.args, dtype)

    def set_precision(self, dtype: torch.dtype) -> None:
        """Converts parameters to `dtype`, and the rotary table to float64 for float64, otherwise to fp32 (Module.to would round it)."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        self.set_rope(torch.float64 if dtype == torch.float64 else torch.float32)

    def forward(self, tokens_BS: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] in the parameters' dtype."""
        x_BSD = self.tok_embeddings(tokens_BS)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, self.rope, mask_B1SS)
        return self.output(self.norm(x_BSD))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws from TorchTitan's distributions. Most have absolute bounds of ±2, so hardly any value is truncated."""
        nn.init.normal_(self.tok_embeddings.weight)
        for index, layer in enumerate(self.layers.values()):
            attention, feed_forward = layer.attention, layer.feed_forward
            deep_std = 0.02 / math.sqrt(2 * (index + 1 if self.args.depth_init else self.args.n_layers))
            for module in (attention.wq, attention.wk, attention.wv, feed_forward.w1):
                nn.init.trunc_normal_(module.weight, std=0.02)
            for module in (attention.wo, feed_forward.w2, feed_forward.w3):
                nn.init.trunc_normal_(module.weight, std=deep_std)
            nn.init.ones_(layer.attention_norm.weight)
            nn.init.ones_(layer.ffn_norm.weight)
        nn.init.ones_(self.norm.weight)
        std = self.args.dim**-0.5
        nn.init.trunc_normal_(self.output.weight, std=std, a=-3 * std, b=3 * std)


IGNORE_INDEX = -100


def summed_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """The cross entropy summed over all valid labels, in at least fp32. Divide it by their global number before the backward."""
    logits = logits_BSV.flatten(0, 1)
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(precise, labels_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def lr_factor(step: int, total: int, warmup: int, decay_ratio: float | None, decay_type: str, floor: float) -> float:
    """The factor on the peak learning rate at 0-based `step`: linear warmup, a stable part, decay to `floor`."""
    warmup = min(warmup, total)
    decay = total - warmup if decay_ratio is None else round(total * decay_ratio)
    decay = min(decay, total - warmup)
    stable = total + 1 - warmup - decay  # the extra step keeps the last one above the floor
    if step < warmup:
        return (step + 1) / warmup
    if step + 1 <= warmup + stable:
        return 1.0
    progress = (step + 1 - warmup - stable) / decay
    left = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress), "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[decay_type]
    return floor + (1 - floor) * left
