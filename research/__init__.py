"""Claims that can be rerun: a YAML of runs, seeds and checks, its runs, and what came of them."""
