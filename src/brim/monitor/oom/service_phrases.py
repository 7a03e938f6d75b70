"""Phrases of services, batch systems and container runtimes that kill processes, or report that the kernel did."""

from __future__ import annotations

import re
from dataclasses import replace

from brim.monitor.oom.kills import Bound, Kill
from brim.monitor.oom.phrases import Phrase, table

_MEMORY = Bound(kind="memory")
_PRESSURE = Bound(kind="memory pressure")
_SYSTEMD_OOMD = Kill("systemd-oomd", reason="systemd-oomd logged the kill", signal=9)
_EARLYOOM = Kill("earlyoom", "machine", reason="earlyoom logged the signal")
_NOHANG = Kill("nohang", "machine", reason="nohang logged the signal")
_META_OOMD = Kill("oomd", "cgroup", reason="oomd logged the kill", signal=9, bound=_PRESSURE)
_OOMD_RULE = Bound(kind="memory pressure", text="rule {rule}")
_SLURM = Kill("slurm", "cgroup", sure="likely", signal=9, bound=_MEMORY)
_BATCH = Kill("batch system", "cgroup", signal=9, bound=_MEMORY)
_UNIT = Kill("kernel", sure="likely", reason="systemd reports a kill in this unit without the process", signal=9)
_KUBELET = Kill("kernel", "machine", reason="the kubelet reports the kernel's kill", signal=9)
_POD = Kill(
    "container runtime",
    "cgroup",
    sure="likely",
    reason="Kubernetes reports OOMKilled; the kernel's record would have the memory in use",
    signal=9,
    bound=_MEMORY,
)
_CONTAINER = replace(_POD, reason="the container runtime reports an out-of-memory kill without the process")
_FLAG = replace(
    _POD, sure="possible", reason="Docker set the OOMKilled flag of the container, which is not always right"
)
_RAY = Kill(
    "ray",
    "machine",
    reason="Ray logged the kill",
    signal=9,
    bound=Bound(kind="memory", text="Ray's threshold of {fraction}"),
)
_MACOS = Kill("macos", "machine", reason="the macOS kernel logged the kill", signal=9)
_OOMD_GROUP = r"(?:Killed|Marked) (?P<task_group>/(?:\S*/)?(?P<unit>\S+)) (?:for killing )?due to "
_META_OOMD_LINE = (
    r"oomd kill: [\d.]+ [\d.]+ [\d.]+ (?P<task_group>(?:\S*/)?(?P<unit>\S+)) +(?P<usage>\d+) "
    r"ruleset:\[(?P<rule>[^\]]*)\].*?killer:"
)
_POD_LINE = r"kubernetes: pod (?:\?|(?P<pod>\S+)) container (?:\?|(?P<container>\S+)) exit code \S+ reason "
_POD_LIMIT = r"(?: limit (?P<limit>[\d.]+(?:[kKMGTPE]i?)?)(?![\w.]))?"

