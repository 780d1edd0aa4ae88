"""Resumes a run: the values that ``plait train`` adds to a checkpoint, and those that must be the same afterwards.

    OUT/checkpoints/step-000120      the engine's state (``plait.save``), and as extra:
        config      every setting                 those that decide the run are compared, field by field
        data        a digest of the text          another text is another run
        schedule    the learning rate's
        layouts     those of the run so far       others are free: every layout loads every checkpoint

A batch is a function of its step, so the step is the whole data cursor, no matter how far workers have read ahead.
"""

import secrets
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from plait.checkpoint.folder import CHECKPOINTS, checkpoints, discard, find, step_of
from plait.checkpoint.load import load, read_values
from plait.checkpoint.stored import Checkpoint
from plait.comm import Comm
from plait.comm.texts import broadcast_text
from plait.messages.escape import say
from plait.messages.wording import did_you_mean
from plait.run.config.file import from_toml
from plait.run.config.settings import TrainConfig
from plait.run.config.sinks import METRICS
from plait.run.job.config import JobConfig
from plait.run.job.job import Job
from plait.run.job.optimizer import OptimizerConfig
from plait.run.job.sections import flags
from plait.run.watch.processes import launcher, started
from plait.step import Engine
from plait.table.collectives import Note

AUTO = "auto"
SETTINGS = "config.toml"
"""The first file that a run writes, once an earlier run's files are gone."""
SUMMARY = "summary.json"
"""The last file that a run writes: a folder that has it is finished."""
DECIDING = [name for name in flags(JobConfig()) if name != "data"]
"""Settings that decide the run; only the text of the data is compared, not its path."""
RATES = [field.name for field in fields(OptimizerConfig) if field.name not in ("optimizer", "clip", "loss_scale")]
FIXED = ("optimizer", "seed", "loss_scale")
"""Settings that cannot change within a run, since its state belongs to them."""
FREE = ("lr", "foreach", "fused", "capturable")
"""Options of an optimizer that its schedule sets, or that choose how it computes."""
MISSING = "nothing"


def folder_of(config: TrainConfig) -> Path:
    if config.output.out is None:
        raise ValueError("resume auto without out, where checkpoints are kept: give --out DIR")
    return Path(config.output.out) / CHECKPOINTS


def find_resumed(config: TrainConfig) -> Path | None:
    """Returns the checkpoint that the run goes on from; None: it begins anew.  ValueError if the named one does not
    exist."""
    if config.output.resume is None:
        return None
    return _newest(config) if config.output.resume == AUTO else find(config.output.resume)


def _newest(config: TrainConfig) -> Path | None:
    return next(reversed(checkpoints(folder_of(config))), None)


def check_places(config: TrainConfig) -> str | None:
    """Checks a run's folders before any rank starts; returns the reason if nothing is left to do, else None.

    It refuses checkpoint settings that do not fit together, a run that differs from the one it goes on from, and a
    folder in which it would find checkpoints that it did not write.  ValueError with the settings, each with both
    values, and the fix; or if the run was ended after its last step.
    """
    output, course = config.output, config.course
    if course.restarts and config.machine.world == "thread":
        raise ValueError(f"restarts {course.restarts} with world thread, which ends with its process: leave it out")
    if course.verify and output.change:
        raise ValueError("verify beside change: no single process makes such a run; leave one of them out")
    if unknown := [name for name in output.change if name not in (*DECIDING, "data")]:
        otherwise = "layout and places may differ without it; leave it out"
        hint = did_you_mean(unknown[0], [*DECIDING, "data"], otherwise, most=3)
        raise ValueError(f"change {' '.join(unknown)}: no such setting decides a run: {hint}")
    resumed, step = find_resumed(config), 0
    if resumed is not None:
        values = read_values(resumed)
        step, kept = values["run"]["step"], kept_of(values, resumed)
        differences(config, kept)
        end = end_of(config, kept)
        if step == end and output.resume == AUTO:
            check_finished(config, resumed)
            return f"{str(resumed)!r} has made {step} steps, and the run ends at {end}: nothing is left to do"
        if end is not None:
            check_left(resumed, step, end)
    if output.out is not None and output.resume is not None and not output.overwrite:
        _check_metrics(config, resumed)
    if output.out is not None and output.save_every is not None and (course.restarts or not output.overwrite):
        later = [folder for folder in checkpoints(folder_of(config)) if step_of(folder) > step]
        if later:
            where = f"step {step}" if step else "the beginning"
            fix = "" if course.restarts else ", or --overwrite"  # a restart would take it for its own
            raise ValueError(
                f"the run goes on from {where}, and {str(later[-1])!r} is there already: --resume auto goes on from "
                f"it; give another folder, or move it away{fix}"
            )
    return None


