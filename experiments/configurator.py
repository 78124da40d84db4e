"""Says how to run the programs of this folder.

Python looks for modules in the folder of the file that it runs. So `python experiments/page.py`
finds this file in place of the configurator.py that the program needs.
"""
import sys
from pathlib import Path

print(f"use python -m experiments.{Path(sys.argv[0]).stem}", file=sys.stderr)
sys.exit(2)
