"""Jobs that ``srun`` or ``mpirun`` started: torchrun's variables for one of their ranks, derived from theirs.

| | rank | ranks | on this node | where rank 0 is |
|---|---|---|---|---|
| Open MPI | OMPI_COMM_WORLD_RANK | ..._SIZE | ..._LOCAL_RANK, ..._LOCAL_SIZE | not said |
| MPICH, Intel MPI | PMI_RANK | PMI_SIZE | MPI_LOCALRANKID, MPI_LOCALNRANKS | not said |
| Cray PALS | PMI_RANK | PMI_SIZE | PMI_LOCAL_RANK, PMI_LOCAL_SIZE | not said |
| Slurm's srun | SLURM_PROCID | SLURM_STEP_NUM_TASKS | SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE | SLURM_STEP_NODELIST |

Only ``srun`` sets SLURM_STEP_...: the script that ``sbatch`` runs is no task, although it has a SLURM_PROCID (0), and
the shell of ``salloc`` is a step of one task, or none. Variables of ``mpirun`` come first, as ``srun`` may have started
it; inside an allocation, Slurm's list of nodes says where its rank 0 is.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path

from thinwire.base.errors import ThinwireError
from thinwire.base.processes import rank_variables

MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Variables, equal on all ranks of a job, from which two jobs on one machine derive different ports."""
_RUN_ID = "TORCHELASTIC_RUN_ID"
FIRST_PORT, PORTS = 15000, 15000  # below the ports that Linux gives away by itself (from 32768)


def starts_of(environment: Mapping[str, str]) -> list[str]:
    """Name this start of the job, "LAUNCH: START": it goes on with what other starts of a launch of its own began.

    A start of torchrun's is its child that is above this process, since it does not count those in which a node comes
    or goes.
    """
    names = []
    if job := environment.get("SLURM_JOB_ID"):
        names.append(f"Slurm's job {job}: start {environment.get('SLURM_RESTART_COUNT', '0')}")
    if run := environment.get(_RUN_ID):
        agent, child = _torchrun_above()
        names.append(f"torchrun's run {' '.join(run.split())} by {agent} on {socket.gethostname()}: {child}")
    return names


def _torchrun_above() -> tuple[str, str]:
    """Return number and start of the torchrun above this process, and of its child: this process or a script."""
    process, line = os.getpid(), list[str]()
    with contextlib.suppress(OSError):
        while True:
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            line.insert(0, f"process {process} begun at {fields[19]}")
            ours = f"\0{_RUN_ID}=".encode() in b"\0" + Path(f"/proc/{process}/environ").read_bytes()
            if process == 1 or (line[1:] and not ours):
                break
            process = int(fields[1])
    return (line[0], line[1]) if line[1:] else (str(os.getppid()), str(os.getpid()))


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Derive RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; {}: no job of several tasks.

    Variables that are set already stay as they are.

    Raises:
        ThinwireError: the variables do not say how the job's ranks lie on the nodes, or where rank 0 is.
    """
    position = _by_mpi(environment) or _by_slurm(environment)
    if not position:
        return {}
    rank, size, local_rank, per_node = position
    if size % per_node or rank % per_node != local_rank:
        raise ThinwireError(
            f"rank {rank} of {size} is number {local_rank} of {per_node} on its node: every node needs the same "
            "number of ranks, with consecutive numbers (srun --distribution=block, mpirun --map-by core)"
        )
    job = " ".join(environment.get(name, "") for name in JOB)
    port = FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    derived = rank_variables(rank, size, local_rank, per_node, "127.0.0.1", port)
    if size == per_node:
        derived["GLOO_SOCKET_IFNAME"] = "lo"
    elif "MASTER_ADDR" not in environment:
        variables = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        nodes = next(filter(None, map(environment.get, variables)), "")
        if not nodes:
            raise ThinwireError(
                "mpirun does not say on which host rank 0 is: mpirun -x MASTER_ADDR=HOST ... (Open MPI), or "
                "mpirun -genv MASTER_ADDR HOST ... (MPICH)"
            )
        derived["MASTER_ADDR"] = first_host(nodes)
    return {name: environment.get(name, value) for name, value in derived.items()}


def forgotten_srun(environment: Mapping[str, str]) -> str | None:
    """Return a line for the user if Slurm's job has several tasks, but ``srun`` did not start this process."""
    tasks = environment.get("SLURM_NTASKS", "1")
    alone = "SLURM_JOB_ID" in environment and environment.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    if not alone or tasks == "1":
        return None
    return f"Slurm gave this job {tasks} tasks, of which one is used: `srun thinwire train` runs on all of them"


def first_host(nodes: str) -> str:
    """Return the first host in a Slurm list of nodes: "gpu[08-11,20],login" -> "gpu08".

    Raises:
        ThinwireError: it is not such a list.
    """
    match = re.match(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\])?([^,\[\]]*)(?:,|$)", nodes)
    if match is None:
        raise ThinwireError(f"cannot read Slurm's list of nodes '{nodes}': set MASTER_ADDR to the host of rank 0")
    return match[1] + (match[2] or "") + match[3]


def _by_mpi(environment: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    for names in MPI:
        if all(name in environment for name in names):
            rank, size, local_rank, per_node = (_number(environment, name) for name in names)
            return (rank, size, local_rank, per_node) if size > 1 else None
    started = "PMI_RANK" in environment and "SLURM_STEP_NUM_TASKS" not in environment
    if started and "SLURM_JOB_ID" not in environment and _number(environment, "PMI_SIZE") > 1:
        raise ThinwireError(
            "PMI_RANK is set, so this is one rank of several, but no variable has its number on its node: set RANK, "
            "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    return None


def _by_slurm(environment: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    rank, size, local_rank = (_number(environment, name) for name in SLURM)
    by_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_NTASKS_PER_NODE", "")
    counts = re.sub(r"\(x\d+\)", "", by_node).split(",")  # "2(x3),1": three nodes of two, and one of one
    if not all(re.fullmatch(r"[1-9]\d*", count) for count in counts):
        raise ThinwireError(
            f"srun does not say how many tasks are on a node (SLURM_STEP_TASKS_PER_NODE is '{by_node}'): "
            "set LOCAL_WORLD_SIZE, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    if len(set(counts)) > 1:
        raise ThinwireError(
            f"srun put {by_node} tasks on the nodes: every node needs the same number (--ntasks-per-node)"
        )
    return rank, size, local_rank, int(counts[0])


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        raise ThinwireError(
            f"{name} is '{environment.get(name, '')}', which is not a number: unset it, or set it right"
        ) from None
