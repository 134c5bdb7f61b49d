"""What a run learns, and how a machine takes its steps: rows of tokens, loss, optimisers, precision.

In a pre-training the rows are documents that are packed into chunks (Section 2, Fig. 1 right). The
interventions of Section 5 on the text are parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from sinkutils.checks import require
from sinkutils.measuring.texts import fix_position
from sinkutils.model.decoder import TransformerLM
from sinkutils.study import grid
from sinkutils.study.config import (
    DataConfig,
    FinetuneConfig,
    Json,
    RunConfig,
    TrainConfig,
    public_name,
)
from sinkutils.study.corpus import Corpus, load_corpus
from sinkutils.study.record import Folder, Record
from sinkutils.study.store import RunFolder, Runs

CPU = torch.device("cpu")
# A GPU holds the whole text of its run if it is smaller than this number of bytes. Every text of
# the study is, except for the Pile.
ON_DEVICE = 2**30
# Each seed has several streams of random numbers: for the order of the rows, for redrawn tokens and
# for the places of x_fix. To change a stream's number would change the records.
ORDER, REDRAWN, PLACES = 1, 5, 6
# The number of ordinary steps before the recording. They allocate the optimiser's state and the
# workspaces of the libraries.
WARM_UP = 3
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class Batches:
    """Rows to train on, in an order that depends on the seed only."""

    tokens: Any  # the tokens of all rows
    length: int  # the number of rows

    def __len__(self) -> int:
        return self.length

    def take(self, indices: np.ndarray) -> Tensor:
        """Rows by index, (n, ..) int64."""
        raise NotImplementedError

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """The `size` rows of a step (0, 1, ..). Each epoch has a fresh permutation of the rows.

        The result depends on seed and step only, so that a run can be resumed at any step.
        """
        # The steps number their rows consecutively. With N rows in all, number n is place n mod N
        # of epoch n div N.
        numbers = np.arange(step * size, (step + 1) * size)
        epochs, places = np.divmod(numbers, self.length)
        rows = np.empty(size, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():  # more than one if an epoch ends in this step
            here = epochs == epoch
            order = _permutation(self.length, seed, epoch)
            rows[here] = order[places[here]]
        return self.take(rows)


@lru_cache(maxsize=64)  # a step may need two epochs, and the stacked runs of studies take turns
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, ORDER, epoch]).permutation(length)


class Chunks(Batches):
    """A split as chunks of C + 1 tokens. The first C are the inputs, the last C the targets.

    The documents are joined with EOS and cut at every C tokens. So a chunk may start anywhere in a
    document. Its last token is a target only, and is the first token of the next chunk.

    device: where the chunks are cut. On the CPU the tokens stay on disk. For a GPU, all tokens are
    copied there once, and later only the numbers of the chunks are copied.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        context_length: int,
        data: DataConfig,
        seed: int = 0,
        device: torch.device = CPU,
    ) -> None:
        tokens = torch.from_numpy(corpus.tokens(split))  # unsigned, as on disk
        if split == "train":
            tokens = tokens[: int(len(tokens) * data.share)]
        if device.type != "cpu":  # few operations on a GPU support unsigned integers
            tokens = tokens.int().to(device)
        self.tokens = tokens
        self.data = data
        self.fix_id = corpus.fix_id
        self.context_length = context_length
        self.length = (len(tokens) - 1) // context_length
        require(
            self.length > 0,
            f"corpus {corpus.name!r} has {len(tokens)} {split} tokens (share {data.share}), "
            f"less than one chunk of context_length + 1 = {context_length + 1}: give more text or "
            "a smaller context_length",
        )
        # The draw is made once for each chunk, as in the authors' data on disk: in a later epoch a
        # chunk has the same random tokens again.
        size = (self.length, len(data.random_positions))
        of_tokens = np.random.default_rng([seed, REDRAWN])
        of_places = np.random.default_rng([seed, PLACES])
        redrawn = of_tokens.integers(corpus.first_text_id, corpus.vocab_size, size=size)
        places = of_places.integers(context_length, size=self.length)
        self.redrawn = torch.from_numpy(redrawn).to(device)
        self.places = torch.from_numpy(places).to(device)
        self.columns = torch.arange(context_length + 1, device=device)

    def take(self, indices: np.ndarray) -> Tensor:
        """The chunks with these indices, (n, C + 1) int64, after the interventions of `data`."""
        # Each chunk is one row of C + 1 places in the text.
        data = self.data
        rows = torch.from_numpy(np.ascontiguousarray(indices)).to(self.places.device)
        starts = rows[:, None] * self.context_length  # (n, 1)
        ids: Tensor = self.tokens[starts + self.columns].long()
        for column, position in enumerate(data.random_positions):
            ids[:, position - 1] = self.redrawn[rows, column]
        if data.random_place:
            places = self.places[rows]  # (n,), from 0
            return ids.scatter_(1, places[:, None], self.fix_id)
        return fix_position(ids, data.fixed_position, self.fix_id)


class CrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of logits (N, V) and targets (N,) in nats.

    The forward pass keeps the logits, in their own precision, and their log-sum-exp (lse). From
    these the backward pass computes the gradient in one pass over the logits. Compiled on a CPU, a
    small model's step takes a fifth less time than with F.cross_entropy, or with a gradient that is
    computed in the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        lse = torch.logsumexp(logits.float(), dim=-1)  # (N,)
        ctx.save_for_backward(logits, targets, lse)
        target_logits = logits.gather(-1, targets[:, None])  # (N, 1)
        losses = lse - target_logits[:, 0].float()
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        logits, targets, lse = ctx.saved_tensors
        N, V = logits.shape
        softmax = (logits.float() - lse[:, None]).exp()
        # int32, because comparing int64 numbers takes twice the time of the exponential
        tokens = torch.arange(V, dtype=torch.int32, device=logits.device)
        onehot = tokens == targets.int()[:, None]  # (N, V)
        gradient = (softmax - onehot.float()) * (grad_output / N)
        return gradient.to(logits.dtype), None  # the targets have no gradient


def next_token_loss(model: nn.Module, chunks: Tensor, unscored: tuple[int, ...] = ()) -> Tensor:
    """The mean next-token cross-entropy of chunks (B, C + 1), in nats.

    The model sees the tokens at the 1-based positions `unscored`, but the predictions that it makes
    there do not count.
    """
    logits = model(chunks[:, :-1])  # (B, C, V)
    targets = chunks[:, 1:]
    logits = without(logits, unscored).flatten(0, 1)
    targets = without(targets, unscored).flatten()
    loss: Tensor = CrossEntropy.apply(logits, targets)
    return loss


def without(x: Tensor, positions: tuple[int, ...]) -> Tensor:
    """x (B, T, ..) without these 1-based positions, which must be sorted."""
    if not positions:
        return x
    # Slices are used, because a list of indices would be copied from the host, and a CUDA graph
    # cannot contain such a copy.
    parts = []
    start = 0
    for position in positions:
        parts.append(x[:, start : position - 1])
        start = position
    return torch.cat([*parts, x[:, start:]], dim=1)


@dataclass
class Task:
    """What a run learns, and from which weights it starts."""

    model: TransformerLM
    tokenizer: Tokenizer
    train: Batches
    valid: Batches
    fingerprint: str  # SHA-256 of everything that the run reads
    loss: Callable[..., Tensor] = next_token_loss
    weight: Callable[[Tensor], int] = len  # of a part of the validation text in its loss
    each_step: bool = False  # whether the curve has the loss and the gradient norm of every step
    fixed_shapes: bool = True  # whether all steps have the same shapes, as a CUDA graph needs
    more: Json = field(default_factory=dict)  # further entries of the record's provenance


def pretraining(config: RunConfig, corpus: Corpus, device: torch.device) -> Task:
    """The task of a pre-training: the next token of each chunk of a corpus.

    The seed determines the weights of the new model. Random tokens cannot be predicted, so the
    validation text keeps its tokens (Section 5).
    """
    length = config.model.context_length
    unchanged = dataclasses.replace(config.data, random_positions=(), random_place=False)
    small = corpus.tokens("train").nbytes < ON_DEVICE
    train = Chunks(corpus, "train", length, config.data, config.seed, device if small else CPU)
    valid = Chunks(validation_corpus(config, corpus), "valid", length, unchanged)
    model = TransformerLM(config.model, config.seed)
    return Task(model, corpus.tokenizer, train, valid, corpus.fingerprint)


