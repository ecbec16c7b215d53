"""Which prompts come next, which are worth their remaining completions, and how many rounds a step samples.

`policy.py` decides, with NumPy alone: the trainers call it, and what-if replays it over a log. `sampler.py` does what
it decides, inside TRL's sampling.
"""
