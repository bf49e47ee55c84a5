"""What splitkv's public names cost beyond ``import torch``: seconds, in fresh interpreters.

python -m benchmarks.import_time
"""

import statistics
import subprocess
import sys

RUNS = 7
CODE = (
    "import time, torch; start = time.perf_counter(); import splitkv; "
    "names = [getattr(splitkv, name) for name in splitkv.__all__]; "
    "print(time.perf_counter() - start)"
)


def main() -> None:
    """Print the median and the range."""
    command = [sys.executable, "-c", CODE]
    seconds = sorted(
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(RUNS)
    )
    print(
        "all public names of splitkv, torch already imported: "
        f"median {statistics.median(seconds):.3f} s, {seconds[0]:.3f} to {seconds[-1]:.3f} s "
        f"over {RUNS} interpreters"
    )


if __name__ == "__main__":
    main()
