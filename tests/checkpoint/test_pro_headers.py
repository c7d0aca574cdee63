"""The largest published checkpoint, headers only: audited in under a minute and a gigabyte.

Run: .venv/bin/python -m pytest -m slow tests/checkpoint/test_pro_headers.py
"""

import json
import os
import resource
import subprocess
import sys

import pytest

from mimo_jax.timing import Stopwatch
from tests.checkpoint import pro_headers

MAX_S, MAX_BYTES = 60, 1 << 30


@pytest.mark.slow
def test_inspect_reads_headers_only(tmp_path):
    num_tensors = pro_headers.write(tmp_path / "pro")
    command = [sys.executable, "-m", "mimo_jax.checkpoint", "inspect", str(tmp_path / "pro")]
    with Stopwatch() as watch:
        done = subprocess.run(
            [*command, "--json", str(tmp_path / "report.json")],
            capture_output=True, text=True, check=False, env=os.environ,
        )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]
    assert watch.elapsed_s < MAX_S
    # The largest child so far: this process starts no other of that size.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < MAX_BYTES
    report = json.loads((tmp_path / "report.json").read_text())["target"]
    assert report["problem"] is None
    assert len(report["entries"]) == num_tensors == 159_581
    experts = [e for e in report["entries"] if ".experts." in e["key"]]
    assert len(experts) == 158_976
    # Published: 531.35 GB of experts, 570 GB in all with the drafter (5.54 GB).
    assert sum(e["num_bytes"] for e in experts) == 69 * 384 * 3 * 2048 * 6144 * 17 // 32
    total = sum(e["num_bytes"] for e in report["entries"])
    assert 0.995 < (total + 5.54e9) / 570e9 < 1.005
