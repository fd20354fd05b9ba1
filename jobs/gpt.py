"""A small GPT on bytes of text: sharded with --strategy fsdp, divided within layers with --tensor.

    mgpu-slurm submit jobs.gpt --nodes 2 --strategy fsdp --precision bf16
    mgpu-slurm submit jobs.gpt --nodes 2 --tensor 2 text=/path/to/book.txt

See Radford et al., Language Models are Unsupervised Multitask Learners (2019), and for ALiBi Press et al., Train Short,
Test Long (2021).
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import Dataset

from mgpu_slurm import Run, UserError

TOKENS = 256
"""Each byte is a token."""

PLAN = {
    "blocks.*.query": "column",
    "blocks.*.key": "column",
    "blocks.*.value": "column",
    "blocks.*.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}
"""How the ranks of --tensor divide the layers: each computes some of the heads, and some of the hidden units."""


@dataclass
class Config:
    text: Path | None = None
    """A text file; None generates sentences about sums."""
    context: int = 64
    """Number of bytes that the model sees at once."""
    layers: int = 4
    heads: int = 4
    width: int = 128
    """Size of the vector of a token."""
    positions: Literal["learned", "alibi"] = "learned"
    """A learned vector for each position, or a penalty for distance, which needs no parameters."""
    dropout: float = 0.0
    recompute: bool = False
    """Whether to compute the activations of each block again in the backward pass, to save their memory."""
    epochs: int = 2
    batch_size: int = 32
    """Sequences in an optimizer step, over all ranks."""
    lr: float = 3e-3
    """Maximum learning rate of AdamW, after the warm-up; it falls to zero along a cosine."""
    warmup: int = 20
    """Steps in which the learning rate rises."""
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise UserError(f"width={self.width} is not a multiple of heads={self.heads}: choose another one")


class Text(Dataset[tuple[Tensor]]):
    """Consecutive pieces of a text, each one token longer than the context."""

    def __init__(self, text: bytes, context: int) -> None:
        """
        Raises:
            UserError: the text is too short.
        """
        self._length = context + 1
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if len(self._tokens) < self._length:
            raise UserError(f"the text has {len(text)} bytes, and context={context} needs {self._length}")

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor]:
        begin = index * self._length
        return (self._tokens[begin : begin + self._length].long(),)


def load_text(config: Config) -> tuple[Text, Text]:
    """Return nine tenths of the text for training, and the rest for validation."""
    if config.text is None:
        text = sums(3000)
    else:
        try:
            text = config.text.read_bytes()
        except OSError as error:
            raise UserError(f"text={config.text} cannot be read: {error.strerror}") from None
    cut = len(text) * 9 // 10
    return Text(text[:cut], config.context), Text(text[cut:], config.context)


def sums(count: int) -> bytes:
    """Generate sentences such as `7 plus 5 is 12.`, the same each time."""
    numbers = random.Random(0)
    pairs = ((numbers.randrange(50), numbers.randrange(50)) for _ in range(count))
    return " ".join(f"{first} plus {second} is {first + second}." for first, second in pairs).encode()


class Block(nn.Module):
    """Attention, then two linear layers, each added to its inputs."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads, self.head_width = config.heads, width // config.heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)
        slopes = alibi_slopes(config.heads) if config.positions == "alibi" else None
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.first_norm(x)))
        return x + self.dropout(self.down(gelu(self.up(self.second_norm(x)))))

    def attention(self, x: Tensor) -> Tensor:
        mesh = getattr(self.query.weight, "device_mesh", None)
        if mesh is not None and self.heads % mesh.size():
            raise UserError(f"heads={self.heads} is not a multiple of --tensor {mesh.size()}: choose another one")

        def heads(layer: nn.Module) -> Tensor:
            # of this rank only, with --tensor
            own: Tensor = layer(x)
            return own.unflatten(2, (own.shape[2] // self.head_width, self.head_width)).transpose(1, 2)

        query, key, value = heads(self.query), heads(self.key), heads(self.value)
        bias = self.distance_penalty(query.shape[1], x.shape[1], query)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=bias is None)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def distance_penalty(self, heads: int, length: int, like: Tensor) -> Tensor | None:
        """Return the penalties of ALiBi for the heads of this rank; minus infinity for later positions."""
        if self.slopes is None:
            return None
        mesh = getattr(self.query.weight, "device_mesh", None)
        first = 0 if mesh is None else mesh.get_local_rank() * heads
        places = torch.arange(length, device=like.device)
        distance = (places[:, None] - places[None, :]).to(like.dtype)
        slopes: Tensor = self.slopes[first : first + heads].to(like.dtype)
        return (-slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf)


def alibi_slopes(heads: int) -> Tensor:
    """Return the slope of each head's penalty: a geometric sequence that ends with 2^-8."""
    return torch.tensor([2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)])


