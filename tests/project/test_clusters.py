"""The manifests and programs of examples/clusters: their required fields, and their own commands on this machine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from breadth import ALL, spread
from patience import PATIENCE
from thinwire.base.processes import free_port

CLUSTERS = Path(__file__).resolve().parents[2] / "examples" / "clusters"
SOURCE = CLUSTERS.parents[1] / "src"
LAST = re.compile(r"validation loss 5\.\d+ -> [0-5]\.\d+")


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())


def required(where: Any, **kinds: type | tuple[type, ...]) -> None:
    """The fields that a schema requires, by their type."""
    for field, kind in kinds.items():
        assert isinstance(where.get(field), kind), f"{field} of {sorted(where)} is not {kind}"


def check_pod(pod: dict[str, Any]) -> dict[str, Any]:
    """A PodTemplateSpec's required fields (core/v1); its only container."""
    required(pod, spec=dict)
    assert pod["spec"]["restartPolicy"] in ("Never", "OnFailure"), "a Job's pods may not be restarted always"
    [container] = pod["spec"]["containers"]
    required(container, name=str, image=str)
    for port in container["ports"]:
        required(port, containerPort=int)
    for variable in container["env"]:
        required(variable, name=str, value=str)
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert all(isinstance(amount, str) for amount in container["resources"]["requests"].values())
    return container


