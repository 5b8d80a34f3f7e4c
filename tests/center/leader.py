"""A leader in a process of its own, for tests that kill it: ``leader.py ADDRESS JOB_DIR``.

Prints the numbers of its zygote, its agent and a child that it forks and that
outlives it; then sleeps.
"""

from __future__ import annotations

import os
import sys
import time

from gluon_esgd.center import CenterLink

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # as the launcher binds a rank
link = CenterLink(
    sys.argv[1], client=0, num_clients=1, num_servers=1, sync=False, job_dir=sys.argv[2],
    start_timeout_s=60.0,
)  # fmt: skip
agent = link.agent_pid
child = os.fork()  # inherits both sockets, as a DataLoader worker does
if child:
    print(link.zygote_pid, agent, child, flush=True)
time.sleep(600)
