"""Schedules: the order of compute and communication in one step, one file a mode.

The file name is the name the user types for `--mode`. A schedule starts one program (a generator)
for each process, or for each class of processes that cannot differ.
"""

from dpsim.schedules._registry import SCHEDULES, Schedule

__all__ = ["SCHEDULES", "Schedule"]
