"""A real sweep on two GPUs of one model: both work, and the table is as right as one of one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

TWO = torch.cuda.device_count() >= 2 and torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1)
SWEEP = """
import json, sys, threading
from pathlib import Path
from moetune import tuning
from moetune.engine.events import TokenDone, Warned
from moetune.store import Store
from moetune_kernels.shape import MoEShape

folder, threads, done, warned = Path(sys.argv[1]), set(), [], []

def on_event(event):
    if isinstance(event, TokenDone):
        threads.add(threading.current_thread().name)
        done.append(event.entry.tokens)
    if isinstance(event, Warned):
        warned.append(event.text)

request = tuning.SweepRequest(
    shape=MoEShape(hidden=1024, inter=512, local_experts=8, top_k=2), tokens=(1, 4, 16, 64, 256, 1024), beside=(1,),
    out_dir=folder / "tables", store_path=folder / "trials.sqlite", budget_s=120.0,
)
result = tuning.sweep(request, on_event)
with Store.to_read(folder / "trials.sqlite") as store:
    (run,) = store.runs()
faster = [entry.median_us <= 1.005 * entry.baseline_us for entry in result.table.entries.values()]
print(json.dumps({"threads": sorted(threads), "done": sorted(done), "gpu": run.gpu, "faster": faster, "warned": warned}))
"""


@pytest.mark.skipif(not TWO, reason="needs two GPUs of one model")
def test_two_gpus_share_a_sweep(tmp_path):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry))
    command = [sys.executable, "-c", SWEEP, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["threads"]) == 2
    assert found["done"] == [1, 4, 16, 64, 256, 1024]
    assert len(set(found["gpu"].split(","))) == 2
    assert all(found["faster"])
    assert not [text for text in found["warned"] if "leaves the sweep" in text or "left out" in text]
