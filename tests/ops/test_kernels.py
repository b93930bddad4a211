"""The compiler of the CPUs' kernels."""

from __future__ import annotations

import os
import subprocess
import sys

CHOOSE = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
import torch
from thinwire.ops import sparse
values, words = torch.arange(640.0).view(1, -1), torch.zeros(1, 10, dtype=torch.int64)
sparse.marked(values, (sparse.ListSegment(0, 640, 3, 0),), words)
print(words[0, -1].item() == WANTED)
"""


def test_a_full_disk_under_the_machine_code_ends_nothing(tmp_path):
    """The quota of a home folder, where numba keeps it, is used up more often than the disk of a run."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    program = CHOOSE.replace("WANTED", str((7 << 61) - (1 << 64)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
