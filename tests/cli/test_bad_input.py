"""Bad input of every verb ends in a sentence and its exit code, and never in a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from atorch_ns import Strategy
from tests.cli.conftest import Run
from tests.cli.verbs import VERBS, commands

_MODEL = ("--model", "job.py:build", "--sample", "job.py:sample")
_PLANNED = (*_MODEL, "--cluster", "2xcpu")

FILES = {
    "broken.json": "{",
    "binary.bin": "\x00\x01",
    "empty.json": "",
    "schema9.json": json.dumps({"schema": 9, "steps": []}),
    "report9.json": json.dumps({"kind": "atorch_ns report", "schema": 9}),
    "raises.py": "raise RuntimeError('no licence')\n",
    "syntax.py": "def build(:\n",
    "text.txt": "hello\n",
    "leaves.py": "import sys\nsys.exit()\n",
    "odd.py": """
import torch

none, number, text = None, 17, ["a", "b"]
empty = torch.zeros(0, 32)


def exits():
    raise SystemExit(0)
""",
}

CASES: list[tuple[str, tuple[str, ...], int, str]] = [
    # a file that is missing
    ("strategy show", ("missing.json",), 2, "no such strategy file"),
    ("strategy validate", ("missing.json",), 2, "no such strategy file"),
    ("strategy diff", ("fine.json", "missing.json"), 2, "no such strategy file"),
    ("strategy convert", ("missing.yaml", "out.json"), 2, "cannot be read"),
    ("explain", ("missing.json",), 2, "no such file"),
    ("train", ("-f", "missing.yaml"), 2, "cannot read missing.yaml"),
    ("train", ("-f", "config.yaml", "max_epochs", "2"), 2, "'max_epochs' is not an override"),
    ("report", ("missing.json",), 2, "missing.json"),
    ("diff", ("missing.json", "fine.json"), 2, "Methods by name: fsdp,checkpoint (missing.json)"),
    ("history", ("missing.journal",), 2, "is not there"),
    (
        "estimate",
        ("--strategy", "missing.json", *_PLANNED),
        2,
        "no such strategy file. Methods by name: --strategy fsdp,checkpoint (missing.json)",
    ),
    ("plan", ("--profile", "missing.json"), 2, "cannot be read"),
    (
        "verify",
        ("--strategy", "missing.json", *_MODEL),
        2,
        "no such strategy file. Methods by name: --strategy fsdp,checkpoint (missing.json)",
    ),
    ("calibrate", ("-o", "none/c.yaml"), 2, "--output=none/c.yaml: the folder none does not exist"),
    ("calibrate", ("-o", "fine.json"), 2, "fine.json exists and holds something other than measured speeds"),
    ("plan", (*_MODEL, "--cluster", "no.yaml"), 2, "the cluster file no.yaml cannot be read: No such file"),
    ("launch", ("missing.py",), 2, "is not there"),
    # a folder where a file is wanted
    ("strategy show", ("folder.d",), 2, "cannot read the strategy file: Is a directory (folder.d)"),
    ("strategy convert", ("folder.d", "out.json"), 2, "folder.d"),
    ("explain", ("folder.d",), 2, "folder.d"),
    ("report", ("folder.d",), 2, "folder.d"),
    ("history", ("folder.d",), 2, "is a folder"),
    ("launch", ("folder.d",), 2, "is a folder"),
    ("history", ("empty.json",), 2, "is empty"),
    ("strategy validate", ("fine.json", "--world-size", "0"), 2, "--world-size 1 or more"),
    (
        "strategy show",
        ("schema9.json",),
        2,
        "the strategy file has schema 9; this version reads schema 1. Read it",
    ),
    ("search", (*_MODEL, "--save", "folder.d"), 2, "is a folder"),
    # no folder for what is to be written
    ("search", (*_MODEL, "--save", "nowhere/s.json"), 2, "does not exist"),
    ("strategy convert", ("fine.json", "nowhere/out.json"), 2, "nowhere"),
    # content that cannot be read
    ("strategy show", ("broken.json",), 2, "truncated or damaged"),
    ("strategy show", ("empty.json",), 2, "empty"),
    ("strategy validate", ("broken.json",), 2, "truncated or damaged"),
    ("strategy diff", ("broken.json", "fine.json"), 2, "truncated or damaged"),
    ("strategy convert", ("broken.json", "out.json"), 2, "truncated or damaged"),
    ("strategy convert", ("text.txt", "out.json"), 2, "whose file this is"),
    ("explain", ("broken.json",), 2, "truncated or damaged"),
    ("report", ("broken.json",), 2, "broken.json"),
    ("diff", ("broken.json", "fine.json"), 2, "truncated or damaged"),
    ("history", ("text.txt",), 2, "is not a history"),
    ("history", ("binary.bin",), 2, "is not a history"),
    ("verify", ("--strategy", "broken.json", *_MODEL), 2, "truncated or damaged"),
    ("plan", ("--profile", "broken.json"), 2, ""),
    # another version of a file
    ("strategy show", ("schema9.json",), 2, "schema"),
    ("strategy validate", ("schema9.json",), 2, "schema"),
    ("explain", ("report9.json",), 2, "schema 9"),
    ("report", ("report9.json",), 2, "schema 9"),
    ("verify", ("--strategy", "schema9.json", *_MODEL), 2, "schema"),
    # places in code
    ("plan", ("--model", "jbo:build", "--sample", "job.py:sample"), 2, "there is no module 'jbo'"),
    ("plan", ("--model", "raises.py:build", "--sample", "job.py:sample"), 2, "RuntimeError: no licence"),
    ("plan", ("--model", "syntax.py:build", "--sample", "job.py:sample"), 2, "SyntaxError"),
    ("estimate", ("--strategy", "ddp", "--model", "raises:build", "--sample", "job:sample"), 2, "no licence"),
    ("diff", ("ddp", "fsdp", "--model", "raises.py:b", "--sample", "job.py:sample"), 2, "no licence"),
    ("search", ("--model", "jbo:build", "--sample", "job.py:sample"), 2, "there is no module 'jbo'"),
    ("search", ("--model", "raises.py:build", "--sample", "job.py:sample"), 2, "no licence"),
    ("search", ("--model", "job.py:number", "--sample", "job.py:sample"), 2, "is an int"),
    ("search", ("--model", "job.py:sample", "--sample", "job.py:sample"), 2, "must return a torch.nn.Module"),
    ("search", ("--model", "job.py:fails", "--sample", "job.py:sample"), 2, "no such corpus"),
    ("search", ("--model", "job.py:build", "--sample", "job.py:fails"), 2, "no such corpus"),
    ("search", (*_MODEL, "--loss", "job.py:number"), 2, "must be a function"),
    ("search", (*_MODEL, "--optimizer", "torch.optim.AdmW"), 2, "Did you mean 'AdamW'"),
    ("verify", ("--strategy", "ddp", "--model", "jbo:b", "--sample", "job.py:sample"), 2, "no module 'jbo'"),
    ("verify", ("--strategy", "ddp", "--model", "raises.py:b", "--sample", "job.py:s"), 2, "no licence"),
    (
        "verify",
        ("--strategy", "ddp", "--model", "job.py:build", "--sample", "job.py:smple"),
        2,
        "Did you mean",
    ),
    (
        "plan",
        ("--model", "job.py", "--sample", "job.py:sample"),
        2,
        "Write job.py:NAME. It defines Model, build",
    ),
    ("plan", ("--model", "job.py:", "--sample", "job.py:sample"), 2, "Write job.py:NAME"),
    ("plan", ("--model", "none.py", "--sample", "job.py:sample"), 2, "Write none.py:NAME."),
    # code that ends the process
    (
        "plan",
        ("--model", "odd.py:exits", "--sample", "job.py:sample"),
        2,
        "could not be built: SystemExit: 0",
    ),
    ("plan", ("--model", "leaves.py:build", "--sample", "job.py:sample"), 2, "leaves.py failed: SystemExit."),
    ("plan", ("--model", "job.py:build", "--sample", "odd.py:exits"), 2, "failed: SystemExit: 0"),
    ("search", ("--model", "odd.py:exits", "--sample", "job.py:sample"), 2, "could not be built: SystemExit"),
    (
        "verify",
        ("--strategy", "ddp", "--model", "odd.py:exits", "--sample", "job.py:sample"),
        2,
        "SystemExit",
    ),
    # what is not a batch
    ("plan", (*_MODEL[:2], "--sample", "odd.py:none"), 2, "is None, which holds no tensor"),
    ("estimate", ("--strategy", "ddp", *_MODEL[:2], "--sample", "odd.py:number"), 2, "is 17, which holds no"),
    (
        "estimate",
        ("--strategy", "ddp", *_MODEL[:2], "--sample", "odd.py:text"),
        2,
        "is a list, which holds no",
    ),
    ("estimate", ("--strategy", "ddp", *_MODEL[:2], "--sample", "odd.py:empty"), 2, "is an empty batch"),
    ("plan", (*_PLANNED, "--input-format", "first"), 2, "does not fit the input format first"),
    ("plan", (*_PLANNED, "--input-format", "unpack_dict"), 2, "but the data is a Tensor of shape (4, 32)"),
    # outputs, before the work
    ("search", (*_MODEL, "--save", "/proc/s.json"), 2, "--save=/proc/s.json cannot be written"),
    (
        "plan",
        (*_PLANNED, "--save-profile", "/proc/p.json"),
        2,
        "--save-profile=/proc/p.json cannot be written",
    ),
    # names
    ("methods", ("fsdpp",), 2, "Did you mean 'fsdp'"),
    ("estimate", ("--strategy", "fsdpp", *_PLANNED), 2, "Did you mean 'fsdp'"),
    ("verify", ("--strategy", "fsdpp", *_MODEL), 2, "Did you mean 'fsdp'"),
    ("plan", (*_PLANNED, "--exclude", "fsdpp"), 2, "fsdp"),
    ("search", (*_MODEL, "--exclude", "fsdpp"), 2, "fsdp"),
    ("strategy convert", ("text.txt", "out.json", "--from", "megatron"), 2, "accelerate or deepspeed"),
    ("doctor", ("--only", "port"), 2, "There are versions, backends, ports"),
    ("history", ("text.txt", "--study"), 2, "requires an argument"),
    # devices
    ("plan", (*_MODEL, "--cluster", "8xH100-80G"), 2, "H100-80GB"),
    ("estimate", ("--strategy", "ddp", *_MODEL, "--cluster", "8xTPU"), 2, "TPU"),
    ("diff", ("ddp", "fsdp", *_MODEL, "--cluster", "0xcpu"), 2, "0"),
    # numbers
    ("plan", (*_PLANNED, "--batch", "0"), 2, "at least 1"),
    ("plan", (*_PLANNED, "--batch", "-4"), 2, "at least 1"),
    ("plan", (*_PLANNED, "--memory-limit", "-1GiB"), 2, "70GiB"),
    ("plan", (*_PLANNED, "--top", "0"), 2, "--top"),
    ("estimate", ("--strategy", "ddp", *_PLANNED, "--batch", "0"), 2, "at least 1"),
    ("strategy validate", ("fine.json", "--world-size", "-2"), 2, "--world-size"),
    ("search", (*_MODEL, "--nproc", "0"), 2, "at least one process"),
    ("search", (*_MODEL, "--nproc", "-2"), 2, "at least one process"),
    ("search", (*_MODEL, "--nproc", "two"), 2, "--nproc"),
    ("search", (*_MODEL, "--time-limit", "0"), 2, "must be positive"),
    ("search", (*_MODEL, "--max-trials", "0"), 2, "at least one trial"),
    ("search", (*_MODEL, "--batch", "-1"), 2, "at least 1"),
    ("search", (*_MODEL, "--memory-limit", "much"), 2, "70GiB"),
    ("search", (*_MODEL, "--objective", "speed"), 2, "--objective"),
    ("verify", ("--strategy", "ddp", *_MODEL, "--nproc", "0"), 2, "at least one process"),
    ("verify", ("--strategy", "ddp", *_MODEL, "--steps", "0"), 2, "at least one step"),
    ("verify", ("--strategy", "ddp", *_MODEL, "--timeout", "-1"), 2, "must be positive"),
    ("launch", ("--nproc", "0", "job.py"), 2, "at least one process"),
    ("launch", ("--nproc", "-1", "job.py"), 2, "at least one process"),
    ("launch", ("--nnodes", "0", "job.py"), 2, "at least one node"),
    ("launch", ("--nnodes", "2", "job.py"), 2, "--rendezvous"),
    ("launch", ("--threads", "0", "job.py"), 2, "at least 1"),
    ("launch", ("--nnodes", "3:2", "--rendezvous", "a:1", "job.py"), 2, "MIN is more than MAX"),
    ("launch", ("--nnodes", "2", "--rendezvous", "a:99999", "job.py"), 2, "from 1 to 65535"),
    (
        "launch",
        ("--nnodes", "2", "--node-rank", "5", "--rendezvous", "a:1", "job.py"),
        2,
        "less than --nnodes=2",
    ),
    ("launch", ("--rendezvous", "a:1", "job.py"), 2, "--rendezvous has no effect on one node"),
    ("launch", ("--node-rank", "0", "--rendezvous", "a:1", "job.py"), 2, "--rendezvous and --node-rank have"),
    (
        "launch",
        ("--nnodes", "2", "--rendezvous", "no.host.invalid:1", "job.py"),
        2,
        "'no.host.invalid' is not known",
    ),
    ("launch", ("--module", "nosuch.mod"), 2, "no module 'nosuch.mod'"),
    ("launch", ("--", "-d.py"), 2, "the script -d.py is not there"),
    ("doctor", ("--nproc", "0"), 2, "at least one process"),
    ("doctor", ("--timeout", "0"), 2, "must be positive"),
    ("engine serve", ("--history-dir", "h", "--port", "99999"), 2, "--port"),
    ("engine serve", ("--history-dir", "text.txt"), 4, "cannot be written"),
    # what must be given
    ("plan", (), 2, "--model and --sample missing"),
    ("search", (), 2, "--model and --sample missing"),
    ("verify", ("--strategy", "ddp"), 2, "--model and --sample missing"),
    ("verify", _MODEL, 2, "--strategy"),
    ("launch", (), 2, "Missing argument"),
    ("env", ("more",), 2, "unexpected extra argument"),
    # the environment
    ("doctor", ("--only", "disk", "--folder", "nowhere"), 4, ""),
]


if not torch.cuda.is_available():
    CASES.append(("launch", ("--nproc", "gpu", "job.py"), 4, "torch finds no GPU"))


@pytest.fixture
def folder(job: Path, inline_ranks: None) -> Path:
    for name, content in FILES.items():
        (job / name).write_text(content)
    (job / "folder.d").mkdir()
    Strategy(["ddp"]).save(job / "fine.json")
    return job


@pytest.mark.parametrize(
    ("verb", "arguments", "code", "words"),
    CASES,
    ids=[f"{verb} {' '.join(a)[-40:]}" for verb, a, _, _ in CASES],
)
def test_bad_input(
    folder: Path, run: Run, verb: str, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = run(*verb.split(), *arguments)
    assert done.returncode == code, done.stderr
    assert words in " ".join(done.stderr.replace("│", " ").split()), done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "unexpected" not in done.stderr or "unexpected extra argument" in done.stderr
    assert not done.stdout or verb == "doctor"


_WITH_JSON = {
    verb for verb, command in commands().items() if any("--json" in each.opts for each in command.params)
}
_FIRST = {verb: (arguments, code) for verb, arguments, code, _ in reversed(CASES) if verb in _WITH_JSON}


@pytest.mark.parametrize("verb", sorted(_WITH_JSON - {"doctor"}))
def test_a_failure_is_a_record_too(folder: Path, run: Run, verb: str) -> None:
    """doctor's own answer says what failed."""
    arguments, code = _FIRST[verb]
    done = run(*verb.split(), *arguments, "--json")
    record = json.loads(done.stdout)
    assert done.returncode == record["code"] == code
    assert set(record) == {"schema", "error", "code", "rank"}
    assert " ".join(record["error"].split())[:20] in " ".join(done.stderr.replace("│", " ").split())
    unknown = run(*verb.split(), "--no-such-option", "--json")
    assert unknown.returncode == json.loads(unknown.stdout)["code"] == 2


def test_every_verb_is_tried() -> None:
    assert {verb for verb, _, _, _ in CASES} == set(VERBS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            "plan --model job.py:buidl --sample job.py:sampel --loss nix.py:loss --cluster 9xZZZ --objective foo "
            "--save nowhere/x.json",
            ("'buidl'", "'sampel'", "nix.py", "'ZZZ'", "--objective", "--save=nowhere/x.json"),
        ),
        (
            "estimate --strategy missing.json --model job.py:buidl --sample job.py:sample --cluster 9xZZZ --memory-limit moo",
            ("missing.json", "'buidl'", "'ZZZ'", "--memory-limit='moo'"),
        ),
        (
            "search --model job.py:build --sample job.py:sample --time-limit 0 --objective foo",
            ("--time-limit=0", "--objective"),
        ),
    ],
)
def test_all_that_is_wrong_is_told_at_once(
    folder: Path, run: Run, arguments: str, told: tuple[str, ...]
) -> None:
    done = run(*arguments.split())
    assert done.returncode == 2
    for one in told:
        assert one in done.stderr, f"{one} is not in {done.stderr}"
