#!/bin/sh
# Slurm itself on one machine, as root, from Debian's packages (apt-get install slurm-wlm munge), and a sweep in it whose
# job is told that its time is up: it has to be queued again, and both runs have to be recorded.
# Run with Slurm 22.05 and submitit 1.5.4: both runs were recorded, exit status 0.
#
#     pip install -e '.[slurm]'; sh benchmarks/slurm_here.sh FOLDER
set -e
here=$(mkdir -p "$1" && cd "$1" && pwd)
mkdir -p "$here/state" "$here/spool" "$here/run"
host=$(hostname)
cat > "$here/slurm.conf" <<END
ClusterName=here
SlurmctldHost=$host
AuthInfo=socket=$here/run/munge.socket
SlurmUser=root
StateSaveLocation=$here/state
SlurmdSpoolDir=$here/spool
SlurmctldPidFile=$here/run/slurmctld.pid
SlurmdPidFile=$here/run/slurmd.pid
SlurmctldLogFile=$here/slurmctld.log
SlurmdLogFile=$here/slurmd.log
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
NodeName=$host CPUs=2 RealMemory=1000
PartitionName=main Nodes=$host Default=YES MaxTime=2:00:00 State=UP
END
export SLURM_CONF="$here/slurm.conf"
munged --force --socket="$here/run/munge.socket" --pid-file="$here/run/munged.pid" --log-file="$here/munged.log" --seed-file="$here/run/seed"
slurmctld
slurmd
trap 'kill $(cat "$here"/run/*.pid)' EXIT
sleep 5
python -m sinkutils sweep --preset smoke --only k_bias --seeds 0 1 --checkpoint-seconds 0 --runs "$here/runs" \
    --slurm partition=main time=1:00:00 cpus_per_task=2 &
sweep=$!
until ls "$here"/runs/smoke/k_bias/*.partial/checkpoint.pt > /dev/null 2>&1; do
    kill -0 $sweep  # it ends this script if the sweep has ended
    sleep 1
done
scancel --signal=USR2 "$(squeue --noheader --format=%i)"
sleep 5
squeue
wait $sweep