def restarted(config: TrainConfig, attempt: int, begun: bool) -> TrainConfig:
    """Returns the settings of an attempt that follows others: it goes on from the newest checkpoint.  Before the first
    checkpoint it begins again in the same folder, if that has only the files of those attempts.  ``begun`` is True if
    one of them wrote its settings there (``has_settings``); otherwise the files are another run's."""
    if not attempt or config.output.out is None or not begun:
        return config
    if _newest(config) is None:
        return config.with_flags(overwrite=config.output.overwrite or _has_begun(config))
    return config.with_flags(resume=AUTO, overwrite=False)


def has_settings(config: TrainConfig) -> bool:
    """True if an attempt since this rank's launcher began has written its settings: later checkpoints are its own."""
    launch = launcher()
    try:
        return (Path(config.output.out or "") / SETTINGS).stat().st_mtime >= (started(launch[0]) if launch else 0)
    except OSError:  # all ranks report a fault of the place later
        return False


def end_of(config: TrainConfig, kept: Mapping[str, Any]) -> int | None:
    """Returns the last step of a run that goes on from the result of ``kept_of``; None before the text is read."""
    if config.task.samples.epochs is None:
        return config.task.samples.steps
    return kept["config"]["steps"] if kept["config"].get("epochs") == config.task.samples.epochs else None


def check_finished(config: TrainConfig, last: Path) -> None:
    """Raises ValueError if a run has made all of its steps but ended before its summary, which comes last."""
    if not (Path(config.output.out or "") / SUMMARY).exists():
        raise ValueError(
            f"{str(last)!r} has all steps of the run, which was ended before what follows them was made: verify, "
            f"export, {SUMMARY}; --overwrite makes it, with --resume and an earlier checkpoint or from the beginning"
        )


def newest_sound(config: TrainConfig) -> str:
    """Returns a run's newest checkpoint whose files are undamaged, or ""; renames later ones. Only one process may call
    it, while no rank runs.  ValueError if it has all steps of the run (``check_finished``)."""
    for folder in reversed(checkpoints(folder_of(config))) if config.output.out is not None else ():
        try:
            Checkpoint.find(folder).check()
        except ValueError as error:
            damaged = folder.with_name(f"damaged-{folder.name}-{secrets.token_hex(4)}")
            folder.rename(damaged)
            say(f"plait: {error}\nplait: it is put aside as {str(damaged)!r}\n")
            continue
        values = read_values(folder)
        if values["run"]["step"] == end_of(config, kept_of(values, folder)):
            check_finished(config, folder)
        return str(folder)
    return ""


def hint_to_resume(config: TrainConfig) -> str:
    """Says how a run that was ended may go on; "" if it has no checkpoint."""
    newest = _newest(config) if config.output.out is not None else None
    return f"the same command with --resume auto goes on from {str(newest)!r}" if newest else ""


def check_left(path: object, step: int, end: int) -> None:
    """Raises ValueError if a resumed run has no steps left."""
    if step >= end:
        raise ValueError(
            f"{str(path)!r} has made {step} steps, and the run ends at {end}: there is nothing to go on with; give "
            f"more --steps, or --epochs"
        )


def _check_metrics(config: TrainConfig, resumed: Path | None) -> None:
    """Refuses a folder with the metrics of a run other than the one that goes on or begins again."""
    out = Path(config.output.out or "")
    if not (out / METRICS).exists() or (resumed and resumed.resolve().parent == folder_of(config).resolve()):
        return
    if resumed is not None or not _has_begun(config):
        raise ValueError(
            f"out {config.output.out!r} has the metrics of a run other than the one to go on with: give another "
            f"folder, or --overwrite"
        )


def _has_begun(config: TrainConfig) -> bool:
    """True if a folder holds the files of this run, ended before its first checkpoint."""
    out = Path(config.output.out or "")
    if not (out / SETTINGS).exists() or (out / SUMMARY).exists():
        return False
    before = from_toml(TrainConfig, str(out / SETTINGS))
    names = {*DECIDING, "data"} - ({"steps"} if config.task.samples.epochs is not None else set())  # they follow
    return all(flags(before)[name] == flags(config)[name] for name in names)


