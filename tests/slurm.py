"""Run a real Slurm on this machine: munge, a controller and three daemons on loopback, in a separate folder."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
NODES = ("n1", "n2", "n3")

_CONF = """
ClusterName=brim
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=4
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,sched_min_interval=200000,batch_sched_delay=0,bf_interval=2
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
MpiDefault=none
KillWait=5
ReturnToService=0
PartitionName=all Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> str:
    """Return the reason why Slurm cannot be started on this machine; empty if it can."""
    removed = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    return (
        f"no Slurm here: {', '.join(removed)} not installed (apt-get install slurmctld slurmd munge)" if removed else ""
    )


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Slurm:
    """A Slurm that starts on entering the context and stops with all its jobs on leaving it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        folder, ports = self.folder, _free_ports(1 + len(NODES))
        (folder / "state").mkdir(parents=True)
        folder.chmod(0o755)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        text = _CONF.format(user=pwd.getpwuid(os.getuid()).pw_name, folder=folder, port=ports[0])
        for name, port in zip(NODES, ports[1:], strict=True):
            text += f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=3000\n"
        (folder / "slurm.conf").write_text(text)
        paths = {name: f"{folder}/munge.{name}" for name in ("socket", "seed", "log", "pid")}
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={paths['socket']}",
            f"--seed-file={paths['seed']}", f"--log-file={paths['log']}",
            f"--pid-file={paths['pid']}",
        )  # fmt: skip
        self._until(lambda: Path(paths["socket"]).exists(), "munge")
        self._start("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for name in NODES:
            self.start_node(name)
        self._until(lambda: self.run("sinfo", "--noheader", "--format=%D%t").split() == ["3idle"], "three idle nodes")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["scancel", "--user", pwd.getpwuid(os.getuid()).pw_name], env=self.environment, check=False)
        time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, *command: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def start_node(self, name: str) -> None:
        self._start("slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"))

    def _until(self, existing: object, label: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not existing():  # type: ignore[operator]
            if time.monotonic() > end:
                logs = "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("*.log")))
                raise TimeoutError(f"no {label} after {seconds:.0f} s\n{logs}")
            time.sleep(0.2)

    def run(self, *command: str, cwd: Path | None = None, more: Mapping[str, str] | None = None) -> str:
        """Return the output of a Slurm command. It must succeed, except squeue and sinfo while the controller
        starts."""
        environment = self.environment | dict(more or {})
        result = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
        if result.returncode and command[0] not in ("sinfo", "squeue"):
            raise AssertionError(f"{command}: {result.stdout}{result.stderr}")
        return result.stdout

    def tasks(self) -> dict[str, tuple[str, str]]:
        """Return the state and node of each waiting or running job or array task."""
        lines = self.run("squeue", "--noheader", "--array", "--format=%i %T %N").splitlines()
        return {
            arguments[0]: (arguments[1], arguments[2] if len(arguments) > 2 else "")
            for arguments in map(str.split, lines)
        }

    def told(self, job: str) -> dict[str, str]:
        """Return the controller's record of a job or an array task."""
        text = self.run("scontrol", "show", "job", "--oneliner", job)
        return dict(value.split("=", 1) for value in text.split() if "=" in value)

    def wait_all(self, seconds: float = 300) -> None:
        """Wait until no job is waiting or running."""
        self._until(lambda: not self.tasks(), f"end of the jobs ({self.tasks()})", seconds)

    def wait_running(self, task: str, seconds: float = 90) -> str:
        """Return the node that a task runs on, once it runs."""
        self._until(lambda: self.tasks().get(task, ("", ""))[0] == "RUNNING", f"running {task}", seconds)
        return self.tasks()[task][1]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
