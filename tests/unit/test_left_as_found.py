"""`measure` leaves a model as it was, whenever it is interrupted, and runs what it was handed."""

import os
import sys
import threading
import types

import pytest
import torch
from helpers import own_model, refuses
from small_models import build, state_of, tokens

import sinkutils as su
from sinkutils import measure
from sinkutils.measuring.tally import ONE_AT_A_TIME


def interrupt_at(line: int, work, files: str = "/sinkutils/") -> bool:
    """Do some work, with a KeyboardInterrupt at its n-th line of these files or torch's hooks."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        file = frame.f_code.co_filename
        watched = files in file or "/hooks.py" in file
        if not watched:
            return None
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bloom", "xglm"])
def test_an_interrupt_at_any_line_leaves_modes_hooks_gradients_and_the_lock(family):
    model, ids = build(family).train(), tokens(2, 8)
    model.base_model.eval()  # a part of another mode
    model.config._attn_implementation = "sdpa" if family == "llama" else "eager"
    with torch.enable_grad():
        measure(model, ids)
        before, line, hits = state_of(model), 1, 0
        while interrupt_at(line, lambda: measure(model, ids)):
            assert state_of(model) == before and torch.is_grad_enabled(), line
            assert ONE_AT_A_TIME.acquire(blocking=False)
            ONE_AT_A_TIME.release()
            hits, line = hits + 1, line + (1 if line < 60 else 7)
    assert hits > 100


@pytest.mark.slow
@pytest.mark.parametrize("place", ["block", "neurons", "query"])
@pytest.mark.parametrize("kind", ["ours", "llama"])
def test_an_interrupt_at_any_line_of_surgery_leaves_the_model_as_it_was(kind, place):
    model = own_model() if kind == "ours" else build(kind)
    model, ids = model.train(), tokens(2, 8) % 60

    def operate():
        su.surgery.edit(model, ids, place, torch.zeros_like)

    operate()
    with torch.no_grad():
        before, right = hooks_of(model), logits_of(model, ids)
        # Lines before the model is touched are many in transformers' part: those of surgery count.
        line, hits = 1, 0
        while interrupt_at(line, operate, "/surgery.py"):
            assert hooks_of(model) == before and model.training, line
            assert torch.equal(logits_of(model, ids), right), line
            hits, line = hits + 1, line + 1
    assert hits > 40


def hooks_of(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def logits_of(model, ids):
    output = model(ids)
    return getattr(output, "logits", output)


def measured_in_a_fork() -> bool:
    """Whether a process that is forked while this thread has the lock can measure."""
    child = os.fork()
    if child == 0:
        os._exit(0 if ONE_AT_A_TIME.acquire(timeout=5) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_process_that_is_forked_beside_a_measuring_thread_has_a_lock_of_its_own():
    inside, ready = threading.Event(), threading.Event()

    def hold():
        with ONE_AT_A_TIME:
            ready.set()
            inside.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait(30)
    try:
        assert measured_in_a_fork()
        assert not ONE_AT_A_TIME.acquire(blocking=False)  # the parent's is still taken
    finally:
        inside.set()
        thread.join()


def shifted(self, input_ids, **kwargs):
    """Another forward of the causal LM: positions from 5 on."""
    positions = torch.arange(input_ids.shape[1])[None] + 5
    return types.SimpleNamespace(logits=self.model(input_ids, position_ids=positions).logits)


def masked(_, args, kwargs):
    mask = torch.ones_like(kwargs["input_ids"])
    mask[:, 0] = 0
    return args, kwargs | {"attention_mask": mask}


def by_instance(model):
    right = type(model).forward

    def forward(self, input_ids, **kwargs):
        mask = torch.ones_like(input_ids)
        mask[:, 0] = 0
        return right(self, input_ids, attention_mask=mask, **kwargs)

    model.forward = types.MethodType(forward, model)
    return model


def by_class(model):
    patched = by_instance(build("llama")).forward.__func__
    model.__class__ = type("Patched", (type(model),), {"forward": patched})
    return model


def by_hook(model):
    model.register_forward_pre_hook(masked, with_kwargs=True)
    return model


def compiled_after(model):
    return torch.compile(by_instance(model))


def compiled_and_hooked(model):
    model = torch.compile(model)
    model.register_forward_pre_hook(masked, with_kwargs=True)
    return model


@pytest.mark.parametrize(
    "way", [by_instance, by_class, by_hook, compiled_after, compiled_and_hooked]
)
def test_what_is_done_to_the_causal_lm_itself_is_measured(way):
    model, ids = build("llama"), tokens()
    plain = measure(model, ids).alpha
    hidden = measure(way(model), ids).alpha
    assert hidden[..., 0].max() < 0.05 < plain.mean()  # nobody but x_1 itself sees x_1


def test_a_forward_from_elsewhere_that_moves_positions_is_run():
    model, ids, seen = build("gpt2"), tokens(), []
    inner = model.transformer
    model.forward = lambda input_ids, **_: inner(
        input_ids, position_ids=torch.arange(input_ids.shape[1])[None] + 40
    )
    report = measure(model, ids)
    inner.wpe.register_forward_pre_hook(lambda _, args: seen.append(int(args[0].min())))
    measure(model, ids)
    assert set(seen) == {40}
    del model.forward
    assert (measure(model, ids).alpha - report.alpha).abs().max() > 1e-3


def test_a_library_that_only_holds_a_model_is_refused_with_the_place_of_the_model():
    holder = torch.nn.DataParallel(build("llama"))
    refuses(r"got DataParallel: give its \.module", measure, holder, tokens())


def test_hooks_that_peft_leaves_where_a_pass_ends_by_an_error_are_removed():
    model, ids = build("llama"), tokens()

    def names(*_):
        """As PEFT gives its layers the adapters of a batch."""

    names.__module__ = "peft.tuners.lora.model"

    def forward(input_ids, **_):
        model.lm_head.register_forward_pre_hook(names)
        raise ValueError("as many adapters as rows")

    kept = model.lm_head.register_forward_pre_hook(names)  # by the user, before
    model.forward = forward
    before = state_of(model)
    for operate in (measure, su.surgery.untouched):
        with pytest.raises(ValueError, match="as many adapters"):
            operate(model, ids)
    assert state_of(model) == before and kept.id in model.lm_head._forward_pre_hooks
