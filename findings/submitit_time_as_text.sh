#!/bin/sh
# A time limit that sbatch understands, and submitit does not.
#
# Expected: with submitit 1.5.4, slurm_time="2:00:00" works as sbatch's --time=2:00:00 does. The line that submitit writes
#   into its script is right, so the job starts. When its time is up, a checkpointable function is queued again:
#   "Checkpointing" in submitit's documentation, and Slurm's manual of sbatch for the forms of --time.
# Seen: when Slurm sends the signal before the end, submitit multiplies the text by 60 and the handler dies of a TypeError.
#   The job is not queued again: the training is lost, hours after a submission that looked right. With slurm_time=120
#   (minutes) it is.
# Source: submitit/core/job_environment.py, SignalHandler.has_timed_out (submitit 1.5.4).
# What is run: submitit itself, with stand-ins of a few lines for sbatch, srun and scontrol.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet submitit==1.5.4
mkdir "$folder/bin"
cat > "$folder/bin/sbatch" <<'END'
#!/bin/sh
SLURM_JOB_ID=7 sh "$1" > /dev/null 2>&1 &
echo "Submitted batch job 7"
END
cat > "$folder/bin/srun" <<'END'
#!/bin/sh
while [ "${1#--}" != "$1" ]; do
    case "$1" in --output|--error) shift ;; esac
    shift
done
exec "$@" > "$FOLDER/log" 2>&1
END
cat > "$folder/bin/scontrol" <<'END'
#!/bin/sh
echo "$@" >> "$FOLDER/requeued"
END
chmod +x "$folder"/bin/*
cat > "$folder/job.py" <<'END'
import os
import signal
import sys
import time
from pathlib import Path

import submitit

FOLDER = Path(os.environ["FOLDER"])


class Training(submitit.helpers.Checkpointable):
    def __call__(self):
        (FOLDER / "pid").write_text(str(os.getpid()))
        time.sleep(60)


limit = sys.argv[1]
executor = submitit.AutoExecutor(FOLDER / "jobs", cluster="slurm")
executor.update_parameters(slurm_time=int(limit) if limit.isdecimal() else limit)
executor.submit(Training())
while not (FOLDER / "pid").exists() or not (FOLDER / "pid").read_text():
    time.sleep(0.1)
os.kill(int((FOLDER / "pid").read_text()), signal.SIGUSR2)  # what Slurm does before the time is up
time.sleep(5)
END
for limit in 120 2:00:00; do
    mkdir "$folder/$limit"
    FOLDER="$folder/$limit" PATH="$folder/bin:$PATH" PYTHONPATH="$folder" "$folder/venv/bin/python" "$folder/job.py" "$limit"
    echo "slurm_time=$limit: $(grep -h -- --time "$folder/$limit"/jobs/*.sh), queued again: $(cat "$folder/$limit/requeued" 2> /dev/null || echo no)"
    grep -h TypeError "$folder/$limit/log" | tail -n 1 || true
done
test -s "$folder/120/requeued" && test ! -e "$folder/2:00:00/requeued"
