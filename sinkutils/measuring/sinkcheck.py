"""`su.sinkcheck`: does an attention kernel treat its sinks right, and if not, what is wrong?

The reference cases are in `sinkcheck.safetensors`: inputs, outputs, log-sum-exp and gradients, made
in float64 by `studies/sinkcheck_cases.py`. Other projects may copy that file. A kernel that fails a
case is compared with each of the known faults in `faults.py`, and the one that fits is named.
"""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sinkutils.checks import Refused, choice, first_line, real, require, short
from sinkutils.measuring import faults
from sinkutils.measuring.faults import DIFFERENTIABLE, FAULTS, Attention, Call, oracle
from sinkutils.measuring.maps import as_tensor

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Checked", "reference", "run"]

FILE = Path(__file__).with_name("sinkcheck.safetensors")
# Relative to the largest number of a reference, how far a right kernel may be off.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 3e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}
OPTIONS = "scale causal window first_keys sinks sink_keys sink_values documents return_lse".split()
PAIRS = 3  # of how many failures that no known fault explains, two faults at once are tried


class Case(NamedTuple):
    """A reference case: its inputs, and what a kernel should make of them, in float64."""

    call: Call
    out: Tensor
    lse: Tensor
    cotangent: Tensor  # the gradients are those of sum(out * cotangent)
    gradients: dict[str, Tensor]
    cut: int | None  # where the keys are cut into two halves, whose outputs are merged
    fine: bool  # whether the sinks need float32


@cache
def reference() -> dict[str, Case]:
    """The reference cases by name."""
    from safetensors import safe_open

    tensors: dict[str, dict[str, Tensor]] = {}
    with safe_open(FILE, "pt") as file:
        options = json.loads(file.metadata()["cases"])
        for key in file.keys():  # it is no dict
            name, part = key.split(".", 1)
            tensors.setdefault(name, {})[part] = file.get_tensor(key)
    cases = {}
    for name, (fields, cut, fine) in options.items():
        parts = tensors[name]
        inputs: dict[str, Any] = {x: parts[x].double() for x in DIFFERENTIABLE if x in parts}
        gradients = {x: parts[f"d{x}"] for x in DIFFERENTIABLE if f"d{x}" in parts}
        call = Call(documents=parts.get("documents"), **inputs, **fields)
        results = parts["out"], parts["lse"], parts["cotangent"]
        cases[name] = Case(call, *results, gradients, cut, fine)
    return cases


class Stopped(Exception):
    """A part cannot be compared."""

    verdict = "broken"


class Unsupported(Stopped):
    """The kernel does not offer what a case needs."""

    verdict = "not supported"


@dataclass
class Outcome:
    """One part of a case: "output", "log-sum-exp", "merged halves" or "gradient of ..".

    verdict: right, wrong, broken (it raised, or returned what cannot be compared) or not supported.
    """

    case: str
    part: str
    verdict: str
    error: float = math.nan  # relative to the reference's largest number
    says: str = ""
    # wrong: the known faults that give the same numbers
    fits: tuple[str, ...] = ()


@dataclass
class Checked:
    """What `run` found. `print` it, or read `right`, `faults` and `table`."""

    name: str
    outcomes: list[Outcome]
    faults: list[str] = field(default_factory=list)  # what is wrong, most cases first

    @property
    def right(self) -> bool:
        """Whether nothing is wrong in what the kernel supports, and it supports something."""
        verdicts = {outcome.verdict for outcome in self.outcomes}
        return "right" in verdicts and verdicts <= {"right", "not supported"}

    @property
    def table(self) -> pd.DataFrame:
        """A row for each case and part."""
        import pandas as pd

        rows = [vars(outcome) | {"fits": " or ".join(outcome.fits)} for outcome in self.outcomes]
        return pd.DataFrame(rows)

    def of(self, verdict: str) -> list[Outcome]:
        """The outcomes with this verdict."""
        return [outcome for outcome in self.outcomes if outcome.verdict == verdict]

    def __str__(self) -> str:
        verdicts = ("right", "wrong", "broken", "not supported")
        counts = [f"{len(self.of(verdict))} {verdict}" for verdict in verdicts]
        lines = [f"{self.name}: {', '.join(counts)}"]
        for fault in self.faults:
            lines.append(f"- {fault} ({_cases(self.outcomes, fault)})")
        lacking = self.of("not supported")
        for reason in dict.fromkeys(outcome.says for outcome in lacking):
            lines.append(f"not supported: {reason} ({_cases(lacking, reason)})")
        return "\n".join(lines)


def _cases(outcomes: Sequence[Outcome], reason: str) -> str:
    """The cases in which a fault or another reason was found, shortened to three."""
    names = [*dict.fromkeys(o.case for o in outcomes if reason in (o.fits or (o.says,)))]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"in {', '.join(names[:3])}{more}"


