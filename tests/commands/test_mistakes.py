"""A mistake in any command is one line with the fix, and exit code 2; nothing starts."""

import shlex
from pathlib import Path

import pytest

from plait.run.commands.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINES = Path(__file__).parents[1] / "witness" / "engine_ranks.py"
DRY = "--dropout 0 --width 16 --layers 2"
SIZES = "--layers 5 --width 32 --heads 4 --vocab 71"
TWO_BY_TWO = "--hosts 2 --ranks-per-host 2"
LARGE = '--mesh "replica=2 shard=2" --width 16384 --heads 128 --layers 96 --strategy ddp'

MISTAKES = {
    # usage: the line leads to help
    "": "expected one of {train, verify,  ... ; see plait --help",
    "brain": "unrecognized options: brain: available subcommands: train, verify,  ... ; see plait --help",
    "train -x": "unrecognized options: -x; see plait train --help",
    "submit slurm train": "unrecognized options: train: the command to submit comes after --; see plait submit --help",
    "train --mehs x": "unrecognized options: --mehs, x: did you mean --mesh?; see plait train --help",
    "train --steps many": "--steps 'many': give INT; see plait train --help",
    "train --clip many": "--clip 'many': give None|FLOAT; see plait train --help",
    "train --nonfinite no": "invalid choice 'no' ... Expected one of ('raise', 'skip') ... see plait train --help",
    "bench gpu": "invalid choice 'gpu' ... ; see plait bench --help",
    "prove --layers 3": "missing from plait prove: --mesh STR Sizes of the axes ... ; see plait prove --help",
    "report one": "missing from plait report: The second report ... ; see plait report --help",
    "schedule chek": "available subcommands: show, text, check, draw ... ; see plait schedule --help",
    "submit slurm --dry-run -- train --stepz 3": "--stepz ... ; see plait train --help",
    "submit slurm --dry-run --hostz 2 -- x.py": "--hostz ... ; see plait submit --help",
    # what several commands refuse
    "train --mesh shard=x": "mesh axis 'shard=x'",
    "train --out s3://bucket/run": "out 's3://bucket/run' is a URL: mount the object store",
    "verify --json s3://bucket/a.json": "json 's3://bucket/a.json' is a URL",
    "train --config a.toml --steps 3 --config=b.toml": "--config is given 2 times ('a.toml', 'b.toml",
    "train --length 65536 --mesh shard=16": "plait plan finds layouts that fit",
    "train --cluster none.toml": "cluster without out",
    "train --config /no/such.toml": "cannot read the config '/no/such.toml'",
    "train --steps 9 --epochs 2": "--steps 9 beside epochs 2, which are a number of steps too",
    "verify --steps=5 --epochs=1": "leave --steps out, or give --epochs None",
    "bench comm --mesh shard=1": "has 1 rank",
    "bench comm --kinds allreduce": "'allreduce'",
    # what once hung or crashed: giant numbers, files without an end
    "train --mesh shard=9223372036854775808": "",
    "train --config /dev/full": "",
    "train --config /dev/zero": "",
    "train --data /dev/zero": "",
    "verify --json /dev/full": "",
    "verify --json /tmp": "",
    "bench comm --json /dev/full": "",
    "bench comm --sizes 99999999GB": "",
    "bench comm --repeat 9223372036854775808": "",
    "schedule show 1f1b --stages 9223372036854775808": "",
    "schedule text 1f1b --stages 65536 --microbatches 65536": "",
    "schedule draw 1f1b --out /dev/full": "",
    "doctor --json /dev/full": "",
    "checkpoint show /dev/zero": "",
    "train --world thread --save-every 2": "save_every without out",
    "train --world thread --resume auto": "resume auto without out",
    "train --world thread --change lr": "change without resume",
    "train --world thread --keep 2 --out run": "keep without save_every",
    "train --world thread --restarts 2": "restarts without save_every",
    "train --world thread --restarts 2 --save-every 2 --out run": "with world thread",
    "lesson run 77": "there is no lesson 77: they are 1, 2, ",
    # verify
    "verify --model bigram": "unknown model 'bigram'",
    "verify --optimizer rmsprop": "unknown optimizer 'rmsprop'",
    "verify --experts 4": "experts 4: gpt has no experts: give --model moe, or leave it out",
    "verify --model llama --chosen 1": "chosen 1: llama has no experts",
    "verify --model mlp --capacity 2": "capacity 2.0: mlp has no experts",
    "verify --model moe --capacity 1 --pack": "capacity beside pack: a row's documents would share the room",
    "verify --model moe --chosen 9": "9 of 8 experts for each token",
    "verify --matrix small --mesh shard=4": "--mesh with --matrix",
    "verify --matrix small --steps 3": "--steps with --matrix",
    "verify --matrix small --no-ragged": "--ragged with --matrix",
    "verify --engine ddp": "drops with p=0.1, and every engine draws other masks",
    f"verify --engine dpd {DRY}": "unknown engine 'dpd': choose one of plait, ddp, fsdp2",
    f"verify --engine ddp {DRY} --mesh tensor=2": "engine ddp has no tensor axis: give --mesh",
    f"verify --engine ddp {DRY} --strategy zero1": "strategy 'zero1' beside engine",
    f"verify --engine ddp {DRY} --recompute full": "recompute 'full' beside engine",
    f"verify --engine ddp {DRY} --spread 3": "spread 3 beside engine",
    f"verify --engine ddp {DRY} --schedule zbv": "beside engine",
    f"verify --engine ddp {DRY} --dtype bf16": "dtype bf16 beside engine",
    f"verify --engine no.py:adapter {DRY}": "there is no file 'no.py'",
    f"verify --engine {ENGINES}:nothing {DRY}": "has no 'nothing'",
    f"verify --engine {ENGINES}:SEQUENTIAL {DRY}": "is str: give a function (job, model, comm)",
    f"verify --engine ddp {DRY} --matrix small": "engine 'ddp' beside matrix",
    # explain
    "explain --mesh shard=2": "has no tensor, context or expert axis",
    'explain --mesh "shard=2 context=2" --model mlp': "no module of MLP is known to gather keys and values",
    'explain --mesh "shard=2 expert=2"': "no module of GPT that owns parameters has an 'expert_axis'",
    "explain --mesh tensor=3": "cannot be shared by tensor=3",
    f"explain --mesh tensor=2 --job {EXAMPLES}/my_job.py:job": "(in the build function of a job)",
    # plan
    "plan --gpus 8xh1000": "gpus '8xh1000': did you mean h100 or",
    "plan --model hf:config.json --layers 3": "--layers beside --model hf:config.json",
    "plan --params 1B --write-script slurm": "--write-script slurm without --toml",
    "plan --params 1B --measure 1": "measure beside params: a number of parameters has no layers",
    "plan --model lama": "model 'lama': give hf:PATH",
    "plan --layers 3": "no width: give --model hf:PATH, --params",
    "plan --params 10": "params '10': give a number and M, B or T",
    "plan --model hf:nowhere/config.json": "the config",
    "plan --cluster nowhere.toml --params 1B": "the cluster",
    "plan --layers 2 --width 8 --heads 1 --vocab 8 --batch 7 --length 16": "no mesh of 8 devices",
    # prove
    "prove --mesh shard=2": "no layers: give --model hf:PATH, or --layers",
    f"prove --mesh shard=2 --all-to-all {SIZES}": "all_to_all goes over the expert axis, and mesh 'shard=2' has",
    "prove --mesh shard=2 --model bert": "model 'bert'",
    f"prove --mesh rows=2 {SIZES}": "unknown mesh axis 'rows'",
    f"prove --mesh pipe=9 {SIZES}": "9 stages, but the model has 8 links",
    f'prove --mesh pipe=2 --split "3 4 1" {SIZES}': "a split for 3 stages, but the pipeline has 2",
    f'prove --mesh pipe=2 --split "8;0" {SIZES}': 'give the links of each stage, as in "5 4"',
    f"prove --mesh shard=2 {SIZES.replace('5', '0', 1)}": "layers is 0",
    f"prove --mesh shard=2 --batch 3 {SIZES}": "3 samples cannot fill 16 parts",
    f'prove --mesh "shard=2 context=2" --ring-attention --recompute selective {SIZES}': "with ring_attention",
    # schedule
    "schedule show 1f2b": "unknown order '1f2b': did you mean 1f1b? the orders are naive, gpipe, 1f1b",
    "schedule show mine.txt": "cannot read the schedule 'mine.txt': No such file or directory",
    "schedule show interleaved --chunks 0": "chunks is 0: give a whole number from 1",
    "schedule check /no/such.txt": "cannot read the schedule '/no/such.txt': No such file or directory",
    "schedule show 1f1b --stages 0": "stages is 0: give a whole number from 1",
    "schedule show 1f1b --chunks 2": "2 chunks: 1f1b decides how many stages a rank has",
    "schedule draw 1f1b --out /no/such/folder/x.svg": "out '/no/such/folder/x.svg': there is no such folder",
    # submit
    f"submit slurm {TWO_BY_TWO} -- train --mesh shard=3": "has 3 ranks, and 2 hosts x 2 ranks are 4",
    "submit slurm -- bench comm --mesh shard=2": "has 2 ranks, and 1 hosts x 1 ranks are 1",
    f"submit slurm {TWO_BY_TWO} --memory 1 -- train {LARGE}": "2 ranks need at least ",
    f"submit slurm {TWO_BY_TWO} --gpu H100 -- train {LARGE}": "of memory, and one H100 has 74.51 GiB",
    "submit slurm --hosts 0 -- train --mesh shard=2": "hosts is 0: give a whole number from 1",
    "submit slurm": "no command: give one after --",
    "submit slurm -- htop": "'htop' is neither a command of plait nor a script",
    "submit slurm --environment NOT_THERE -- x.py": "NOT_THERE: this variable is not set",
    "submit slurm --environment HF_TOKEN=1 -- x.py": "HF_TOKEN: the name looks like a secret",
    "submit modal --image i --files ../x -- x.py": "files '../x': give the relative path",
    "submit modal --image i --files no-such -- x.py": "files 'no-such': give the relative path",
    "submit slurm --files /etc -- x.py": "files '/etc': give the relative path",
    "submit kubernetes --requeue -- x.py": "requeue is for slurm",
    "submit kubernetes --files x.py -- x.py": "kubernetes has no place for --files: put them into the image",
    "submit skypilot --dry-run --minutes 30 --files x.py -- x.py": "skypilot has no place for --minutes: leave it out",
    "submit torchx --dry-run --minutes 30 -- x.py": "torchx has no place for --minutes: leave it out",
    "submit ray --dry-run --image 30 --files x.py -- x.py": "ray has no place for --image: leave it out",
}
"""Parts of each line; none where whatever refuses it may say so."""


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("")
    assert main(shlex.split(line)) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("plait: error: ") and shown.err.count("\n") == 1
    assert all(part in shown.err for part in MISTAKES[line].split(" ... ")), shown.err
    assert [file.name for file in tmp_path.iterdir()] == ["x.py"], "nothing is begun"
