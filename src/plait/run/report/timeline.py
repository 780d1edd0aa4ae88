"""Shows a measured step in a terminal: its length, and the causes of the time, by rank."""

from rich import box
from rich.table import Table

from plait.messages.wording import seconds_text
from plait.run.report.idle import Idle, idle_times, mean_idle
from plait.run.report.measured import as_log, measured_timeline
from plait.schedule.actions import Log
from plait.schedule.simulate import Timeline

CAUSES = {
    "busy": "computes",
    "warm_up": "warm-up",
    "bubble": "bubble",
    "cool_down": "cool-down",
    "imbalance": "imbalance",
    "knock_on": "knock-on",
    "communication": "communication",
    "update": "update",
    "other": "other",
}
"""The parts of ``Idle``, and their names for people."""


def summary(log: Log, simulated: Timeline | None = None) -> str:
    """A line with the step's time and the share in which ranks did not compute, measured and predicted."""
    steps = {"measured": measured_timeline(log)} | ({} if simulated is None else {"simulated": simulated})
    return "; ".join(f"{n} {seconds_text(s.makespan)}, idle {s.idle_share():.1%}" for n, s in steps.items())


def timeline_rows(log: Log, simulated: Timeline | None = None) -> list[tuple[str, ...]]:
    """A header, and rows with shares of the step: each rank's, their means, and the means of the simulated step."""
    rows = [("rank", "stages", *CAUSES.values(), "idle")]
    for rank, idle in enumerate(idle_times(log)):
        stages = sorted({event.action.stage for event in log[rank]})
        rows.append((str(rank), ", ".join(map(str, stages)), *_shares(idle)))
    means = {"all": log} | ({} if simulated is None else {"simulated": as_log(simulated)})
    return rows + [(name, "", *_shares(mean_idle(idle_times(step)))) for name, step in means.items()]


def _shares(idle: Idle) -> list[str]:
    """Each part divided by the step, and the idle total."""
    return [f"{share:.1%}" for share in (*(idle.shares[part] for part in CAUSES), 1 - idle.shares["busy"])]


def timeline_table(log: Log, simulated: Timeline | None = None) -> Table:
    """``timeline_rows`` for a terminal, under ``summary``: a column for each rank, a line for each cause there is."""
    head, *columns = timeline_rows(log, simulated)
    title = summary(log, simulated)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, min_width=len(title))
    table.add_column("")
    for name, *_ in columns:
        table.add_column(f"rank {name}" if name.isdecimal() else name, justify="right", no_wrap=True)
    for index, name in enumerate(head[1:], 1):
        cells = [column[index] for column in columns]
        if name in ("stages", "computes", "idle") or any(cell != "0.0%" for cell in cells):
            table.add_row(name, *cells)
    return table
