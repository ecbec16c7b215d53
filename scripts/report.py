"""One HTML file that compares runs and opens offline; see `--help`.

python scripts/report.py runs/my_run runs/another_run --output report.html
"""

import sys

from ragen2_trl.cli import main

if __name__ == "__main__":
    main(["report", *sys.argv[1:]])
