"""A small GPT with experts in every second block, beside the dense model of equal active FLOPs.

    python examples/language_model.py                        (5 minutes on a CPU core)
    python examples/language_model.py --experts 0            (the dense model)
    python examples/language_model.py --text book.txt --layers 6 --dim 256
    torchrun --nproc_per_node 2 examples/language_model.py   (the experts spread over two ranks)

The text is read byte by byte, so any file will do. The default is the documentation of Python that
comes with Python. Its last tenth is for validation. Under torchrun each rank has a part of the
experts and of every batch; losses do not depend on the number of ranks.

A token visits `top_k` experts, whose hidden dim is 1 / `top_k` of the dense network's.
"""

# B sequences of a rank, L tokens of a sequence, T = B L tokens, V vocabulary, M model dim

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import moe_core
from moe_core import (
    MoEConfig,
    MoELayer,
    equal_tokens,
    finish_gradients,
    ignore_experts,
    load_tensors,
    save_tensors,
)
from moe_core.parallel import ExpertGroup, make_expert_groups

VOCABULARY = 256  # bytes
AUX_WEIGHT = 0.01  # of the loss that balances the experts' load
VALIDATION_SHARE = 0.1  # the end of the text
VALIDATION_BATCHES = 20  # at most


# --- model


class Block(nn.Module):
    """Attention, then a feed-forward network or experts; both pre-norm with a residual."""

    def __init__(self, dim: int, heads: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, L, M] -> y [B, L, M] and the auxiliary loss, 0 without experts."""
        x = x + self.attention(self.norm1(x))
        if isinstance(self.feed_forward, MoELayer):
            y, aux_loss = self.feed_forward(self.norm2(x))
            return x + y, aux_loss
        return x + self.feed_forward(self.norm2(x)), x.new_zeros(())

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [B, L, 3, heads, M / heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    """Predicts each next byte of a text.

    Args:
        group: the ranks over which the experts are spread; None: this process alone.
    """

    def __init__(self, args: argparse.Namespace, group: ExpertGroup | None) -> None:
        super().__init__()
        self.context = args.context
        self.tokens = nn.Embedding(VOCABULARY, args.dim)
        self.positions = nn.Embedding(args.context, args.dim)
        self.blocks = nn.ModuleList()
        for layer in range(args.layers):
            feed_forward: nn.Module = dense(args.dim)
            if args.experts and layer % 2 == 1:
                feed_forward = experts(args, group)
            self.blocks.append(Block(args.dim, args.heads, feed_forward))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, VOCABULARY)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, L] -> logits [B, L, V] and the mean auxiliary loss of the layers."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        aux_losses = []
        for block in self.blocks:
            x, aux_loss = block(x)
            aux_losses.append(aux_loss)
        return self.head(self.norm(x)), torch.stack(aux_losses).mean()


def dense(dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


def experts(args: argparse.Namespace, group: ExpertGroup | None) -> MoELayer:
    config = MoEConfig(
        model_dim=args.dim,
        hidden_dim=4 * args.dim // args.top_k,
        num_experts=args.experts,
        top_k=args.top_k,
        capacity_factor=0.0,  # no token is dropped
        global_balance=True,  # the auxiliary loss does not depend on the number of ranks
    )
    return MoELayer(config, group)


# --- text


def read_text(file: Path | None) -> bytes:
    """The file, or Python's documentation of its language; some packages of Python lack it."""
    if file is not None:
        try:
            return file.read_bytes()
        except OSError as error:
            sys.exit(f"--text {file}: cannot be read ({error.strerror})")
    try:
        from pydoc_data.topics import topics
    except ImportError:
        sys.exit("this Python comes without the text of pydoc_data.topics: give a file by --text")
    return "\n\n".join(topics.values()).encode()