def validation_corpus(config: RunConfig, corpus: Corpus) -> Corpus:
    """The corpus to validate on, with the tokenizer of the run.

    It is the one that the config names for validation, if the run is trained on the config's own
    corpus. Otherwise it is the corpus of the run.
    """
    data = config.data
    if data.validation is None or corpus.name != public_name(data.corpus):
        return corpus
    tokenizer = str(corpus.folder / "tokenizer.json")
    return load_corpus(data.validation, config.model.vocab_size, tokenizer=tokenizer)


# ---- how a step runs on a machine


def make_optimizers(named: dict[str, nn.Parameter], train: TrainConfig) -> list[Optimizer]:
    """The optimisers for a config. There is one, except that muon needs AdamW for the rest."""
    rate = train.learning_rate
    decay = train.weight_decay
    if train.optimizer == "sgd":
        return [SGD(named.values(), rate, momentum=train.beta1, weight_decay=decay)]
    # Muon is for the linear maps. Embeddings and gains are none, nor are biases, which are matrices
    # only because they have a row for each head. Muon updates q, k and v as the single matrix that
    # they are here, and gate and up as well; other implementations split them first.
    linear = list[nn.Parameter]()
    others = list[nn.Parameter]()
    for name, parameter in named.items():
        in_block = name.startswith("blocks.") and name.endswith(".weight")
        maps = train.optimizer == "muon" and in_block and parameter.ndim == 2
        (linear if maps else others).append(parameter)
    # AdamW gets the parameters that Muon does not take, or all of them.
    betas = (train.beta1, train.beta2)
    adamw = AdamW(others, rate, betas, train.adam_eps, weight_decay=decay, fused=True)
    if not linear:
        return [adamw]
    from torch.optim import Muon  # since torch 2.9

    # With match_rms_adamw an update has the size of AdamW's, so that both optimisers can share one
    # learning rate and one weight decay.
    return [Muon(linear, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"), adamw]


def set_rate(optimizers: list[Optimizer], rate: float) -> None:
    """Set the learning rate of the next step. For a CUDA graph it is written into a tensor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def instruction_set() -> list[str]:
    """The vector instructions that the CPU has. Where they differ, the last digits may differ."""
    has = torch.cpu.get_capabilities()
    return [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if has.get(name)]


def usable_precision(precision: str, device: torch.device) -> str:
    """bf16 if the config wants it and the device has instructions for it, and fp32 otherwise."""
    if precision != "bf16":
        return "fp32"
    able = False
    if device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        has = instruction_set()
        able = "avx512_bf16" in has or "amx_bf16" in has
    return "bf16" if able else "fp32"


def conditions_of(run: Any, compiled: bool, graph: bool) -> dict[str, Any]:
    """The device on which, and the way in which, a `Run` is trained, for its provenance."""
    conditions: dict[str, Any] = {
        "device": device_name(run.device),
        "compiled": compiled,
        "precision_used": run.precision,
        "instruction_set": instruction_set(),
    }
    if graph:
        conditions["graph"] = True
    return conditions


def may_graph(run: Any) -> bool:
    """Whether a step can be one CUDA graph. It needs a GPU, and AdamW, whose state stays there."""
    on_gpu = run.device.type == "cuda"
    adamw = run.config.train.optimizer == "adamw"
    return on_gpu and adamw and bool(run.task.fixed_shapes)


@cache
def compiles() -> bool:
    """Whether torch.compile works here. On a CPU it needs a C++ compiler. Warns if it fails."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
    except Exception as error:  # any error of a missing or broken compiler
        warnings.warn(
            f"torch.compile does not work here ({type(error).__name__}): training goes on without, "
            "slower, with other last digits; a C++ compiler mends that",
            stacklevel=2,
        )
        return False
    return True


class GraphedStep:
    """Runs `run.update` as a CUDA graph, which needs one launch instead of several hundred.

    The launches limit the speed of a small model: each kernel runs for microseconds only, and the
    host takes longer than that to launch it. A CUDA graph is a recording of all kernels of a step,
    and the GPU replays it by itself. The replay reads and writes the same memory as the recording.
    So whatever changes from step to step, namely the batch and the learning rate, has to be copied
    into a tensor that stays in its place.

    Create it after a checkpoint has been loaded, because that replaces the learning rates.
    run: a `Run`, or any object with the same `update`, `optimizers` and `device`.
    """

    def __init__(self, run: Any) -> None:
        require(
            run.device.type == "cuda",
            f"graph=True records a step for a GPU, and this run is on {run.device}: leave it out",
        )
        self.run = run
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                # As a plain number, the learning rate would be recorded as a constant.
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=run.device)
                group["capturable"] = True

    def __call__(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the gradient norm of one step on a batch, as `run.update` returns them."""
        self.steps += 1
        if self.steps <= WARM_UP:
            done: tuple[Tensor, Tensor] = self.run.update(batch)
            return done
        if self.graph is None:
            self.batch = batch.clone()
            self.graph = torch.cuda.CUDAGraph()
            # The kernels are recorded, and none of them runs. The recording is made on a stream of
            # the current device, which must be the run's.
            with torch.cuda.device(self.run.device), torch.cuda.graph(self.graph):
                self.loss, self.norm = self.run.update(self.batch)
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss.clone(), self.norm.clone()


@contextlib.contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """A context that makes results reproducible, and restores PyTorch's settings at its end.

    On a CPU it allows one thread, because sums depend on the number of threads. On CUDA it selects
    PyTorch's deterministic kernels; an operation that has none causes a warning with its name. Even
    so, attention's backward pass on CUDA is not reproducible to the bit.
    """
    threads = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()  # off, warn or error
    deterministic: Any = torch.utils.deterministic  # its type stubs lack the setting below
    filled = deterministic.fill_uninitialized_memory
    workspace = os.environ.get(WORKSPACE)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if device.type == "cuda":
        # cuBLAS reads this variable when it starts.
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.set_deterministic_debug_mode("warn")
        # PyTorch would otherwise fill each new tensor with NaN, which adds a kernel to most of a
        # step's kernels.
        deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = filled
        if workspace is None:
            os.environ.pop(WORKSPACE, None)


def device_name(device: torch.device) -> str:
    """The device's kind: cpu, or the GPU's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


# ---- what a training asks before its first step


def claim(
    config: RunConfig, runs: Folder, corpus: Corpus | str | None, weights: bool
) -> tuple[RunFolder, Corpus | None, Record | None]:
    """The folder of a run, its text, and the record that it has already, if there is one.

    The arguments are those of `train`. With a record of the config's own text, that text is not
    opened, and None stands for it. A warning says if a run is trained on another text than its own.
    """
    store = Runs(runs)
    own = store.of(config)
    if corpus is None:
        done = own.record(weights)
        if done is not None:
            return own, None, done
    text = corpus
    vocabulary = config.model.vocab_size
    if not isinstance(text, Corpus):
        text = load_corpus(text or config.data.corpus, vocabulary)
    what = f"corpus {text.name!r} with {text.vocab_size} tokens"
    require(
        text.vocab_size <= vocabulary,
        f"{what} is too large for a model of {vocabulary}: "
        "raise vocab_size or load the corpus with fewer",
    )
    place = store.of(config, text.identity)
    if place.folder != own.folder or text.vocab_size != vocabulary:
        warnings.warn(
            f"training on {what} in place of {public_name(config.data.corpus)!r} "
            f"with {vocabulary}, its own text: the record is {place.name}",
            stacklevel=3,
        )
    return place, text, place.record(weights)


def before(config: FinetuneConfig) -> RunConfig:
    """The run that a fine-tuning starts from."""
    return grid.config(config.start, config.preset, config.seed)


def start_of(config: FinetuneConfig, store: Runs, text: Corpus) -> Record | None:
    """The record that a fine-tuning starts from, or None if this run has yet to be trained.

    If there is no record on this text, one on the config's own text is taken.
    """
    run = before(config)
    record = store.of(run, text.identity).record() or store.of(run).record()
    if record is not None and record.status == "done" and record.weights is None:
        return None
    return record
