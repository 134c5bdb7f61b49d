"""What came after the paper: each variant against its formula, the metric against dense maps, and runs that train."""

import csv
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sinkutils.measuring.destinations import destinations
from sinkutils.measuring.gradients import gradient_norms
from sinkutils.measuring.measure import measure
from sinkutils.measuring.report import Report
from sinkutils.model import fast
from sinkutils.model.attention import AttentionSpec, attend
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.paths import PAPER
from sinkutils.study.config import TrainConfig
from sinkutils.study.experiments import experiments
from sinkutils.study.grid import config
from sinkutils.study.record import record_folder, write_record
from sinkutils.study.store import Runs
from sinkutils.training.checkpoints import load_checkpoint, save_checkpoint
from sinkutils.training.group import Group
from sinkutils.training.optimizers import make_optimizer
from sinkutils.training.run import Run, next_token_loss
from sinkutils.training.trainer import train

ROWS = [e.name for e in experiments("8")]
SMALL = {"vocab_size": 60, "context_length": 40, "num_layers": 2, "num_heads": 2, "hidden_size": 16,
         "intermediate_size": 24}  # fmt: skip
SPECS = {
    "sink_logit": AttentionSpec(sink_logit="learned"),
    "softmax_plus_one": AttentionSpec(sink_logit="zero"),
    "sink_logit_window": AttentionSpec(sink_logit="learned", window=5),
    "softpick": AttentionSpec(similarity="softpick"),
    "softpick_k_bias": AttentionSpec(similarity="softpick", bias="k"),
    "sigmoid_log_bias": AttentionSpec(similarity="sigmoid", normalizer="none", logit_bias=-math.log(40)),
    "relu_length": AttentionSpec(similarity="relu", normalizer="length"),
    "relu_length_window": AttentionSpec(similarity="relu", normalizer="length", window=4),
    "relu_length_prefix": AttentionSpec(similarity="relu", normalizer="length", prefix=50),
    "differential": AttentionSpec(differential=True),
    "differential_prefix": AttentionSpec(differential=True, prefix=3),
}


