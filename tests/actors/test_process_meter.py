"""Memory and CPU time of processes, by role."""

import os
import subprocess
import sys

from actors.wire.process_meter import ProcessMeter


def test_cpu_time_of_an_ended_process_stays_counted():
    code = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\nsys.stdin.read()"
    processes = [("engine", os.getpid())]
    meter = ProcessMeter(lambda: processes)
    for _ in range(2):  # the second takes the place of the first
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            processes.append(("runner", child.pid))
            used = meter.read()
            assert used.memory["runner"] > 1 << 20
            child.stdin.close()
        processes.pop()
    assert used.cpu["runner"] >= 2 * 0.19  # of ticks of 10 ms
    after = meter.read()
    assert after.cpu["runner"] == used.cpu["runner"]
    assert set(after.memory) == {"engine"}


def test_ended_processes_are_left_out():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert ProcessMeter(lambda: [("runner", child.pid)]).read() == ({}, {})
