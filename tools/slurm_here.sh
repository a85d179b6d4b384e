#!/usr/bin/env bash
# SLURM with munge on this machine alone: one node, every daemon on loopback, every file in one folder.
#
#     apt-get install slurm-wlm munge             # Debian and Ubuntu; as root
#     bash tools/slurm_here.sh up /tmp/slurm      # prints the line that the next commands need
#     export SLURM_CONF=/tmp/slurm/slurm.conf
#     srun --ntasks 2 chipwise train digits
#     bash tools/slurm_here.sh down /tmp/slurm    # ends the daemons and deletes the folder
#
# For trying `chipwise launch --to slurm` and for tests. It is no way to run a cluster.
set -euo pipefail
usage() { echo "usage: bash $0 up|down FOLDER" >&2; exit 2; }
[ $# -eq 2 ] || usage
at=$(realpath -m "$2")

port() {  # a free one on loopback
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

stop() {  # by the ids that the daemons wrote; jobs first, so that none outlives its daemon
    if [ -e "$at/slurmctld.pid" ]; then
        SLURM_CONF=$at/slurm.conf timeout 20 scancel --user root 2>/dev/null || true
    fi
    for daemon in slurmd slurmctld munged; do
        [ -e "$at/$daemon.pid" ] || continue
        pid=$(cat "$at/$daemon.pid")
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    done
}

up() {
    for tool in munged slurmctld slurmd srun; do
        command -v $tool >/dev/null || { echo "$tool is missing: apt-get install slurm-wlm munge" >&2; exit 1; }
    done
    [ "$(id -u)" = 0 ] || { echo "slurmd wants root" >&2; exit 1; }
    [ ! -e "$at/slurm.conf" ] || { echo "$at has a SLURM: bash $0 down $at" >&2; exit 1; }
    mkdir -p "$at/state" "$at/spool"
    chmod 755 "$at"
    trap 'tail -n 3 "$at"/*.log >&2; stop' ERR
    # ---- munge: who asks is who they say, by a key that only this folder has
    (umask 077; head -c 128 /dev/urandom > "$at/munge.key")
    munged --force --key-file "$at/munge.key" --socket "$at/munge.socket" --pid-file "$at/munged.pid" \
        --log-file "$at/munged.log" --seed-file "$at/munge.seed" --num-threads 1 2>>"$at/munged.log"
    # ---- SLURM: NoInAddrAny binds its ports to 127.0.0.1; a job queued again starts when cred_expire is over;
    # the GPUs are not there, but a job that asks for some is taken
    cat > "$at/slurm.conf" <<CONF
ClusterName=here
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$at/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort=$(port)
SlurmdPort=$(port)
SlurmctldPidFile=$at/slurmctld.pid
SlurmdPidFile=$at/slurmd.pid
SlurmctldLogFile=$at/slurmctld.log
SlurmdLogFile=$at/slurmd.log
StateSaveLocation=$at/state
SlurmdSpoolDir=$at/spool
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=60
GresTypes=gpu
NodeName=localhost NodeAddr=127.0.0.1 CPUs=$(nproc) Gres=gpu:8 State=UNKNOWN
PartitionName=here Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    echo "Name=gpu File=/dev/tty[0-7]" > "$at/gres.conf"
    export SLURM_CONF=$at/slurm.conf
    slurmctld
    slurmd -N localhost
    for _ in $(seq 300); do
        state=$(sinfo --noheader --format %T 2>/dev/null || true)
        [ "$state" != idle ] || { echo "export SLURM_CONF=$at/slurm.conf"; return; }
        sleep 0.1
    done
    echo "the node is ${state:-unknown}" >&2
    false
}

case $1 in
    up) up ;;
    down) stop; rm -rf "$at" ;;
    *) usage ;;
esac