def draw(spec: AttentionSpec, length: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v of (2, 2, T, 6) and what the spec needs, all with gradients."""
    generator = torch.Generator().manual_seed(length)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    inputs, extras = [leaf(2, 2, length, 6) for _ in range(3)], {}
    if spec.has_key_bias:
        extras["key_bias"] = leaf(2, 6)
    if spec.sink_logit == "learned":
        extras["sink_logit"] = leaf(2)
    if spec.differential:
        extras["mix"] = leaf()
    return inputs, extras


def row(spec: AttentionSpec, s: list[float], extras: dict[str, Any], head: int) -> list[float]:
    """The weights of one query from the logits of the keys that it sees, as the sources print them."""
    if spec.sink_logit != "none":
        z = float(extras["sink_logit"][head]) if extras else 0.0
        total = math.exp(z) + sum(map(math.exp, s))
        return [math.exp(x) / total for x in (z, *s)]
    if spec.similarity == "softpick":
        total = sum(abs(math.exp(x) - 1) for x in s)
        return [max(math.exp(x) - 1, 0) / total for x in s]
    if spec.similarity == "sigmoid":
        return [1 / (1 + math.exp(-(x + spec.logit_bias))) for x in s]
    return [max(x, 0) / len(s) for x in s]


@pytest.mark.parametrize("name", ["sink_logit", "softmax_plus_one", "softpick", "sigmoid_log_bias", "relu_length"])
def test_the_reference_is_the_formula(name):
    spec = SPECS[name]
    (q, k, v), extras = draw(spec, 5)
    out, weights = attend(q, k, v, spec, **extras)
    for head in range(2):
        for i in range(5):
            s = [float(q[0, head, i] @ k[0, head, j]) / math.sqrt(6) for j in range(i + 1)]
            expected = row(spec, s, extras, head)
            got = weights[0, head, i, : len(expected)].tolist()
            assert got == pytest.approx(expected, abs=1e-12)
            values = sum(a * v[0, head, j] for j, a in enumerate(expected[len(expected) - i - 1 :]))
            torch.testing.assert_close(out[0, head, i], values)


def test_differential_attention_is_the_difference_of_the_softmax_maps_of_half_the_dimensions():
    spec = SPECS["differential"]
    (q, k, v), extras = draw(spec, 7)
    out, weights = attend(q, k, v, spec, **extras)
    first, second = (attend(q[..., n::2], k[..., n::2], v[..., n::2])[1] for n in (0, 1))
    torch.testing.assert_close(weights, first - extras["mix"] * second)
    torch.testing.assert_close(out, weights @ v)
    torch.testing.assert_close(weights.sum(-1), (1 - extras["mix"]).expand(2, 2, 7))


@pytest.mark.parametrize("form", ["short", "long"])
@pytest.mark.parametrize("name", SPECS)
def test_the_fast_form_equals_the_reference_in_values_and_gradients(name, form, monkeypatch):
    if form == "long":
        for constant, value in (("DENSE_LENGTH", {"cpu": 0}), ("BLOCK", 8), ("ROWS", 8)):
            monkeypatch.setattr(fast, constant, value)
    spec = SPECS[name]
    for length, dtype, atol in ((1, torch.float64, 1e-10), (29, torch.float64, 1e-10), (29, torch.float32, 5e-5)):
        inputs, extras = draw(spec, length, dtype)
        g = torch.linspace(0, -1, 30, dtype=dtype)[None] if spec.prefix == 1 else None
        for given in (extras, {**extras, "distance_bias": g}):
            leaves = inputs + [x for x in extras.values()]
            out = fast.attend(*inputs, spec, **given)
            expected = attend(*inputs, spec, **given)[0]
            torch.testing.assert_close(out, expected, rtol=atol, atol=atol)
            pair = [torch.autograd.grad(x.square().sum(), leaves, allow_unused=True) for x in (out, expected)]
            for got, want in zip(*pair, strict=True):
                got, want = (torch.zeros(1) if x is None else x for x in (got, want))
                torch.testing.assert_close(got.double().sum(), want.double().sum(), rtol=100 * atol, atol=100 * atol)
                assert got.shape != want.shape or torch.allclose(got, want, rtol=100 * atol, atol=100 * atol)


@pytest.mark.parametrize("name", SPECS)
def test_bfloat16_stays_near_float32(name):
    spec = SPECS[name]
    (q, k, v), extras = draw(spec, 33, torch.float32)
    half = [x.detach().bfloat16() for x in (q, k, v)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = fast.attend(*half, spec, **extras)
    expected = attend(*(x.float() for x in half), spec, **extras)[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05 * float(expected.detach().abs().max()))


def test_softpick_of_large_logits_neither_overflows_nor_differs():
    (q, k, v), _ = draw(SPECS["softpick"], 20)
    with torch.no_grad():
        q *= 1000
    for out in (fast.attend(q, k, v, SPECS["softpick"]), attend(q, k, v, SPECS["softpick"])[0]):
        assert out.isfinite().all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def model_of(**fields: Any) -> TransformerLM:
    model = TransformerLM(LMConfig(**{**SMALL, **fields}), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # attention far from uniform
    return model


class Maps:
    """Keeps dense weights, whose rows are made to sum to one where they do not (Section 7.4), but softpick's."""

    def __init__(self) -> None:
        self.maps: list[Tensor] = []

    def embedding(self, hidden: Tensor) -> None: ...

    def block(self, layer: int, hidden: Tensor, before_norm: Tensor) -> None: ...

    def attention(self, layer, q, k, v, spec, extras) -> None:
        weights = attend(q, k, v, spec, **extras)[1].abs()
        total = 1 if spec.similarity == "softpick" else weights.sum(-1, keepdim=True).clamp(min=1e-30)
        self.maps.append(weights / total)


@pytest.mark.parametrize("name", SPECS)
def test_the_metric_is_that_of_the_dense_maps(name):
    spec = SPECS[name]
    if spec.prefix > 30:
        spec = dataclasses.replace(spec, prefix=7)
    model, ids, dense = model_of(attention=spec), torch.randint(60, (3, 31)), Maps()
    with torch.no_grad():
        model(ids, dense)
    report = measure(model, ids, (1, 3), mass=True, heads=((1, 0),))
    star = int(spec.has_star)
    for layer, weights in enumerate(dense.maps):
        for index, k in enumerate((1, 3)):
            expected = weights[:, :, k - 1 :, k - 1 + star].mean(-1)
            torch.testing.assert_close(report.alpha[:, index, layer], expected, rtol=1e-4, atol=2e-5)
        if star:
            torch.testing.assert_close(report.star[:, layer], weights[..., 0].mean(-1), rtol=1e-4, atol=2e-5)
    assert (report.star is not None) == bool(star)
    torch.testing.assert_close(report.kept[1, 0].map, dense.maps[1][:, 0, :, star:], rtol=1e-4, atol=2e-5)


VARIANTS = {
    "gate_head": {"gate": "head"},
    "gate_element": {"gate": "element", "head_merge": "add"},
    "qk_norm": {"qk_norm": True},
    "value_scale": {"value_scale": True},
    "dyt": {"normalization": "dyt"},
    "gated_norm": {"normalization": "gated"},
    "sandwich": {"norm": "sandwich"},
    "differential": {"attention": AttentionSpec(differential=True)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_is_causal_and_its_fast_form_is_the_dense_one(name):
    model, ids = model_of(**VARIANTS[name]).double(), torch.randint(60, (2, 21))
    torch.testing.assert_close(model(ids), model(ids, dense=True))
    changed = ids.clone()
    changed[:, 15:] = (ids[:, 15:] + 1) % 60
    torch.testing.assert_close(model(ids)[:, :15], model(changed)[:, :15])
    assert not torch.allclose(model(ids)[:, 15:], model(changed)[:, 15:])


def test_a_gate_multiplies_the_output_of_a_head_and_changes_no_attention():
    gated, plain, ids = model_of(gate="head"), model_of(), torch.randint(60, (2, 21))
    block, other = gated.blocks[0].attention, plain.blocks[0].attention
    x = torch.randn(2, 21, 16)
    with torch.no_grad():
        block.gate.weight.zero_()
        torch.testing.assert_close(2 * block(x, {}), other(x, {}))  # sigmoid(0) is a half
        block.gate.weight[0] = 1e4 * x[0, 0]
        block.out.weight.copy_(torch.eye(16))
        other.out.weight.copy_(torch.eye(16))
        torch.testing.assert_close(block(x, {})[0, 0, :8], other(x, {})[0, 0, :8])
        torch.testing.assert_close(2 * block(x, {})[0, 0, 8:], other(x, {})[0, 0, 8:])
    torch.testing.assert_close(measure(gated, ids).alpha[:, :, 0], measure(plain, ids).alpha[:, :, 0])


def test_v_scale_shrinks_small_values_and_their_gradients_and_changes_no_attention():
    scaled, plain, ids = model_of(value_scale=True), model_of(), torch.randint(60, (2, 21))
    block = scaled.blocks[0].attention
    x = torch.randn(1, 5, 16, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        block.double().value_scale[0] = 0.7
    v = block.qkv(x).chunk(3, dim=-1)[2].detach().view(1, 5, 2, 8).transpose(1, 2)
    seen: list[Tensor] = []
    watcher = Maps()
    watcher.attention = lambda layer, q, k, v, spec, extras: seen.append(v)
    block(x, {}, observer=watcher)
    r, c = v.square().sum(-1, keepdim=True), 0.4 * 8 * torch.tensor([math.exp(0.7), 1.0]).view(2, 1, 1)
    torch.testing.assert_close(seen[0], v * r / (r + c))
    # the formula's Jacobian: r / (r + c) across v, (r^2 + 3 c r) / (r + c)^2 along it
    leaf = v.clone().requires_grad_()
    squared = leaf.square().sum(-1, keepdim=True)
    (along,) = torch.autograd.grad((leaf * squared / (squared + c) * v / r.sqrt()).sum(), leaf)
    torch.testing.assert_close((along * v / r.sqrt()).sum(-1, keepdim=True), (r**2 + 3 * c * r) / (r + c) ** 2)
    start = TransformerLM(LMConfig(**SMALL, value_scale=True), 0)
    assert start.blocks[0].attention.value_scale.tolist() == [0, 0]
    alphas = [measure(m, ids).alpha[:, :, 0] for m in (scaled.float(), plain)]
    torch.testing.assert_close(*alphas)


def test_the_gradient_by_position_is_that_of_autograd_over_the_summed_texts():
    model, ids = model_of(sink_token=True).double(), torch.randint(60, (3, 9))
    found = gradient_norms(model, ids)
    assert all(p.grad is None for p in model.parameters())
    read: list[Tensor] = []
    handle = model.blocks[1].attention.register_forward_hook(
        lambda module, args, out: read.append(args[0]) or args[0].retain_grad()
    )
    torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    handle.remove()
    expected = read[0].grad.sum(0)[1:].norm(dim=-1)  # without x*
    assert found["input"][1] == pytest.approx(expected.tolist(), rel=1e-3)
    assert [len(rows) for rows in found.values()] == [2, 2] and len(found["value"][0]) == 8
    # v_j's gradient is the attention-weighted sum of those of the outputs that read it: none is read by no one
    assert min(map(min, found["value"])) > 0
    with torch.no_grad():
        model.embed.weight[ids[0, 0]] = torch.nan
    assert gradient_norms(model, ids) == {}


def test_destinations_are_the_shares_of_the_dense_maps_by_kind_of_key():
    model, dense = model_of(attention=AttentionSpec(bias="k")), Maps()
    ids = torch.randint(5, 60, (3, 12))
    ids[:, 4] = 2  # a line break
    with torch.no_grad():
        model(ids, dense)
    found = destinations(model, ids, torch.tensor([2]))
    rows = dense.maps[1][:, 0, 2:, :]  # of layer 2, head 1, queries 3..T; column 0 is k*
    expected = {"star": rows[..., 0], "first": rows[..., 1]}
    for kind, at in expected.items():
        assert found[kind][1][0] == pytest.approx(float(at.mean()), abs=2e-4)
    later = range(6, 12)  # the line break at 5 is neither the query's own key nor the one before
    broken = sum(float(rows[:, i - 2, 5].mean()) for i in later) / rows.shape[1]
    assert found["line_break"][1][0] == pytest.approx(broken, abs=2e-4)
    assert sum(found[kind][1][0] for kind in found) == pytest.approx(1, abs=1e-3)
    assert destinations(model, ids[:, :2], torch.tensor([2])) == {}


def test_peaks_are_the_largest_element_over_the_median_one():
    model, ids, seen = model_of(norm="post"), torch.randint(60, (3, 11)), Maps()
    hidden: list[Tensor] = []
    seen.block = lambda layer, h, before: hidden.append(h)
    seen.attention = lambda *args: None
    with torch.no_grad():
        model(ids, seen)
    sizes = hidden[1].abs()
    expected = (sizes.amax(-1) / sizes.flatten(1).median(1).values[:, None]).mean(0)
    report = measure(model, ids)
    torch.testing.assert_close(report.hidden_peaks[1], expected)
    again = Report.from_dict(report.to_dict())
    torch.testing.assert_close(again.hidden_peaks, report.hidden_peaks, rtol=1e-4, atol=1e-5)
    assert measure(model, ids, norms=False).hidden_peaks is None


def test_qk_norm_bounds_the_logits_and_sandwich_norm_the_sublayers():
    seen: list[Tensor] = []
    maps = Maps()
    maps.attention = lambda layer, q, k, v, spec, extras: seen.extend((q, k))
    model = TransformerLM(LMConfig(**SMALL, qk_norm=True), 0)
    model(torch.randint(60, (2, 21)), maps)
    for x in seen:
        torch.testing.assert_close(x.norm(dim=-1), torch.full(x.shape[:-1], 8**0.5), rtol=1e-2, atol=0)
    block = TransformerLM(LMConfig(**SMALL, norm="sandwich"), 0).blocks[0]
    h = 1e-3 * torch.randn(2, 5, 16)
    step = block.after_1(block.attention(block.norm_1(h), {}))
    torch.testing.assert_close(step.square().mean(-1), torch.ones(2, 5), rtol=2e-2, atol=0)


def test_a_gated_norm_is_rmsnorm_times_a_gate_of_its_own_output():
    norm = TransformerLM(LMConfig(**SMALL, normalization="gated"), 0).blocks[1].norm_2
    x = torch.randn(2, 5, 16)
    y = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    a = y @ norm.down.weight.T
    gate = 1 / (1 + torch.exp(-(a / (1 + torch.exp(-a))) @ norm.up.weight.T))
    torch.testing.assert_close(norm(x), y * gate)
    assert norm.down.weight.shape == (16, 16) and norm.up.weight.shape == (16, 16)


def test_what_makes_no_sense_is_refused():
    for message, fields in {
        "logit_bias moves a sigmoid": {"logit_bias": 1.0},
        "sink_logit must be one of none, zero, learned": {"sink_logit": True},
        "sink_logit joins a softmax": {"sink_logit": "zero", "bias": "k"},
        "softpick has its own Z": {"similarity": "softpick", "normalizer": "none"},
        "differential attention is of two softmax maps": {"differential": True, "similarity": "sigmoid"},
    }.items():
        with pytest.raises(ValueError, match=message):
            AttentionSpec(**fields)
    with pytest.raises(ValueError, match="gate must be one of none, head, element"):
        LMConfig(gate="both")
    with pytest.raises(ValueError, match="multiple of 2, with rotary positions of 4"):
        LMConfig(hidden_size=24, num_heads=4, attention=AttentionSpec(differential=True))
    with pytest.raises(ValueError, match="optimizer must be one of adamw, sgd, muon"):
        TrainConfig(optimizer="adam")
    (q, k, v), _ = draw(AttentionSpec(), 4)
    with pytest.raises(ValueError, match="needs the argument sink_logit"):
        fast.attend(q, k, v, SPECS["sink_logit"])
    with pytest.raises(ValueError, match="has no place for the argument mix"):
        attend(q, k, v, mix=torch.ones(()))


def test_optimizers_take_every_parameter_once_and_muon_only_matrices_of_the_blocks():
    model = model_of(attention=AttentionSpec(bias="kv"), gate="head")
    assert type(make_optimizer(model, TrainConfig())) is torch.optim.AdamW
    assert type(make_optimizer(model, TrainConfig(optimizer="sgd"))) is torch.optim.SGD
    both = make_optimizer(model, TrainConfig(optimizer="muon"))
    parts = [[id(p) for group in part.param_groups for p in group["params"]] for part in both.parts]
    assert sorted(parts[0] + parts[1]) == sorted(map(id, model.parameters()))
    names = {name for name, p in model.named_parameters() if id(p) in parts[0]}
    assert names == {f"blocks.{i}.{end}.weight" for i in (0, 1)
                     for end in ("attention.qkv", "attention.out", "attention.gate", "ffn.up", "ffn.down")}  # fmt: skip
    with pytest.raises(ValueError, match=r"muon.*one process"):
        make_optimizer(model, TrainConfig(optimizer="muon"), Group(size=2))


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(optimizer, tiny, corpus, tmp_path):
    settings = dataclasses.replace(tiny, train=dataclasses.replace(tiny.train, optimizer=optimizer))
    run = Run(settings, corpus, torch.device("cpu"))
    for _ in range(3):
        run.advance(next_token_loss)
    save_checkpoint(run, tmp_path / "checkpoint.safetensors")
    other = Run(settings, corpus, torch.device("cpu"))
    load_checkpoint(other, tmp_path / "checkpoint.safetensors")
    for one in (run, other):
        one.advance(next_token_loss)
    for (name, a), b in zip(run.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", ROWS)
def test_every_row_trains(name, corpus, tmp_path):
    run = config(name, "smoke")
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, steps=25, warmup_steps=5, eval_every=25,
                                                              eval_sequences=2, valid_chunks=2))  # fmt: skip
    with pytest.warns(UserWarning, match="300 tokens in place of"):
        record = train(run, tmp_path, device="cpu", corpus=corpus, progress=False, compile=False)
    assert record.status == "done"
    curve, final = record.metrics["curve"], record.metrics["final"]
    assert {"hidden_peaks", "value_norms"} <= set(final["report"]) and set(final["gradients"]) == {"input", "value"}
    assert curve[-1]["valid_loss"] < curve[0]["valid_loss"] - 0.05
    assert ("sink_star" in curve[-1]) == (name in ("sink_logit", "softmax_plus_one"))


def test_rows_come_last_in_a_sweep_with_three_seeds_each(tmp_path):
    plan = [(run.experiment, run.seed) for run in Runs(tmp_path).missing("laptop")]
    assert plan[-3 * len(ROWS) :] == [(name, seed) for name in ROWS for seed in (0, 1, 2)]
    assert not {name for name, _ in plan[: -3 * len(ROWS)]} & set(ROWS)
    assert [run.experiment for run in Runs(tmp_path).missing("laptop", (0,))][-len(ROWS) :] == ROWS
    assert config("sigmoid_log_bias", "laptop").model.attention.logit_bias == -math.log(64)
    for scale in ("laptop", "gpu"):
        runs = [config(name, scale) for name in ("base", "context_32", "context_128")]
        assert len({run.train.batch_size * run.model.context_length for run in runs}) == 1


def test_each_row_has_its_source_and_what_was_checked():
    with open(PAPER / "after_paper.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [one["name"] for one in rows] == ROWS
    assert all(one["title"] and one["says"] and one["checked"] for one in rows)
    assert all(one["source"] == "" or one["source"][4] == "." for one in rows)


def test_a_record_from_before_these_fields_is_still_of_its_config(tmp_path):
    run = config("k_bias", "smoke")
    folder = record_folder("smoke", "k_bias", 0, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        from sinkutils.study import record

        now = record.config_dict

        def before(settings: Any) -> dict[str, Any]:
            values = now(settings)
            for name in ("gate", "qk_norm", "value_scale", "normalization"):
                del values["model"][name]
            for name in ("logit_bias", "sink_logit", "differential"):
                del values["model"]["attention"][name]
            del values["train"]["optimizer"]
            return values

        patch.setattr(record, "config_dict", before)
        write_record(folder, run, {"status": "done", "reason": None, "curve": [], "final": {}}, {})
    assert Runs(tmp_path).get(run) is not None
    other = dataclasses.replace(run, model=dataclasses.replace(run.model, gate="head"))
    assert Runs(tmp_path).get(other) is None