def run(
    function: Callable[..., Any],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    cases: Iterable[str] | None = None,
    gradients: bool = True,
    tolerance: float | None = None,
    name: str = "",
) -> Checked:
    """Put an attention kernel through the reference cases, and name what is wrong with it.

    function: called as function(q, k, v, scale=.., causal=.., window=.., first_keys=.., sinks=..,
        sink_keys=.., sink_values=.., documents=.., return_lse=..), with torch tensors; it returns
        the output (B, H, T, E), or with return_lse the output and the log-sum-exp (B, H, T):

            q           (B, H, T, D)
            k, v        (B, G, S, D) and (B, G, S, E): H / G query heads in a row share a key head
            scale       the factor of the products of q and k
            causal      True: the last query stands at the last key; False: every query sees all
            window      None, or how many keys a query sees, itself included
            first_keys  how many first keys a window never hides
            sinks       None, or (H,): one more logit per head, not scaled, without a value
            sink_keys, sink_values  None, or (H, D) and (H, E): one more key per head, seen by all
            documents   None, or (B, S) integers: a query sees the keys of its own document
            return_lse  natural logarithm of the sum of exp over all logits, the sink's included

        It need not have all of these. What its signature lacks, or what it refuses with
        NotImplementedError, is reported as not supported. An argument that it takes by **kwargs and
        ignores makes it wrong.
    dtype, device: of the tensors. The inputs are exact in float16 and bfloat16 too, except for the
        sinks of one case, which is left out there.
    cases: the names of some cases (`reference` has all); None: all.
    gradients: whether the gradients of q, k, v and the sinks are checked where the output is right.
    tolerance: how far a number may be off, relative to the reference's largest; None: by dtype.
    name: a title; None: the function's own.

    Raises ValueError for a function that cannot be called, and for unknown cases and dtypes. What
    the function itself raises becomes an outcome.
    """
    require(callable(function), f"function must be callable, got {short(function)}")
    require(dtype in TOLERANCES, f"dtype must be one of {[*TOLERANCES]}, got {dtype}")
    several: Any = reference() if cases is None else cases
    are_names = isinstance(several, Iterable) and not isinstance(several, str)
    require(are_names, f"cases must be several names, got {short(cases)}")
    names = [*several]
    for key in names:
        choice("each of cases", key, reference())
    if tolerance is not None:
        real("tolerance", tolerance, "positive and finite", more=True)
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise Refused(f"device {device} is not there: {first_line(error)}") from error
    kernel = Kernel(function, dtype, target)
    limit = tolerance or TOLERANCES[dtype]
    outcomes: list[Outcome] = []
    for key in names:
        case = reference()[key]
        if case.fine and dtype.itemsize < 4:
            continue
        outcomes += Comparison(key, case, kernel, limit).outcomes(gradients)
    checked = Checked(name or getattr(function, "__name__", "kernel"), outcomes)
    checked.faults = _explained(outcomes)
    return checked


