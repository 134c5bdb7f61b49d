"""A model among two processes: all take part where it is cut, nothing hangs, no number is of half a model."""

import pytest
import torch
from helpers import refuses, torchrun
from small_models import build, tokens

from sinkutils import measure
from sinkutils.measuring import refusals

COMMON = """
import logging, os, sys, types
import torch, transformers as tf
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
import sinkutils as su
from helpers import refuses
from small_models import build, tokens

torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank = distributed.get_rank()
mesh = distributed.init_device_mesh("cpu", (2,))
logging.basicConfig(level=logging.WARNING)
ids = tokens(4, 12)


def trainer(model, callback, steps=3):
    "The loop of a trainer, as far as a callback sees it; returns what it logged."
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = types.SimpleNamespace(global_step=0, is_world_process_zero=rank == 0)
    control = types.SimpleNamespace(should_log=False, should_training_stop=False)
    rows = []
    su.measuring.callback.trainer_log = lambda: rows.append
    callback.on_train_begin(None, state, control, model=model)
    for step in range(1, steps + 1):
        loss = model(input_ids=ids + rank, labels=ids + rank).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.global_step = step
        control.should_training_stop = step == steps
        callback.on_step_end(None, state, control, model=model)
    assert model.training
    return rows


def shard(model):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def not_measured(model, reason):
    "The callback and `measure` refuse a model for this reason; returns what the callback says."
    callback = su.SinkCallback(ids, every=1)
    state = types.SimpleNamespace(global_step=0, is_world_process_zero=rank == 0)
    callback.on_train_begin(None, state, types.SimpleNamespace(should_log=False), model=model)
    assert reason in callback.why_not
    refuses(reason, su.measure, model, ids)
    return callback.why_not


import sinkutils.measuring.callback
right = su.measure(build("llama"), ids).summary()["sink_1"]
"""
WAYS = """
def sharded():
    model = build("llama").train()
    shard(model)
    rows = trainer(model, su.SinkCallback(tokens(4, 12 + rank), every=2))  # other ids in each process
    assert len(rows) == (3 if rank == 0 else 0), rows
    if rank == 0:
        assert rows[0]["sink/sink_1"] == right
    whole = su.measure(model, ids)
    assert whole.alpha.shape == (4, 1, 2, 4) and su.measure(model, ids).digest == whole.digest


def a_shard_that_cannot_be_measured():
    model = build("llama").train()
    model.set_attn_implementation("sdpa")
    model.model.layers[1].self_attn.is_causal = False
    shard(model)
    assert trainer(model, su.SinkCallback(ids, every=1)) == []


def a_shard_that_breaks_in_the_middle_of_a_pass():
    model = build("llama").train()

    def stop(module, *_):
        if not module.training:
            raise ValueError("in the middle")

    model.model.layers[0].mlp.register_forward_hook(stop)
    shard(model)
    assert trainer(model, su.SinkCallback(ids, every=1)) == []


def replicas():
    model = build("llama").train()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    rows = trainer(model, su.SinkCallback(ids, every=2))
    assert len(rows) == (3 if rank == 0 else 0)


def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    model = build("llama")
    for layer in model.model.layers:
        plan = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel())
        parallelize_module(layer, mesh, plan | {"self_attn.o_proj": RowwiseParallel()})
    not_measured(model, "tensor parallelism")


def a_plan_of_transformers():
    folder = sys.argv[1]
    if rank == 0:
        build("llama").save_pretrained(folder)
    distributed.barrier()
    model = tf.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=None)
    refuses("is cut over processes by tensor parallelism", su.measure, model, ids)


def the_older_FSDP():
    model = FullyShardedDataParallel(build("llama"), use_orig_params=True, device_id=torch.device("cpu"))
    assert "use fully_shard" in not_measured(model, "FullyShardedDataParallel")


for way in (
    sharded,
    a_shard_that_cannot_be_measured,
    a_shard_that_breaks_in_the_middle_of_a_pass,
    replicas,
    tensor_parallel,
    a_plan_of_transformers,
    the_older_FSDP,
):
    way()
    distributed.barrier()
    print(rank, way.__name__, 'done', flush=True)
"""


@pytest.mark.slow
def test_two_processes_measure_what_can_be_measured_and_never_hang(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(COMMON + WAYS)
    done = torchrun(str(script), str(tmp_path / "model"))
    output = done.stdout + done.stderr
    assert done.returncode == 0 and output.count("done") == 14, output[-3000:]
    for line in (
        "was not measured at step 0: FSDPLlamaForCausalLM sees later tokens by its attention",
        "was not measured at step 0: in the middle",
        "the model is cut by tensor parallelism",
        "the model is cut by FullyShardedDataParallel",
    ):
        assert output.count(line) == 1, line
    assert output.count("WARNING:sinkutils") == 4


@pytest.mark.parametrize("way", ["marked", "empty"])
def test_a_model_of_which_deepspeed_has_a_part_is_refused_by_name(way):
    model = build("llama")
    *_, parameter = model.parameters()
    if way == "marked":
        parameter.ds_id = 0
    else:
        parameter.data = torch.empty(0)
    refuses("cut over processes by DeepSpeed's ZeRO-3", measure, model, tokens())


def test_fewer_heads_than_the_configuration_has_are_refused_among_processes(monkeypatch):
    model = build("llama")
    model.config.num_attention_heads = 8
    measure(model, tokens())  # alone it is a pruned model
    monkeypatch.setattr(refusals.distributed, "is_initialized", lambda: True)
    refuses("computes 4 of its 8 heads in this process", measure, model, tokens())
