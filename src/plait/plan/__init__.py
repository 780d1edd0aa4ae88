"""The planner: what a layout will send and hold, computed from shapes alone.  Pure: imports no torch."""
