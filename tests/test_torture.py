import re
import subprocess
import sys

import pytest

from conftest import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="tests/torture.py forks a process that has imported torch, and limits its memory")
def test_a_short_torture_of_every_kind_finds_nothing():
    done = subprocess.run([sys.executable, ROOT / "tests/torture.py", "--minutes=0.3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(re.findall(r"^(\w+): (\d+) cases, 0 failures$", done.stdout, re.MULTILINE))
    assert {"flags", "configs", "meta", "shards", "progress", "log", "bits", "keys", "runs", "kill", "disk", "race"} == counts.keys()
    assert all(int(count) > 0 for count in counts.values())
