"""Side-by-side measurements, each a command of its own: `python -m research.benchmarks.<name>`."""