class Text:
    """The training and the validation part of a text, and this rank's part of each batch."""

    def __init__(self, text: bytes, args: argparse.Namespace, rank: int, num_ranks: int) -> None:
        data = torch.tensor(list(text), dtype=torch.uint8)
        split = len(data) - int(VALIDATION_SHARE * len(data))
        self.training, self.validation = data[:split], data[split:]
        if len(self.validation) < args.batch_size * args.context + 1:
            sys.exit(
                f"the text has {len(data):,} bytes; its last tenth must hold a batch of"
                f" {args.batch_size} x {args.context} bytes, and one more"
            )
        self.args, self.rank, self.num_ranks = args, rank, num_ranks

    def training_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets [B, L] at random places, which depend on the seed and the step."""
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
        last = len(self.training) - self.args.context
        starts = torch.randint(last, (self.args.batch_size,), generator=generator)
        return self._sequences(self.training, starts)

    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same sequences each time, which do not overlap."""
        batch_size, context = self.args.batch_size, self.args.context
        num_batches = (len(self.validation) - 1) // (batch_size * context)
        starts = torch.arange(num_batches * batch_size) * context
        for batch in starts.split(batch_size)[:VALIDATION_BATCHES]:
            yield self._sequences(self.validation, batch)

    def _sequences(self, data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        own = starts[self.rank :: self.num_ranks]
        places = own.unsqueeze(1) + torch.arange(self.args.context + 1)
        sequences = data[places].long().to(self.args.device)  # [B, L + 1]
        return sequences[:, :-1], sequences[:, 1:]


# --- training


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    if device.type == "cuda":
        return torch.bfloat16
    return None


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy in nats per byte, and the auxiliary loss."""
    dtype = autocast_dtype(tokens.device)
    with torch.autocast(tokens.device.type, dtype, enabled=dtype is not None):
        logits, aux_loss = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), aux_loss


def train_step(
    replicated: nn.Module,
    model: LanguageModel,
    batch: tuple[Tensor, Tensor],
    optimizer: torch.optim.Optimizer,
) -> Tensor:
    """One step of the optimiser; the loss before it.

    Args:
        replicated: the model, within DistributedDataParallel on several ranks.
    """
    with moe_core.step(model, autocast_dtype(batch[0].device)):
        loss, aux_loss = loss_of(replicated, *batch)
        (loss + AUX_WEIGHT * aux_loss).backward()
    finish_gradients(model, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(model: LanguageModel, text: Text, args: argparse.Namespace) -> None:
    """Train for `args.steps` steps; print a line every `args.every` steps and at the end."""
    replicated: nn.Module = model
    if text.num_ranks > 1:
        replicated = DistributedDataParallel(ignore_experts(model))
    optimizer = make_optimizer(model, args)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, args))
    losses: list[Tensor] = []
    seconds = 0.0
    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        losses.append(train_step(replicated, model, text.training_batch(step), optimizer))
        schedule.step()
        if step % args.every and step < args.steps:
            seconds += time.perf_counter() - start
            continue
        training = mean_over_ranks(torch.stack(losses).mean())  # waits for a GPU
        seconds += time.perf_counter() - start
        speed = len(losses) * args.batch_size * args.context / seconds
        print_on_first_rank(
            f"step {step:5}   loss {training:.4f}   validation {validate(model, text):.4f}"
            f"   {speed:,.0f} tokens/s"
        )
        losses.clear()
        seconds = 0.0


def make_optimizer(model: LanguageModel, args: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1)


def lr_factor(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine to a tenth."""
    warmup = max(args.steps // 20, 1)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(args.steps - warmup, 1)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def validate(model: LanguageModel, text: Text) -> float:
    """The mean loss over the validation batches, in nats per byte."""
    model.eval()
    losses = [loss_of(model, *batch)[0] for batch in text.validation_batches()]
    model.train()
    return mean_over_ranks(torch.stack(losses).mean())


@torch.no_grad()
def generate(model: LanguageModel, prompt: str, length: int, device: torch.device) -> str:
    """The prompt and `length` sampled bytes. Every rank calls this, with the same result."""
    model.eval()
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        logits, _ = model(tokens[:, -model.context :])
        probs = logits[:, -1].float().softmax(-1)
        tokens = torch.cat([tokens, probs.multinomial(1, generator=generator)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def load(model: LanguageModel, directory: Path) -> None:
    """Load what `--save` wrote, on any number of ranks."""
    try:
        model.load_state_dict(load_tensors(directory, model))
    except (OSError, ValueError) as error:
        sys.exit(f"--load {directory}: {error}")
    except RuntimeError:  # other names or shapes
        sys.exit(f"--load {directory}: another model; give the options that it was trained with")


# --- ranks


@contextmanager
def ranks_of_torchrun(device: torch.device) -> Iterator[None]:
    """Join the processes that torchrun started, if it did."""
    if "RANK" not in os.environ:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value.item()


def print_on_first_rank(line: str) -> None:
    """Print on the first rank alone."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(line, flush=True)


# --- command


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options; None: those of this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: Python's documentation")
    parser.add_argument(
        "--experts", type=int, default=8, help="experts of a layer; 0: the dense model"
    )
    parser.add_argument("--top-k", type=int, default=2, help="experts per token")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128, help="model dim")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences, over all ranks")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps between two lines")
    parser.add_argument("--lr", type=float, default=2e-3, help="the largest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--prompt", default="The ", help="what the sample at the end starts with")
    parser.add_argument("--sample", type=int, default=300, help="bytes of the sample")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the trained model there")
    parser.add_argument("--load", type=Path, metavar="DIR", help="start from what --save wrote")
    args = parser.parse_args(words)
    check(args)
    if args.save:
        make_directory(args.save)
    if args.device == "auto":
        args.device = "cpu"
        if torch.cuda.is_available():
            args.device = "cuda"
    args.device = torch.device(args.device)
    return args


def make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--save {directory}: cannot be written ({error.strerror})")


def check(args: argparse.Namespace) -> None:
    """End with one line for a value that cannot be."""
    for name in ("top_k", "layers", "dim", "heads", "context", "batch_size", "every"):
        value = getattr(args, name)
        if value < 1:
            sys.exit(f"--{name.replace('_', '-')} is {value}, it must be at least 1")
    for name in ("experts", "steps", "sample"):
        if getattr(args, name) < 0:
            sys.exit(f"--{name} is {getattr(args, name)}, it must not be negative")
    if not args.lr > 0:
        sys.exit(f"--lr is {args.lr}, it must be above 0")
    if not args.prompt:
        sys.exit("--prompt is empty, it must have a character")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device is cuda, but torch finds no GPU here")
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    divisors = [("dim", args.heads, "--heads"), ("batch_size", num_ranks, "the number of ranks")]
    divisors.append(("experts", num_ranks, "the number of ranks"))
    for name, divisor, of_what in divisors:
        value = getattr(args, name)
        if value % divisor:
            option = f"--{name.replace('_', '-')}"
            sys.exit(f"{option} is {value}, it must be divisible by {of_what} ({divisor})")
    if args.experts and args.top_k > args.experts:
        sys.exit(f"--top-k is {args.top_k}, it must be at most --experts ({args.experts})")
    if 4 * args.dim % args.top_k:
        sys.exit(f"--top-k is {args.top_k}, it must divide 4 x --dim ({4 * args.dim})")


def main() -> None:
    args = parse()
    text = read_text(args.text)
    with ranks_of_torchrun(args.device):
        rank, num_ranks, group = 0, 1, None
        if dist.is_initialized():
            rank, num_ranks = dist.get_rank(), dist.get_world_size()
            group = make_expert_groups(expert_parallel_size=num_ranks)
        torch.manual_seed(args.seed)  # the same on every rank
        model = LanguageModel(args, group).to(args.device)
        if args.load:
            load(model, args.load)
        parts = Text(text, args, rank, num_ranks)
        with equal_tokens(model):
            train(model, parts, args)
        text = generate(model, args.prompt, args.sample, args.device)
        print_on_first_rank(
            "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)
        )
        if args.save:
            save_tensors(args.save, model, model.state_dict(), is_main=rank == 0)


if __name__ == "__main__":
    main()