_KILLS = table(
    "kill",
    # systemd-oomd
    ("due to memory used", _OOMD_GROUP
     + r"memory used \((?P<usage>\d+)\) / total \((?P<ram>\d+)\) and swap used \((?P<swapinuse>\d+)\) / total "
     r"\((?P<swap>\d+)\) being more than (?P<percent>[\d.]+%)",
     replace(_SYSTEMD_OOMD, scope="machine",
             bound=Bound(kind="memory and swap",
                         text="memory {usage} of {ram} and swap {swapinuse} of {swap} used, more than {percent}"))),
    ("due to memory pressure", _OOMD_GROUP + r"(?P<why>memory pressure for (?P<group>/\S*) being .*?)\.?\s*$",
     replace(_SYSTEMD_OOMD, scope="cgroup", bound=Bound(kind="memory pressure", text="{why}"))),
    ("due to memory", _OOMD_GROUP + "memory ", _SYSTEMD_OOMD),
    ("systemd-oomd killed", r"(?P<unit>\S+): systemd-oomd killed (?P<count>\d+|some) process\(es\) in this unit",
     _SYSTEMD_OOMD),
    # earlyoom since 1.3, of 2019 and of 2018; its first version is below
    ("sending SIG",
     r"sending SIG(?P<signal>\w+) to process (?P<pid>\d+)(?: uid (?P<uid>\d+))? \"(?P<name>.*?)\": (?:badness"
     r"|oom_score) -?\d+,(?: oom_score_adj -?\d+,)? VmRSS (?P<rss_mib>\d+) MiB(?:, cmdline \"(?P<command>.*)\")?",
     _EARLYOOM),
    ("killing process ",
     r"killing process (?P<pid>\d+) \"(?P<name>.*?)\" with signal (?P<signal>\d+): badness -?\d+, "
     r"VmRSS (?P<rss_mib>\d+) MiB", _EARLYOOM),
    ("Killing process '",
     r"Killing process '(?P<name>.*?)' with signal (?P<signal>\d+), pid: (?P<pid>\d+), badness: -?\d+, "
     r"VmRSS: (?P<rss_mib>\d+) MiB", _EARLYOOM),
    ("to the victim", r"Send(?:ing)? (?P<signal>SIG(?:TERM|KILL)) to the victim", _NOHANG),
    # Meta's oomd: the kernel's message buffer, then its own log
    ("oomd kill:", _META_OOMD_LINE + r"\[?(?P<plugin>\w+)",
     replace(_META_OOMD, reason="oomd logged the kill ({plugin})", bound=_OOMD_RULE)),
    ("oomd kill:", _META_OOMD_LINE + r"\(dry\)(?P<plugin>\w+)",
     replace(_META_OOMD, sure="possible", reason="oomd logged a dry run ({plugin}), not a kill", bound=_OOMD_RULE)),
    ("] Killed ", r"oomd.*\] Killed (?P<count>[1-9]\d*): \d+\(", _META_OOMD),
    # Slurm: the step daemon, its poll, srun, accounting
    ("Detected ", r"Detected (?P<count>\d+) oom[-_]kill events?(?:\(s\))? in (?:step |StepId=)"
     r"(?P<step>\w+(?:[.+_\[\]]\w+)*)(?=[. ])",
     replace(_SLURM, reason="Slurm counted kills in the cgroup of the step without the process", unit="step {step}")),
    ("exceeded memory limit",
     r"(?:Job|Step) (?P<step>[\w.]+) exceeded memory limit \((?P<usage_kib>\d+) > (?P<limit_kib>\d+)\)",
     replace(_SLURM, sure="certain", reason="Slurm logged the kill", unit="step {step}")),
    ("Out Of Memory", r"srun: error: (?P<host>[\w.-]+): tasks? (?P<task>[\d,-]+): Out Of Memory",
     replace(_SLURM, reason="srun reports the kill without the process", unit="task {task}")),
    ("memory limit at some point", r"slurmstepd\S*: (?:error: )?Exceeded (?:job|step) memory limit at some point",
     replace(_SLURM, sure="possible", reason="Slurm reports that the limit was reached, not that it killed a process")),
    ("OUT_OF_ME", r"^\s*(?P<job>\d+(?:_\d+)?)(?:\.\w+)?[\s|].*?\bOUT_OF_ME(?:MORY|\+)"
     r"(?=(?:.* MaxRSS=(?P<usage_binary>[\d.]+[KMGTP]?))?)(?=(?:.* ReqMem=(?P<limit_binary>[\d.]+[KMGTP]?))?)",
     replace(_SLURM, reason="Slurm's accounting lists OUT_OF_MEMORY", unit="job {job}")),
    ("OUT_OF_ME", r"^State: OUT_OF_MEMORY", replace(_SLURM, reason="Slurm's accounting lists OUT_OF_MEMORY")),
    # Other batch systems
    ("PBS: job killed", r"PBS: job killed: (?P<kind>\w+) (?P<usage_kib>\d+)kb exceeded limit (?P<limit_kib>\d+)kb",
     replace(_BATCH, reason="PBS logged the kill", bound=Bound(kind="{kind}"))),
    ("TERM_MEMLIMIT", r"TERM_MEMLIMIT: job killed after reaching LSF memory usage limit",
     replace(_BATCH, reason="LSF logged the kill", bound=Bound(text="LSF's memory limit"))),
    ("l memory used",
     r"(?:Lost executor \d+ on (?P<host>[\w.-]+): Container killed by YARN .*?)?(?P<usage>[\d.]+ ?[KMGT]B) of "
     r"(?P<limit>[\d.]+ ?[KMGT]B) (?:physical|virtual) memory used",
     replace(_BATCH, reason="YARN logged the kill", bound=Bound(kind="memory", text="YARN"))),
    ("memory limit of",
     r"(?:slot[\w.]*@(?P<host>[\w.-]+): )?Job has gone over (?:cgroup )?memory limit of (?P<limit_mib>\d+) megabytes"
     r"(?:\. (?:Peak|Last measured) usage: (?P<usage_mib>\d+) megabytes)?",
     replace(_BATCH, reason="HTCondor put the job on hold for its memory")),
    ("exceeds job hard limit",
     r"job (?P<job>[\d.]+) exceeds job hard limit \"(?P<kind>\w*(?:mem|rss)\w*)\" of queue \"[^\"]*\" "
     r"\(\s*(?P<usage>[\d.]+) > limit:\s*(?P<limit>[\d.]+)\) - sending SIGKILL",
     replace(_BATCH, reason="Grid Engine logged the kill", unit="job {job}", bound=Bound(kind="{kind}"))),
    ("oom: Memory cgroup",
     r"flux-shell\[\d+\]:\s+ERROR: oom: Memory cgroup out of memory: killed (?P<count>\d+) tasks?"
     r"(?: on (?P<host>[\w-]+))?",
     replace(_BATCH, sure="likely", reason="Flux counted kills in the cgroup of the job without the process",
             bound=Bound(kind="memory", text="the memory limit of the Flux job"))),
    # systemd, ulimits
    ("OOM killer", r"(?P<unit>\S+): A process of this unit has been killed by the OOM killer", _UNIT),
    ("'oom-kill'", r"(?P<unit>\S+): Failed with result 'oom-kill'", _UNIT),
    ("exceed data ulimit",
     r"mmap: (?P<name>.*?) \((?P<pid>\d+)\): VmData (?P<usage>\d+) exceed data ulimit (?P<limit>\d+)\.",
     Kill("rlimit", "process", "refused", reason="the kernel logged the refused allocation and the limit",
          bound=Bound(kind="RLIMIT_DATA"))),
    # Kubernetes; "kubernetes: pod" and "docker: container" are lines of multiline_logs
    ("System OOM", r"System OOM encountered, victim process: (?P<name>.*?), pid: (?P<pid>\d+)(?!\d)", _KUBELET),
    ("Cgroup OOM", r"Cgroup OOM encountered, victim process: (?P<name>.*?), pid: (?P<pid>\d+)(?!\d)",
     replace(_KUBELET, scope="cgroup")),
    ("SystemOOM", r"\bSystemOOM\s.*?kubelet(?:, (?P<host>[\w.-]+))?\s+System OOM encountered",
     replace(_KUBELET, sure="likely", reason="the kubelet reports a kill without the process")),
    ("low on resource: memory", r"low on resource: memory\..*?Container (?P<unit>\S+) was using (?P<used>[\w.]+)",
     Kill("kubelet", "machine", "evicted", reason="the kubelet logged the eviction",
          bound=Bound(text="the node was low on memory; container {unit} was using {used}"))),
    ("kubernetes: pod", _POD_LINE + r"OOMKilled" + _POD_LIMIT,
     replace(_POD, reason="Kubernetes reports OOMKilled", unit="pod {pod}, container {container}")),
    ("kubernetes: pod", _POD_LINE + r"\S+" + _POD_LIMIT,
     replace(_POD, scope="unknown", sure="possible",
             reason="the exit code 137 means SIGKILL; the log does not give the reason",
             unit="pod {pod}, container {container}")),
    ("OOMKilled", r"^(?P<pod>[a-z0-9][\w.-]*)\s+\d+/\d+\s+OOMKilled\s+\d", replace(_POD, unit="pod {pod}")),
    ("OOMKilled", r"(?:^|\s)(?:[Rr]eason:\s+|\"reason\":\s*\")OOMKilled\"?,?\s*$", _POD),
    # containers
    ("docker: container", r"docker: container (?P<id>\S+) OOMKilled(?: limit (?P<limit>\d+))?",
     replace(_FLAG, unit="container {id}")),
    ('"OOMKilled": true', r'"OOMKilled": true', _FLAG),
    ("container oom ", r"container oom (?P<id>[0-9a-f]{12})[0-9a-f]*(?: \(.*?\bname=(?P<container>[\w./-]+))?",
     replace(_CONTAINER, unit="container {container|id}")),
    ('"oom"', r'"(?:status|Action)"\s*:\s*"oom"(?=.*?"id"\s*:\s*"(?P<id>[0-9a-f]{12}))'
     r'(?=(?:.*?"name"\s*:\s*"(?P<container>[^"]+)")?)(?=(?:.*?"time"\s*:\s*(?P<epoch>\d{9,11})\b)?)',
     replace(_CONTAINER, unit="container {container|id}")),
    ("askOOM", r"TaskOOM event.*?(?:ContainerID:|container_id[=:]\s*\"?)(?P<id>[0-9a-f]{12})",
     replace(_CONTAINER, unit="container {id}")),
    ("SIGKILL to cgroup",
     r"Sending SIGKILL to cgroup .*\"cgroup\": \"(?:/sys/fs/cgroup)?(?P<task_group>/(?:[^\"]*/)?(?P<unit>[^\"]+))\"",
     Kill("container runtime", "machine", reason="the Talos controller logged the kill", signal=9, bound=_PRESSURE)),
    # Ray and Dask
    ("memory pressure (OOM)",
     r"(?P<count>\d+) Workers \(tasks / actors\) killed due to memory pressure \(OOM\)(?:.*?IP: (?P<ip>[\w.:]+))?",
     Kill("ray", "machine", sure="likely", reason="Ray's driver counted the kills without the tasks",
          unit="node {ip}", signal=9)),
    ("System memory low at node",
     r"System memory low at node.*?Used memory \((?P<usage_gb>[\d.]+)GB\) / total capacity \((?P<ram_gb>[\d.]+)GB\)"
     r"[^,]*?threshold (?P<fraction>\d+(?:\.\d+)?)(?:, killing latest task with name (?P<name>\S+))?", _RAY),
    ("memory usage threshold",
     r"(?:\((?:task|actor) ID: \w+, name=(?P<name>[^,)]+), pid=(?P<pid>\d+), memory used=(?P<rss_gb>[\d.]+)GB\) "
     r"was running )?was (?P<usage_gb>\d+(?:\.\d+)?)GB / (?P<ram_gb>\d+(?:\.\d+)?)GB \([\d.]+\), which exceeds "
     r"the memory usage threshold of (?P<fraction>\d+(?:\.\d+)?)", _RAY),
    ("memory budget", r"(?:\(pid=(?P<pid>\d+)\) )?exceeded (?P<percent>\d+)% memory budget",
     Kill("dask", "process", reason="Dask's nanny logged the kill", signal=9,
          bound=Bound(text="{percent} % of the worker's memory limit"))),
    # macOS; "macos: jetsam" is a line of multiline_logs
    ("memorystatus: killing_", r"memorystatus: killing_(?!idle_process)\w+ pid (?P<pid>\d+) \[(?P<name>[^\]]+)\] "
     r"\((?!idle-exit)(?P<why>[\w-]+)[^)]*\)(?: (?P<rss_kib>\d+)KB)?",
     replace(_MACOS, reason="the macOS kernel logged the kill ({why})")),
    ("killing largest compressed process",
     r"killing largest compressed process (?:with pid (?P<pid>\d+) \((?P<name>[^)]+)\) and size (?P<rss_mib>\d+) MB"
     r"|(?P<name2>\S.*?) \[(?P<pid2>\d+)\] (?P<rss_mib2>\d+) MB)", _MACOS),
    ("killed by jetsam",
     r"Process (?P<name>\S.*?) \[(?P<pid>\d+)\] killed by jetsam reason (?!idle-exit)(?P<why>[\w-]+)",
     replace(_MACOS, reason="macOS logged a jetsam kill ({why})")),
    ("macos: jetsam", r"macos: jetsam killed (?P<name>\S.*?) pid (?P<pid>\d+) size (?P<rss>\d+) reason (?P<why>\S+)",
     replace(_MACOS, reason="a jetsam report lists the kill ({why})")),
    ("macos: jetsam", r"macos: jetsam report, largest process (?P<name>\S.*?)(?: size (?P<rss>\d+))?\s*$",
     replace(_MACOS, sure="likely", reason="a jetsam report names the largest process, not the victim")),
)  # fmt: skip
# The first version of earlyoom; it counts only after a message about the memory.
_FIRST_EARLYOOM = Phrase(
    "Killing process ",
    re.compile(r"Killing process (?P<pid>\d+) (?P<name>\S.*?)(?:, badness .*)?$"),
    replace(_EARLYOOM, signal=9),
    needs_context=True,
)