def kept_of(values: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Returns the values that this module added to a checkpoint; ValueError if another program wrote it."""
    match values["extra"]:
        case {"config": {"steps": int()}, "data": str() | None, "schedule": _, "layouts": [*_, str()]} as extra:
            return extra  # type: ignore[no-any-return]
    raise ValueError(f"{str(path)!r} was not written by plait train: load it in a loop of your own, with plait.load")


def differences(config: TrainConfig, kept: Mapping[str, Any], data: str | None = None) -> dict[str, str]:
    """The deciding settings that have changed, each in words; ``change`` may also name settings that have not.
    ValueError if it does not name a difference, or the setting cannot change.  ``data`` is a digest of the text, once
    it has been read."""
    was = kept["config"]
    unsaid, given = flags(JobConfig()), flags(config)
    free: tuple[str, ...] = ()
    if config.task.update.lr_schedule == "constant":  # then the length of a run does not affect its steps
        free = ("steps", "epochs")
    elif config.task.samples.epochs is not None:  # steps follow from them, and are known when the text has been read
        free = ("steps",)
    pairs = [(name, was.get(name, unsaid[name]), _plain(given[name])) for name in DECIDING if name not in free]
    found = [pair for pair in pairs if pair[1] != pair[2]]
    if data is not None and data != kept["data"]:
        both = ((was.get("data"), kept["data"]), (config.task.samples.data, data))
        first, second = (" ".join(filter(None, (path, f"digest {own}"))) for path, own in both)
        found.append(("data", first, second))
    changed = {name: f"{name} was {was!r} and is {now!r}" for name, was, now in found}
    if fixed := [changed[name] for name in FIXED if name in changed]:
        raise ValueError(f"{fixed[0]}, which cannot change within a run: begin a new one")
    if refused := {name: one for name, one in changed.items() if name not in config.output.change}:
        raise ValueError(
            f"this is a run other than the one to go on with: {'; '.join(refused.values())}. Give the settings of "
            f"that run, or --change {' '.join(refused)}"
        )
    return changed


def _plain(value: Any) -> Any:
    """Returns a value in the form in which a checkpoint returns it."""
    return value if isinstance(value, str | int | float | type(None)) else str(value)


def resume(
    config: TrainConfig, job: Job, comm: Comm, engine: Engine, scheduler: LRScheduler | None, console: Console
) -> list[str]:
    """Loads the checkpoint of the config; returns the layouts of the run so far.  All ranks call it together."""
    found = str(find_resumed(config) or "") if not comm.rank else ""
    if not (found := broadcast_text(comm, found, Note("state"))):
        return []
    options = [{key: value for key, value in group.items() if key != "params"} for group in _groups(engine)]
    loaded = load(found, engine)
    kept = kept_of({"extra": loaded.extra}, loaded.path)
    changed = differences(config, kept, job.digest())
    check_left(loaded.path, engine.steps, config.task.samples.steps)
    if changed.keys() & {"steps", "epochs", *RATES}:
        _set_rates(engine, scheduler, options)
    else:
        _check_options(engine, options)
        if scheduler is not None:
            scheduler.load_state_dict(kept["schedule"])
    say = partial(console.print, markup=False)
    say(f"resumed at step {engine.steps} from {loaded.path}")
    for one in changed.values():
        say(f"  changed: {one}")
    layouts = [str(layout) for layout in kept["layouts"]]
    if layouts[-1] != (now := layout_of(config)):
        say(f"  another layout: was {layouts[-1]}, is {now}")
    return layouts


def _groups(engine: Engine) -> list[dict[str, Any]]:
    return [group for one in engine.optimizers for group in one.param_groups]


def _check_options(engine: Engine, options: list[dict[str, Any]]) -> None:
    """Refuses an optimizer (a job's own) whose options differ from those saved: the saved ones would silently replace
    them."""
    for number, (group, own) in enumerate(zip(_groups(engine), options, strict=True)):
        for name in (name for name in own if name not in FREE):
            if (was := group.get(name, MISSING)) != own[name]:
                raise ValueError(
                    f"{name} of group {number} of the optimizer was {was!r} and is {own[name]!r}, and the saved one "
                    f"would be taken: put it back, or begin a new run"
                )


def _set_rates(engine: Engine, scheduler: LRScheduler | None, options: list[dict[str, Any]]) -> None:
    """Sets the groups' options to those of the new settings, and moves the schedule to this step."""
    groups = _groups(engine)
    for group, own in zip(groups, options, strict=True):
        group.update(own)
    if scheduler is not None:
        assert isinstance(scheduler, LambdaLR)
        scheduler.last_epoch = engine.steps
        for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = rate * factor(engine.steps)


def layout_of(config: TrainConfig) -> str:
    """Describes the parts of a layout that, with its settings, decide the bits of a run."""
    more = f", cut by {config.layout.cut}" if config.layout.cut != "element" else ""
    ranks = f"{config.machine.parsed_mesh}, {config.layout.microbatches} microbatches{more}"
    return f"{config.row} on {ranks}, threads {config.machine.threads}, torch {torch.__version__}"


def extra_of(config: TrainConfig, job: Job, scheduler: LRScheduler | None, layouts: list[str]) -> dict[str, Any]:
    """Returns the values that this module adds to a checkpoint."""
    return {
        "config": {name: _plain(value) for name, value in flags(config).items()},
        "data": job.digest(),
        "schedule": None if scheduler is None else scheduler.state_dict(),
        "layouts": layouts,
    }


def remove_later(config: TrainConfig, step: int) -> None:
    """With ``overwrite``, removes the checkpoints of an earlier run that this one would find."""
    for folder in checkpoints(folder_of(config)):
        if config.output.overwrite and step_of(folder) > step:
            discard(folder)
