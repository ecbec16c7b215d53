"""What a run leaves on disk, and what is read back of it: files, lock, settings, logs, measurements, episodes.

Nothing here draws.
"""

from ragen2_trl.record.run import Run, read_run

__all__ = ["Run", "read_run"]
