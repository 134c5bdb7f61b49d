"""What a run takes before it is started: parameters, FLOPs, memory, and hours on named GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sinkutils.checks import integer, real
from sinkutils.model.config import FFNS
from sinkutils.model.decoder import TransformerLM
from sinkutils.study.config import RunConfig

GIB = 2**30
USABLE = 0.9  # of a GPU's memory: the rest is the driver's, the allocator's and the kernels'


@dataclass(frozen=True)
class GPU:
    """A data sheet: memory in GiB, dense bf16 matmul peak with fp32 sums in TFLOP/s."""

    name: str
    memory: int
    peak: float


GPUS = (GPU("A100", 80, 312.0), GPU("H100 SXM", 80, 989.0), GPU("H200", 141, 989.0), GPU("RTX 4090", 24, 165.0))


@dataclass(frozen=True)
class Cost:
    """The estimate of one run.

    FLOPs a token: 6 for each weight but the embedding's and 6 L d C for causal attention (queries see C / 2 keys on
    average; logits and output are 2 d each a key). Windows and other attention operations are not told apart.

    Memory: weights, gradients and AdamW's two moments in fp32 are 16 bytes a parameter, a bf16 copy 2 more.
    Activations of a micro-batch, with b = 2 bytes in bf16 and 4 in fp32, are L (16 d + 9 b d + n b f) + (2 b + 8) V a
    token: each norm's input and output in fp32; as the linears read them both norms' outputs, q, k, v before and q, k
    after rotary, the heads' output twice; n maps of the FFN's width f (4 gated, 2 not); logits and their gradient, in
    fp32 the log-softmax and its own. So with fused attention, uncompiled: torch.compile keeps less.
    """

    name: str
    parameters: int
    body: int  # parameters without both embeddings
    tokens: int
    steps: int
    weight_flops: float  # a token
    attention_flops: float  # a token
    state_bytes: int
    activation_bytes: int

    @property
    def flops_per_token(self) -> float:
        return self.weight_flops + self.attention_flops

    @property
    def flops(self) -> float:
        """Of the whole run."""
        return self.flops_per_token * self.tokens

    def hours(self, gpu: GPU, mfu: float, gpus: int = 1) -> float:
        """Wall time where each of `gpus` GPUs reaches the share `mfu` of its peak."""
        return self.flops / (gpus * mfu * gpu.peak * 1e12) / 3600

    def memory(self, gpus: int = 1, parallel: str = "ddp") -> float:
        """GiB a GPU needs; FSDP cuts the state into `gpus` parts."""
        return (self.state_bytes / (gpus if parallel == "fsdp" else 1) + self.activation_bytes) / GIB

    def table(self, mfu: float = 0.4, gpus: int = 8) -> str:
        """The estimate for printing. Raises ValueError unless 0 < mfu <= 1 and gpus >= 1."""
        real("mfu", mfu, "in (0, 1]", high=1.0, ends="high")
        integer("gpus", gpus, least=1)
        needs = {parallel: self.memory(gpus, parallel) for parallel in ("ddp", "fsdp")}
        ddp, fsdp = (f"{parallel.upper()}, {need:.0f} GiB" for parallel, need in needs.items())
        total, weights, attention = (x / 1e9 for x in (self.flops_per_token, self.weight_flops, self.attention_flops))
        state, kept = self.state_bytes / GIB, self.activation_bytes / GIB
        memory = f"weights, gradients and optimiser {state:.1f} GiB, activations of a micro-batch {kept:.1f} GiB"
        lines = [
            self.name,
            f"parameters     {self.parameters / 1e6:,.1f}M, {self.body / 1e6:,.1f}M without embeddings",
            f"tokens         {self.tokens / 1e9:,.3f}B in {self.steps:,} steps of {self.tokens // self.steps:,}",
            f"FLOPs a token  {total:.3f}G: weights {weights:.3f}G, attention {attention:.3f}G",
            f"FLOPs          {self.flops:.2e}",
            f"memory         {memory}",
            "",
            f"at {mfu:.0%} of the dense bf16 peak:",
            f"{'GPU':<10}{'TFLOP/s':>9}{'GiB':>6}{'hours on 1':>13}{f'on {gpus}':>10}{ddp:>16}{fsdp:>16}",
        ]
        for gpu in GPUS:
            alone, together = self.hours(gpu, mfu), self.hours(gpu, mfu, gpus)
            one, other = ("fits" if need <= USABLE * gpu.memory else "does not fit" for need in needs.values())
            hours = f"{alone:>13.1f}{together:>10.1f}"
            lines.append(f"{gpu.name:<10}{gpu.peak:>9g}{gpu.memory:>6}{hours}{one:>16}{other:>16}")
        return "\n".join(lines)


def cost(run: RunConfig) -> Cost:
    """The estimate of a run; the model is built without memory, so that its parameters are counted, not guessed."""
    model, train = run.model, run.train
    with torch.device("meta"):
        shapes = {name: weight.numel() for name, weight in TransformerLM(model).named_parameters()}
    total = sum(shapes.values())
    embeddings = sum(shapes[f"{name}.weight"] for name in ("embed", "unembed"))
    wide = 2 if train.precision == "bf16" else 4
    layer = (16 + 9 * wide) * model.hidden_size
    layer += (4 if FFNS[model.ffn][1] else 2) * wide * model.intermediate_size
    micro_batch = (train.micro_batch or train.batch_size) * model.context_length
    return Cost(
        name=f"{run.preset}/{run.experiment}",
        parameters=total,
        body=total - embeddings,
        tokens=train.steps * train.batch_size * model.context_length,
        steps=train.steps,
        weight_flops=6.0 * (total - shapes["embed.weight"]),
        attention_flops=6.0 * model.num_layers * model.hidden_size * model.context_length,
        state_bytes=total * (18 if train.precision == "bf16" else 16),
        activation_bytes=micro_batch * (model.num_layers * layer + (2 * wide + 8) * model.vocab_size),
    )
