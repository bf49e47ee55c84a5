"""Triton-Ascend's own virtual environment runs these tests: ``make ascend-kernels``."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]
