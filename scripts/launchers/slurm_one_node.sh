#!/bin/bash
# Starts Slurm on this machine alone, from Debian's packages, to try sweeps.
#
#   apt-get install --no-install-recommends slurmctld slurmd slurm-client munge
#   scripts/launchers/slurm_one_node.sh /tmp/slurm
#   python -m diloco sweep --sweep=... --results=... --backend=slurm
#
# Needs root. The argument is a folder for state and logs. Slurm runs without accounting
# and without cgroups.
set -e
dir=${1:?usage: scripts/launchers/slurm_one_node.sh DIRECTORY}
mkdir -p "$dir/state" "$dir/spool" /run/munge /var/log/munge /var/lib/munge /etc/slurm
dir=$(realpath "$dir")
host=$(hostname -s)
if [ ! -f /etc/munge/munge.key ]; then
  dd if=/dev/urandom of=/etc/munge/munge.key bs=1024 count=1 status=none
fi
chown munge:munge /etc/munge/munge.key /run/munge /var/log/munge /var/lib/munge
chmod 400 /etc/munge/munge.key
chmod 755 /run/munge
munge -n >/dev/null 2>&1 || su -s /bin/sh munge -c /usr/sbin/munged
cat > /etc/slurm/slurm.conf <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
slurmctld
slurmd
sleep 3
sinfo
