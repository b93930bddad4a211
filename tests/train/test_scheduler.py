"""``srun`` and ``mpirun``: their environments, as they look, are one job of several ranks or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pretrained_models import TEXT
from thinwire.base.errors import ThinwireError
from thinwire.cli import program as cli
from thinwire.train.job.scheduler import first_host, forgotten_srun, torchrun_variables

SBATCH = """
SLURM_JOB_ID=200505 SLURM_JOBID=200505 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_NTASKS_PER_NODE=2 SLURM_TASKS_PER_NODE=2(x2)
SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2 SLURM_NODELIST=gpu[10,25] SLURM_JOB_NODELIST=gpu[10,25] SLURM_JOB_NAME=train
SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0 SLURM_TASK_PID=16360 SLURM_JOB_CPUS_PER_NODE=4(x2)
"""
"""What the script that sbatch runs sees."""
TASK = """
SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2(x2)
SLURM_STEP_NODELIST=gpu[10,25] SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1
"""
"""What srun adds or changes for one of its tasks."""
SALLOC = SBATCH.replace("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0", "")
INTERACTIVE = f"{SBATCH} SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1"
"""The shell of salloc where Slurm starts it on the first node (LaunchParameters=use_interactive_step)."""
OPEN_MPI = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
HYDRA = "PMI_RANK=3 PMI_SIZE=4 PMI_FD=9 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"
CRAY = "PMI_RANK=3 PMI_SIZE=4 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2"
FOURTH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


def derived(*texts: str) -> dict[str, str]:
    return torchrun_variables(variables(" ".join(texts)))


def test_a_task_of_srun_is_a_rank():
    found = derived(SBATCH, TASK)
    port = found.pop("MASTER_PORT")
    assert found == FOURTH | {"MASTER_ADDR": "gpu10"} and 15000 <= int(port) < 30000
    first = derived(SBATCH, TASK, "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0")
    assert first["MASTER_PORT"] == port and first["RANK"] == "0"
    assert derived(SBATCH, TASK, "SLURM_STEP_ID=1")["MASTER_PORT"] != port
    given = derived(SBATCH, TASK, "MASTER_ADDR=10.1.2.3 MASTER_PORT=29500")
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.1.2.3", "29500")


def test_a_step_on_fewer_nodes_than_the_job_has_begins_on_its_own_first():
    assert derived(SBATCH, TASK, "SLURM_STEP_NODELIST=gpu[25,31]")["MASTER_ADDR"] == "gpu25"


@pytest.mark.parametrize("text", ["", SBATCH, SALLOC, INTERACTIVE, f"{SBATCH} {TASK} SLURM_STEP_NUM_TASKS=1"])
def test_what_srun_has_not_started_several_times_is_no_rank(text):
    assert derived(text) == {}


def test_tasks_that_are_not_used_are_said():
    for text in (SBATCH, SALLOC, INTERACTIVE):
        assert forgotten_srun(variables(text)).startswith("Slurm gave this job 4 tasks")
    assert forgotten_srun(variables(f"{SBATCH} SLURM_NTASKS=1")) is None
    assert forgotten_srun(variables(f"{SBATCH} {TASK}")) is None and forgotten_srun({}) is None


@pytest.mark.parametrize("text", [OPEN_MPI, HYDRA, CRAY])
def test_a_rank_of_mpirun(text):
    with pytest.raises(ThinwireError, match="mpirun -x MASTER_ADDR=HOST"):
        derived(text)
    found = derived(text, "MASTER_ADDR=10.0.0.7")
    assert found.items() >= (FOURTH | {"MASTER_ADDR": "10.0.0.7"}).items()
    by_slurm = derived(text, SBATCH, TASK, "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2")  # srun has started mpirun's daemons
    assert by_slurm.items() >= (FOURTH | {"MASTER_ADDR": "gpu10"}).items()
    one_node = derived(text.replace("=2", "=4").replace("LOCAL_RANK=1", "LOCAL_RANK=3").replace("KID=1", "KID=3"))
    assert one_node["MASTER_ADDR"] == "127.0.0.1" and one_node["GLOO_SOCKET_IFNAME"] == "lo"


def test_srun_with_pmi_is_srun():
    assert derived(SBATCH, TASK, "PMI_RANK=3 PMI_SIZE=4 PMI_FD=9")["MASTER_ADDR"] == "gpu10"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{SBATCH} {TASK} SLURM_STEP_TASKS_PER_NODE=3,1", "srun put 3,1 tasks on the nodes"),
        (f"{SBATCH} {TASK} SLURM_STEP_TASKS_PER_NODE=2(x3),1", "srun put 2(x3),1 tasks on the nodes"),
        (f"{SBATCH} {TASK} SLURM_LOCALID=0", "consecutive numbers"),
        (f"{SBATCH} {TASK} SLURM_STEP_TASKS_PER_NODE=many", "SLURM_STEP_TASKS_PER_NODE is 'many'"),
        (f"{SBATCH} {TASK} SLURM_PROCID=x", "SLURM_PROCID is 'x', which is not a number"),
        (f"{SBATCH} {TASK} SLURM_STEP_NODELIST=[", "cannot read Slurm's list of nodes"),
        ("PMI_RANK=1 PMI_SIZE=2", "no variable has its number on its node"),
        ("SLURM_STEP_NUM_TASKS=4", "SLURM_PROCID is ''"),
    ],
)
def test_what_is_not_clear_is_one_line(text, line, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    monkeypatch.setattr("thinwire.train.cli.start_ranks", None)
    for name, value in variables(text).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "--out", f"{tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu08", "gpu08"), ("gpu08,gpu09", "gpu08"), ("gpu[08-11,20],login", "gpu08"), ("a,b[1-2]", "a"),
        ("rack[003]n.site.org", "rack003n.site.org"), ("nid[001096-001099]", "nid001096"), ("gpu-1,gpu-2", "gpu-1"),
    ],
)  # fmt: skip
def test_the_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


def test_two_tasks_of_srun_are_one_run(tmp_path):
    """Two processes, started at once with the environment of srun's tasks on one node, as srun would."""
    (tmp_path / "text.txt").write_text("".join(TEXT[:2000]))
    words = [
        sys.executable, "-m", "thinwire", "train", "--preset", "tiny", "--layers", "1", "--width", "32", "--steps", "3",
        "--eval-sequences", "0", "--no-checkpoints", "--corpus", f"{tmp_path}/text.txt", "--out", f"{tmp_path}/run",
    ]  # fmt: skip
    one_node = "SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=node7"
    tasks = [
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | variables(f"{SBATCH} {TASK} {one_node} SLURM_JOB_ID={os.getpid()} "
                                       f"SLURM_PROCID={rank} SLURM_LOCALID={rank}"),
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [task.communicate(timeout=240) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "2 ranks on 1 node" in said[0][0] and said[1] == ("", "")
    assert json.loads((tmp_path / "run/summary.json").read_text())["world_size"] == 2