class Kernel:
    """The user's function, called with the arguments that it takes."""

    def __init__(
        self, function: Callable[..., Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.function = function
        self.dtype = dtype
        self.device = device
        self.unexplained = 0  # how many failures no single known fault explained
        self.names: set[str] = set()
        try:
            # By its call, a module takes every argument; by its `forward`, some.
            called = getattr(function, "forward", function)
            parameters = inspect.signature(called).parameters.values()
            self.names = {parameter.name for parameter in parameters}
            # By **kwargs a function takes every argument, and may ignore it.
            self.takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        except (TypeError, ValueError):  # a built-in function may have no signature
            self.takes_all = True

    def moved(self, call: Call) -> Call:
        """A copy of the call, in the kernel's dtype."""
        parts: dict[str, Any] = {}
        for name, x in call._asdict().items():
            if isinstance(x, Tensor):
                dtype = self.dtype if name in DIFFERENTIABLE else x.dtype
                parts[name] = x.to(self.device, dtype, copy=True)
        return call._replace(**parts)

    def values(self, call: Call, return_lse: bool = True) -> tuple[Tensor, Tensor]:
        """The output in float64 and, if it is asked for, the log-sum-exp."""
        out, lse = self.result(self.moved(call), return_lse)
        return out.detach().cpu().double(), lse.detach().cpu().double()

    def result(self, call: Call, return_lse: bool = False) -> tuple[Tensor, Tensor]:
        """What the function returns, checked. Raises Stopped."""
        given: dict[str, Any] = {}
        fields = call._asdict() | {"return_lse": return_lse or None}
        usual = {"scale": call.q.shape[-1] ** -0.5, "causal": True, "first_keys": 0}
        for name in OPTIONS:
            value = fields[name]
            needed = value is not None and not (name in usual and value == usual[name])
            if name in self.names or (needed and self.takes_all):
                given[name] = False if value is None and name == "return_lse" else value
            elif needed:
                raise Unsupported(f"it takes no {name}")
        tensors = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor)}
        before = {name: x.detach().clone() for name, x in tensors.items()}
        try:
            result = self.function(call.q, call.k, call.v, **given)
        except NotImplementedError as error:
            raise Unsupported(first_line(error)) from error
        except Exception as error:
            raise Stopped(f"it raises {first_line(error)}") from error
        for name, x in tensors.items():
            if not torch.equal(x, before[name]):
                raise Stopped(f"it overwrites its argument {name}")
        if not return_lse:
            return self._checked("the output", result, call), torch.empty(0)
        if not isinstance(result, tuple | list) or len(result) != 2:
            if "return_lse" not in self.names:
                raise Unsupported("it ignores return_lse")
            raise Stopped("with return_lse it returns no pair of output and log-sum-exp")
        out, lse = result
        return self._checked("the output", out, call), self._checked("the log-sum-exp", lse, call)

    def _checked(self, what: str, x: Any, call: Call) -> Tensor:
        """A result as a tensor. Raises Stopped for a wrong type, shape or dtype, and for nan."""
        if isinstance(x, tuple | list):
            raise Stopped(f"{what} is a {type(x).__name__} where one tensor is due")
        try:
            tensor = as_tensor(what, x)
        except Refused as error:
            raise Stopped(str(error)) from error
        B, H, T, _ = call.q.shape
        last = (call.v.shape[3],) if what == "the output" else ()
        shape = (B, H, T, *last)
        got = tuple(tensor.shape)
        if got != shape:
            swapped = ": heads and positions are swapped" if got == (B, T, H, *last) else ""
            raise Stopped(f"{what} has the shape {got} where {shape} is due{swapped}")
        # A log-sum-exp may be finer than the output.
        finer = what != "the output" and tensor.dtype in (torch.float32, torch.float64)
        if tensor.dtype != self.dtype and not (finer and tensor.itemsize >= self.dtype.itemsize):
            raise Stopped(f"{what} is of {tensor.dtype} where {self.dtype} is due")
        if tensor.is_meta or tensor.layout != torch.strided:
            raise Stopped(f"{what} is a {tensor.device.type} tensor of the layout {tensor.layout}")
        if not tensor.isfinite().all():
            raise Stopped(f"{what} has nan or infinite numbers")
        return tensor


def played(case: Case, attention: Attention) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a case. Where it has a cut, two halves of the keys are merged.

    Every query sees all of the first half. The sink is given to the second half alone, so that it
    is counted once.
    """
    call, cut = case.call, case.cut
    if cut is None:
        return attention(call)
    k, v = call.k, call.v
    out, lse = attention(call._replace(k=k[:, :, :cut], v=v[:, :, :cut], causal=False, sinks=None))
    out_2, lse_2 = attention(call._replace(k=k[:, :, cut:], v=v[:, :, cut:]))
    share = torch.sigmoid(lse - lse_2)[..., None]  # of the first half
    return share * out + (1 - share) * out_2, torch.logaddexp(lse, lse_2)


@cache
def faulty_results(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Output and log-sum-exp of a case by each known fault."""
    case = reference()[name]
    return {fault: played(case, partial(wrong, oracle)) for fault, wrong in FAULTS.items()}


