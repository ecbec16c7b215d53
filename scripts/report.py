"""One HTML file that compares runs and opens offline; see `--help`.

python scripts/report.py runs/my_run runs/another_run --output report.html
"""

from ragen2_trl.cli.report import main

if __name__ == "__main__":
    main()