def test_the_jobset_has_what_its_schema_requires_and_reaches_its_first_pod():
    """jobset.x-k8s.io/v1alpha2: jobs have a name and a JobTemplateSpec; pods the name of both."""
    whole = manifest("jobset")
    assert (whole["apiVersion"], whole["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    required(whole["metadata"], name=str)
    [ranks] = whole["spec"]["replicatedJobs"]
    required(ranks, name=str, template=dict, replicas=int)
    job = ranks["template"]["spec"]
    required(job, template=dict, parallelism=int, completions=int, backoffLimit=int)
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
    container = check_pod(job["template"])
    name = whole["metadata"]["name"]
    assert container["env"][0] == {"name": "MASTER_ADDR", "value": f"{name}-{ranks['name']}-0-0.{name}"}
    assert f"--nnodes {job['completions']} " in container["command"][-1]
    assert f"--master-port {container['ports'][0]['containerPort']} " in container["command"][-1]


def test_the_elastic_jobset_has_what_its_schema_requires_and_its_replicas_reach_the_lighthouse():
    """Its success is that of the replicas alone, for the lighthouse does not end."""
    whole = manifest("elastic_jobset")
    assert (whole["apiVersion"], whole["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    required(whole["metadata"], name=str)
    jobs = {job["name"]: job for job in whole["spec"]["replicatedJobs"]}
    for job in jobs.values():
        required(job, name=str, template=dict, replicas=int)
        required(job["template"]["spec"], template=dict, parallelism=int, completions=int, backoffLimit=int)
        assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"]
    policy = whole["spec"]["successPolicy"]
    assert policy == {"operator": "All", "targetReplicatedJobs": ["replicas"]} and set(jobs) == {
        "lighthouse",
        "replicas",
    }
    lighthouse, replica = (check_pod(jobs[name]["template"]["spec"]["template"]) for name in ("lighthouse", "replicas"))
    port, name = lighthouse["ports"][0]["containerPort"], whole["metadata"]["name"]
    assert replica["env"] == [{"name": "TORCHFT_LIGHTHOUSE", "value": f"http://{name}-lighthouse-0-0.{name}:{port}"}]
    assert f"--bind 0.0.0.0:{port} " in lighthouse["command"][-1]


def test_the_trainjob_has_what_its_schema_requires():
    """trainer.kubeflow.org/v1alpha1: a runtimeRef by name; a Trainer whose fields are all optional, and no others."""
    whole = manifest("trainjob")
    assert (whole["apiVersion"], whole["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    required(whole["metadata"], name=str)
    required(whole["spec"]["runtimeRef"], name=str)
    trainer = whole["spec"]["trainer"]
    required(trainer, image=str, numNodes=int, numProcPerNode=(int, str), command=list, args=list)
    assert set(trainer) <= {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
    assert all(isinstance(word, str) for word in (*trainer["command"], *trainer["args"]))


KUBEFLOW = importlib.util.find_spec("kubeflow_trainer_api")


def holds(read: Any, given: Any) -> bool:
    """Whether all that was ``given`` is in what was ``read`` of it: a schema drops fields that it does not know."""
    if isinstance(given, dict):
        return all(holds(read.get(name), value) for name, value in given.items())
    if isinstance(given, list):
        return len(read) == len(given) and all(map(holds, read, given))
    return read == given


@pytest.mark.skipif(KUBEFLOW is None, reason="needs kubeflow-trainer-api, which has the schemas")
@pytest.mark.parametrize(("name", "module", "kind"), [
    ("jobset", "jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
    ("elastic_jobset", "jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
    ("trainjob", "trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
])  # fmt: skip
def test_the_schemas_of_kubernetes_know_every_field_of_a_manifest(name, module, kind):
    schema = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), kind)
    whole = manifest(name)
    assert holds(schema.from_dict(whole).to_dict(), whole)
    whole["spec"]["restarts"] = 3
    assert not holds(schema.from_dict(whole).to_dict(), whole), "a field that nobody knows must be seen"


def test_the_task_of_skypilot_has_known_fields():
    task = manifest("skypilot")
    required(task, name=str, num_nodes=int, resources=dict, setup=str, run=str)
    assert set(task) <= {"name", "workdir", "num_nodes", "resources", "envs", "file_mounts", "setup", "run"}


def started(name: str, node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """The command of one of two nodes as its cluster starts it, and the variables that the cluster sets."""
    torchrun = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
    if name == "trainjob":
        trainer = manifest(name)["spec"]["trainer"]
        command = shlex.join([*trainer["command"], *trainer["args"]])
        given = {
            "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
        }  # fmt: skip
    elif name == "jobset":
        pod = manifest(name)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        command = pod["spec"]["containers"][0]["command"][-1].removeprefix("exec ")
        given = {"MASTER_ADDR": "127.0.0.1", "JOB_COMPLETION_INDEX": str(node)}
    else:
        command = manifest(name)["run"]
        given = {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(node),
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        }
    command = re.sub(r"\btorchrun\b", torchrun, command, count=1).replace("29500", str(port))
    return ["bash", "-c", re.sub(r"--steps[= ]40", "--steps=2", command)], given


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen]) -> Iterator[None]:
    """Leave none of them behind, nor what they have started."""
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("name", spread(3, ["trainjob", "jobset", "skypilot"]))
def test_the_command_of_a_manifest_trains_on_two_nodes(name, tmp_path):
    port, nodes = free_port(), []
    for node in range(2):
        command, given = started(name, node, port)
        command[-1] = command[-1].replace("/runs/", f"{tmp_path}/").replace("/tmp/trainjob", f"{tmp_path}/trainjob")
        everything = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        } | given
        nodes.append(subprocess.Popen(
            command, env=everything, cwd=tmp_path, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ))  # fmt: skip
    with ended(nodes):
        printed = [node.communicate(timeout=240 * PATIENCE)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    assert LAST.search(printed[0]), printed[0]


LIGHTHOUSE = shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
TORCHFT = pytest.mark.skipif(LIGHTHOUSE is None, reason="needs torchft, with its torchft_lighthouse on PATH")


def programs(folder: Path, **more: str) -> dict[str, str]:
    """An environment with ``thinwire``, torchft's lighthouse and shell scripts named in ``more``."""
    python = shlex.quote(sys.executable)
    scripts = {
        "thinwire": f'exec {python} -m thinwire "$@"',
        "torchft_lighthouse": f'exec {LIGHTHOUSE} "$@"',
        **more,
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


@TORCHFT
def test_the_commands_of_the_elastic_jobset_are_one_run(tmp_path):
    jobs = manifest("elastic_jobset")["spec"]["replicatedJobs"]
    serve, train = (job["template"]["spec"]["template"]["spec"]["containers"][0]["command"][-1] for job in jobs)
    port, environment = free_port(), programs(tmp_path)
    serve = serve.replace("0.0.0.0:29510", f"127.0.0.1:{port}")
    train = train.replace("--steps 40", "--steps 3").replace("/runs/", f"{tmp_path}/")
    started_here = []
    with ended(started_here):
        for number, command in enumerate([serve, train, train]):
            given = {"JOB_COMPLETION_INDEX": str(number), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
            started_here.append(subprocess.Popen(
                ["bash", "-c", command], env=environment | given, cwd=tmp_path, start_new_session=True, text=True,
                stdout=subprocess.PIPE if number else subprocess.DEVNULL, stderr=subprocess.STDOUT,
            ))  # fmt: skip
        printed = [process.communicate(timeout=240 * PATIENCE)[0] for process in started_here[1:]]
    assert [process.returncode for process in started_here[1:]] == [0, 0], "\n".join(printed)
    assert any(map(LAST.search, printed)), printed
    assert sorted(log.stem for log in (tmp_path / "elastic/replicas").iterdir()) == ["replica-1", "replica-2"]


@TORCHFT
def test_the_elastic_script_of_slurm_trains_on_all_its_nodes_and_ends_its_lighthouse(tmp_path):
    """With a stand-in for srun, which starts the command once for each of two nodes."""
    srun = """while [ "${1#--}" != "$1" ]; do shift; done
    for node in 0 1; do REPLICA_GROUP_ID=node-$node "$@" & done; wait -n && wait"""
    environment = programs(tmp_path, srun=srun, hostname="echo 127.0.0.1")
    command = ["bash", str(CLUSTERS / "elastic_slurm.sh"), "--method=int8", "--preset=tiny", "--steps=3"]
    job = subprocess.Popen(
        command, env=environment | {"SLURM_JOB_ID": str(free_port())}, cwd=tmp_path, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    with ended([job]):
        printed = job.communicate(timeout=240 * PATIENCE)[0]  # which waits for the lighthouse, too: it holds the pipe
    assert job.returncode == 0, printed
    assert LAST.search(printed), printed


def test_the_elastic_script_of_slurm_says_that_the_lighthouse_is_not_installed(tmp_path):
    job = subprocess.run(
        ["bash", str(CLUSTERS / "elastic_slurm.sh")], env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=60 * PATIENCE,
    )  # fmt: skip
    assert (job.returncode, job.stderr) == (1, "torchft_lighthouse is not on PATH: pip install 'thinwire[elastic]'\n")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
@pytest.mark.skipif(not ALL, reason="ray's own processes take half a minute to start: THINWIRE_TESTS=all")
def test_the_program_of_ray_train_learns_and_goes_on_when_a_worker_is_lost(tmp_path):
    # By its default Ray's workers stand behind everything else: on a busy machine they hardly run.
    given = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    process = subprocess.Popen(
        [sys.executable, str(CLUSTERS / "ray_train.py"), "int8(feedback='gradients')", "25"], env=given, cwd=tmp_path,
        start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    with ended([process]):
        out = process.communicate(timeout=400 * PATIENCE)[0]
    assert process.returncode == 0, out[-3000:]
    # The last report before the loss may not have reached Ray's controller.
    assert all(re.search(rf"worker {rank} goes on after step [12]0", out) for rank in range(2)), out[-3000:]
    first, last = (re.search(rf"step {step}: loss ([0-9.]+), ([0-9.]+) MB sent", out) for step in (10, 40))
    assert first and last and float(last[1]) < float(first[1]) - 0.2 and 0 < float(last[2]) < 1.2, out[-3000:]


# --------------------------------------------------------------------------------------------------------------- SLURM


def lacking() -> str:
    """What a real SLURM on this machine would need; "": nothing."""
    programs = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "sinfo")
    missing = [name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install slurmctld slurmd munge slurm-client)"
    return "" if os.geteuid() == 0 else "needs root, to start slurmd"


CONFIG = """\
ClusterName=thinwire
SlurmctldHost={host}
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=batch_sched_delay=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A controller and a node of SLURM on this machine, which end with the test; the environment to reach them."""
    host = os.uname().nodename.partition(".")[0]
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    config = CONFIG.format(
        host=host, controller=free_port(), daemon=free_port(), folder=folder, cpus=os.cpu_count() or 1
    )
    (folder / "slurm.conf").write_text(config)
    environment = {
        **os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin",
        "PYTHONPATH": str(SOURCE), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    commands = (
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
         f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
    )  # fmt: skip
    daemons: list[subprocess.Popen] = []
    with ended(daemons):
        for command in commands:
            with open(folder / f"{command[0]}.out", "w") as printed:
                daemons.append(subprocess.Popen(
                    command, env=environment, start_new_session=True, stdout=printed, stderr=subprocess.STDOUT
                ))  # fmt: skip
            time.sleep(0.5)
        deadline = time.monotonic() + 60 * PATIENCE
        while "idle" not in (state := _shell(["sinfo", "--noheader", "--format=%T"], environment)):
            logs = [(folder / f"{command[0]}.out").read_text()[-500:] for command in commands]
            assert time.monotonic() < deadline, f"{state}\n" + "\n".join(logs)
            time.sleep(0.2)
        yield environment


def _shell(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60 * PATIENCE).stdout


@pytest.mark.skipif(bool(lacking()), reason=lacking())
@pytest.mark.skipif(not ALL, reason="SLURM's daemons take their time: THINWIRE_TESTS=all")
def test_a_job_of_slurm_trains_on_all_its_tasks(tmp_path):
    """The script of examples/clusters, whose two nodes are two tasks of the one that is here."""
    program = tmp_path / "bin" / "thinwire"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m thinwire "$@"\n')
    program.chmod(0o755)
    with slurm(tmp_path) as environment:
        environment["PATH"] = f"{program.parent}:{environment['PATH']}"
        asked = ["--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--overcommit", f"--chdir={tmp_path}"]
        job = _shell(
            ["sbatch", "--parsable", f"--output={tmp_path}/job.out", *asked, str(CLUSTERS / "slurm.sh"),
             "--method=int8", "--preset=tiny", "--steps=2"], environment,
        ).strip()  # fmt: skip
        deadline = time.monotonic() + 240 * PATIENCE
        while "COMPLETED" not in (state := _shell(["scontrol", "--oneliner", "show", "job", job], environment)):
            printed = (tmp_path / "job.out").read_text() if (tmp_path / "job.out").exists() else ""
            assert time.monotonic() < deadline and "FAILED" not in state, f"{state}\n{printed}"
            time.sleep(0.3)
        printed = (tmp_path / "job.out").read_text()
    assert "2 ranks on 1 node" in printed and LAST.search(printed), printed