@dataclass
class Comparison:
    """Compares what a kernel makes of a case with the reference, and with each known fault."""

    name: str
    case: Case
    kernel: Kernel
    limit: float

    def outcomes(self, gradients: bool) -> list[Outcome]:
        """The outcomes of the case. gradients: whether to check those too."""
        if self.case.cut is not None:
            return [self.part("merged halves", self.kernel.values)]
        output = self.part("output", partial(self.kernel.values, return_lse=False))
        if output.verdict in ("broken", "not supported"):
            return [output]
        lse = self.part("log-sum-exp", self.kernel.values)
        more = self.gradients() if gradients and output.verdict == "right" else []
        return [output, lse, *more]

    def part(self, part: str, attention: Attention) -> Outcome:
        """The outcome of one part: "output", "log-sum-exp" or "merged halves"."""
        try:
            results = played(self.case, attention)
        except Stopped as reason:
            return Outcome(self.name, part, reason.verdict, says=str(reason))
        index = int(part == "log-sum-exp")  # in the pair of output and log-sum-exp
        got = results[index]
        want = (self.case.out, self.case.lse)[index]
        faulty = ((fault, pair[index]) for fault, pair in faulty_results(self.name).items())
        outcome = self.compared(part, got, want, faulty)
        if outcome.verdict == "wrong" and not outcome.fits and self.kernel.unexplained < PAIRS:
            self.kernel.unexplained += 1
            outcome.fits = self._pair(index, got, want)
        return outcome

    def compared(
        self, part: str, got: Tensor, want: Tensor, faulty: Iterable[tuple[str, Tensor]]
    ) -> Outcome:
        """The outcome of a part, and which known faults give its numbers if it is wrong."""
        error = distance(got, want)
        if error <= self.limit:
            return Outcome(self.name, part, "right", error)
        fits = dict.fromkeys(name for name, x in faulty if self._fits(got, want, x))
        says = f"no known fault explains what is wrong in the {part}"
        return Outcome(self.name, part, "wrong", error, says, tuple(fits))

    def _fits(self, got: Tensor, want: Tensor, faulty: Tensor) -> bool:
        """Whether a fault gives what the kernel gives, and that is not what is right."""
        if not faulty.isfinite().all():
            return False
        apart = distance(faulty, want)
        near = min(2 * self.limit, apart / 3)
        return apart > self.limit and distance(got, faulty) <= near

    def _pair(self, index: int, got: Tensor, want: Tensor) -> tuple[str, ...]:
        """Two faults at once that give what the kernel gives, if there are such."""
        results = faulty_results(self.name).items()
        changing = [fault for fault, x in results if distance(x[index], want) > self.limit]
        for first, second in permutations(changing, 2):
            both = partial(FAULTS[first], partial(FAULTS[second], oracle))
            if self._fits(got, want, played(self.case, both)[index]):
                return (f"{first}, and {second}",)
        return ()

    def gradients(self) -> list[Outcome]:
        """The outcomes of the gradients of q, k, v and the sinks."""

        def attention(call: Call) -> tuple[Tensor, Tensor]:
            out, lse = self.kernel.result(call)
            if not out.requires_grad:
                raise Unsupported("its output has no gradient")
            return out, lse

        case = self.case
        call = self.kernel.moved(case.call)
        try:
            gradients = faults.gradients(attention, call, case.cotangent)
        except Stopped as reason:
            says = "where gradients are needed " if reason.verdict == "broken" else ""
            return [Outcome(self.name, "gradients", reason.verdict, says=f"{says}{reason}")]
        except NotImplementedError as error:
            return [Outcome(self.name, "gradients", "not supported", says=first_line(error))]
        except Exception as error:
            says = f"the backward pass raises {first_line(error)}"
            return [Outcome(self.name, "gradients", "broken", says=says)]
        outcomes = []
        for x, gradient in gradients.items():
            part = f"gradient of {x}"
            got = gradient.cpu().double()
            outcome = Outcome(self.name, part, "broken", says=f"the {part} is nan or infinite")
            if got.isfinite().all():
                outcome = self.compared(part, got, case.gradients[x], faulty_gradients(case, x))
            outcomes.append(outcome)
        return outcomes


def faulty_gradients(case: Case, x: str) -> Iterator[tuple[str, Tensor]]:
    """Known wrong gradients of an input, by what is wrong with them."""
    call, cotangent = case.call, case.cotangent
    if x == "sinks":
        terms = faults.of_each_query(call, cotangent)
        for fault, change in faults.SINK_GRADIENTS.items():
            yield f"the gradient of the sink {fault}", change(terms, call)
    else:
        yield f"the gradient of {x} is missing", case.gradients[x] * 0
    if x in ("k", "v"):
        for which, heads in (("first", slice(1)), ("last", slice(-1, None))):
            fault = f"the gradient of {x} is that of the {which} query head of a group alone"
            yield fault, faults.by_recomputed_weights(oracle, call, cotangent, heads)[x]
    for fault, wrong in FAULTS.items():
        attention = partial(wrong, oracle)
        backward = f"in the backward pass {fault}"
        yield backward, faults.gradients(attention, call, cotangent)[x]
        if x in ("q", "k", "v"):
            yield backward, faults.by_recomputed_weights(attention, call, cotangent)[x]


def distance(x: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the reference's largest number."""
    apart = (x - want).abs().max() / want.abs().max().clamp(min=1e-30)
    return float(apart.detach())


def _explained(outcomes: Sequence[Outcome]) -> list[str]:
    """What is wrong, in as few known faults as explain all that is wrong; the commonest first."""
    found = []
    left = [outcome for outcome in outcomes if outcome.verdict in ("wrong", "broken")]
    while left:
        counts = Counter(fault for outcome in left for fault in outcome.fits or (outcome.says,))
        fault, _ = counts.most_common(1)[0]
        found.append(fault)
        left = [outcome for outcome in left if fault not in (outcome.fits or (outcome.says,))]
    return found
