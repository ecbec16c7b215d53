"""Claims that can be rerun: a YAML of cells, seeds and checks, its runs, and what came of them."""