_CONTEXT = table(
    "context",
    ("mem avail:",
     r"mem avail:\s*(?P<available_mib>\d+) of\s*(?P<ram_mib>\d+) MiB.*?swap free:\s*(?P<swapfree_mib>\d+) of\s*"
     r"(?P<swap_mib>\d+) MiB", Kill("earlyoom")),
    ("ow memory!", r"low memory! at or below SIG\w+ limits: (?P<limits>mem\s+[\d.]+ ?%, swap\s+[\d.]+ ?%)",
     Kill("earlyoom", bound=Bound(text="earlyoom acts at or below {limits} available"))),
    ("ow Memory!", r"Low Memory! At or below sig\w+ limits \((?P<limits>[^)]*)\)",
     Kill("earlyoom", bound=Bound(text="earlyoom acts at or below {limits} available"))),
    ("ut of memory!", r"Out of memory! avail: (?P<available_mib>\d+) MiB < min: (?P<minimum>\d+) MiB",
     Kill("earlyoom", bound=Bound(text="earlyoom acts below {minimum} MiB available"))),
    ("_threshold_min_mem",
     r"MemAvailable \[(?P<available_mib>\d+) MiB, [\d.]+ %\] <= (?:soft|hard)_threshold_min_mem "
     r"\[(?P<least>\d+ MiB)", Kill("nohang", bound=Bound(text="nohang acts below {least} available"))),
    ("badness:", r"PID: +(?P<pid>\d+), [Nn]ame: (?P<name>\S.*?), badness:", Kill("nohang")),
    ("VmRSS:", r"VmRSS: +(?P<rss_mib>\d+) MiB +\(Anon: (?P<anon_mib>\d+) MiB, File: (?P<file_mib>\d+) MiB, "
     r"Shmem: (?P<shmem_mib>\d+) MiB\)", Kill("nohang")),
    ("VmSwap:", r"VmSwap: +(?P<swapped_mib>\d+) MiB", Kill("nohang")),
    ("Trying to kill ", r"oomd.*\] Trying to kill (?:/sys/fs/cgroup)?(?P<task_group>/(?:\S*/)?(?P<unit>\S+))",
     Kill("oomd", "cgroup")),
    ("Picked ", r"oomd.*\] Picked \"(?:\S*/)?(?P<unit>\S+)\" \((?P<usage_mib>\d+)MB\)", Kill("oomd", "cgroup")),
    ("Job ID: ", r"^(?:Array )?Job ID: (?P<job>\S+)", Kill("slurm", "cgroup", unit="job {job}")),
    ("Shadow exception!", r"^007 \((?P<job>\d+\.\d+)\.\d+\) ", Kill("batch system", unit="job {job}")),
    ("Job was held", r"^012 \((?P<job>\d+\.\d+)\.\d+\) ", Kill("batch system", unit="job {job}")),
)  # fmt: skip

_DETAILS = table(
    "detail",
    ("Memory Utilized: ", r"Memory Utilized: (?P<usage_binary>[\d.]+ [KMGT]B)", Kill("slurm", "cgroup")),
    ("Memory Efficiency: ", r"Memory Efficiency: [\d.]+% of (?P<limit_binary>[\d.]+ [KMGT]B)", Kill("slurm", "cgroup")),
    ("escalating to SIGKILL", r"escalating to SIGKILL after", Kill("earlyoom", "machine", signal=9)),
    ("kill failed", r"kill failed: ", Kill("earlyoom", "machine", "asked to end")),
    ("did not exit", r"process (?:\d+ )?did not exit", Kill("earlyoom", "machine", "asked to end")),
    ("memory.peak", r"oom: memory\.peak = (?P<usage_binary>[\d.]+[KMGT]?)", Kill("batch system", "cgroup")),
    ("Finished:", r"^\s*Finished:\s+(?P<finished>\S.*)", Kill("container runtime")),
)  # fmt: skip

SERVICE_PHRASES = [*_KILLS, _FIRST_EARLYOOM, *_CONTEXT, *_DETAILS]