class Begin(nn.Module):
    """Vectors of tokens, and of positions if these are learned."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, config.width)
        self.places = nn.Embedding(config.context, config.width) if config.positions == "learned" else None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        return x if self.places is None else x + self.places(torch.arange(tokens.shape[1], device=tokens.device))


class End(nn.Module):
    """Scores of the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, TOKENS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.begin = Begin(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.end = End(config)
        self.apply(initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.begin(tokens)
        for block in self.blocks:
            x = block(x)
        return self.end(x)  # type: ignore[no-any-return]


def initialize(layer: nn.Module) -> None:
    """Set the weights as GPT-2 does."""
    if isinstance(layer, (nn.Linear, nn.Embedding)):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats.

    Args:
        scores: (batch, length, tokens).
        targets: (batch, length).
    """
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: list[nn.Parameter], config: Config) -> torch.optim.AdamW:
    """Return AdamW, with weight decay for matrices only."""
    matrices = [each for each in parameters if each.ndim > 1]
    others = [each for each in parameters if each.ndim <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay)


def make_scheduler(optimizer: torch.optim.Optimizer, config: Config, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a warm-up followed by a cosine."""

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        done = (step - config.warmup) / max(1, steps - config.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Speed:
    """Tokens per second of all ranks since the last look."""

    def __init__(self, run: Run, config: Config) -> None:
        self._run = run
        self._tokens_per_step = config.batch_size * config.context
        self._begin()

    def _begin(self) -> None:
        self._step, self._at = self._run.step, time.monotonic()

    def look(self) -> float:
        steps, seconds = self._run.step - self._step, time.monotonic() - self._at
        self._begin()
        return steps * self._tokens_per_step / seconds


@torch.no_grad()
def validation_loss(run: Run, model: nn.Module, text: Text, batch_size: int) -> float:
    model.eval()
    total, count = torch.zeros((), device=run.device), 0
    for (tokens,) in run.shard(text, batch_size=batch_size):
        scores = model(tokens[:, :-1])
        if len(tokens):
            total += next_token_loss(scores, tokens[:, 1:]) * len(tokens)
            count += len(tokens)
    model.train()
    return run.mean(total, count)


def train(run: Run, config: Config) -> dict[str, float]:
    """Train the model and return its loss on the rest of the text, in nats per byte."""
    run.seed(config.seed)
    train_text, held_text = load_text(config)
    model = run.wrap(GPT(config), blocks=(Block,), plan=PLAN, recompute=config.recompute)
    optimizer = make_optimizer(list(model.parameters()), config)
    data = run.loader(train_text, batch_size=config.batch_size, shuffle=True, drop_last=True)
    scheduler = make_scheduler(optimizer, config, config.epochs * len(data))
    mean_loss = run.meter("loss")
    state = run.restore(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    speed = Speed(run, config)
    for epoch in state.epochs(config.epochs):
        for (tokens,) in data:
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            run.backward(loss)
            run.update(optimizer, clip=1.0)
            scheduler.step()
            mean_loss.add(loss)
        tokens_per_second = speed.look()
        held = validation_loss(run, model, held_text, config.batch_size)
        run.report(epoch, loss=mean_loss.mean(), held=held, tokens_per_second=tokens_per_second)
    return {"held": run.last_metrics["held"]}
