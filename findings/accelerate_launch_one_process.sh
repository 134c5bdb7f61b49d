#!/usr/bin/env bash
# Expected: accelerate launch --cpu --num_processes 2 starts two processes that share a training, as
# torchrun --nproc-per-node 2 does, or says that it cannot. Its help says of --num_processes "The
# total number of processes to be launched in parallel."
# What happens: one process runs the script, and nothing is said. On CPUs several processes are
# started through MPI only (--mpirun_hostfile). A training that is meant to be shared is made by one
# process, in twice the time.
# accelerate 1.15.0, torch 2.13.0. Source: accelerate/commands/launch.py, simple_launcher;
# accelerate/utils/launch.py, prepare_simple_launcher_cmd_env.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 accelerate==1.15.0
cat > "$folder/count.py" <<'PYTHON'
from accelerate import Accelerator

print(f"processes: {Accelerator(cpu=True).num_processes}", flush=True)
PYTHON
options="--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
launched=$("$folder/venv/bin/accelerate" launch $options "$folder/count.py" 2>&1)
shared=$("$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/count.py" 2>&1)
printf 'accelerate launch %s\n%s\n' "$options" "$launched"
printf 'torchrun --standalone --nproc-per-node 2\n%s\n' "$shared"
test "$(grep -o "processes: 1" <<< "$launched" | wc -l)" = 1
test "$(grep -o "processes: 2" <<< "$shared" | wc -l)" = 2
