#!/usr/bin/env bash
# Expected: with an Accelerate config of distributed_type: FSDP (version 2), each of two processes
# holds half of the weights, also on CPUs, where PyTorch's fully_shard works through gloo. Or the
# launcher says that it cannot.
# What happens: on CPUs Accelerate takes DDP and says nothing. Each process holds all weights, and a
# test of sharded checkpoints or of memory on CPUs has tested nothing of the kind.
# accelerate 1.15.0, torch 2.13.0. Source: accelerate/state.py, AcceleratorState.__init__, where FSDP
# is set for MULTI_GPU and other devices, and not for MULTI_CPU. Lightning refuses the same in a line
# (Lightning-AI/pytorch-lightning issue 21812).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 accelerate==1.15.0
cat > "$folder/fsdp.yaml" <<'YAML'
distributed_type: FSDP
use_cpu: true
num_processes: 2
mixed_precision: 'no'
fsdp_config: {fsdp_version: 2}
YAML
cat > "$folder/held.py" <<'PYTHON'
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard


def held(model):
    """The numbers of the model that this process holds."""
    parts = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    return sum(part.numel() for part in parts)


world = Accelerator(cpu=True)
model = torch.nn.Linear(64, 64, bias=False)
trained, _ = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
cut = torch.nn.Linear(64, 64, bias=False)
fully_shard(cut, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
print(f"{world.distributed_type}: {held(trained)} of 4096; fully_shard: {held(cut)}", flush=True)
PYTHON
said=$("$folder/venv/bin/accelerate" launch --config_file "$folder/fsdp.yaml" "$folder/held.py" 2>&1)
printf '%s\n' "$said"
test "$(grep -o "MULTI_CPU: 4096 of 4096; fully_shard: 2048" <<< "$said" | wc -l)" = 2
