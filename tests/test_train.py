"""`zero-fx train` as it is used: under torchrun, on two ranks, at every stage; and its refusals."""

import json
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest
import ranks
import torch

from zero_fx.cli import main
from zero_fx.formulas import elements_sent, model_state_bytes
from zero_fx.gpt import GPT, GPTConfig
from zero_fx.monitor import JsonLines
from zero_fx.train import TrainOptions, lr_at, prepare, train

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = str(ROOT / "passes")
WORLD = 2
WHOLE_BELOW = 512  # the norms' gains are kept whole, the matrices are not
STEPS = 24
TINY = {
    "lowering": "eager", "device": "cpu", "data": (TEXT,), "layers": 1, "dim": 32, "heads": 2, "seq": 32, "batch": 2,
    "keep_whole_below": WHOLE_BELOW, "eval_batches": 1, "sample": 8, "seed": 3,
}  # fmt: skip


def environment() -> dict[str, str]:
    """Ours, without a torchrun that pytest may itself run under."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in launched} | {"OMP_NUM_THREADS": "1"}


def torchrun(launch: list[str], **options) -> subprocess.Popen:
    """Start `torchrun LAUNCH -m zero_fx train OPTIONS`; without those of TINY that are None."""
    flags = []
    for name, value in (TINY | options).items():
        if value is None:
            continue
        flags += ["--" + name.replace("_", "-"), *map(str, value if isinstance(value, tuple) else (value,))]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "zero_fx", "train", *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment())


def output_of(process: subprocess.Popen, timeout_s: float = 120) -> str:
    """What it printed; fails the test unless it ended well."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        stop(process)
    assert process.returncode == 0, out + err
    return out


def stop(process: subprocess.Popen) -> None:
    """End an agent that is still there; asked first, since it then ends its ranks as well."""
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def losses_in(path: pathlib.Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def check_measured(path: pathlib.Path, stage: int, micro_batches: int, world: int = WORLD, gathered_bytes: int = 4) -> None:
    """Elements and bytes that every rank measured, against the formulas for the model of TINY."""
    gpt = GPT(GPTConfig(TINY["layers"], TINY["dim"], TINY["heads"], TINY["seq"]))
    sizes = [param.numel() for param in gpt.parameters()]
    sharded = sum(size for size in sizes if stage > 0 and size >= WHOLE_BELOW)
    facts = (stage, sharded, sum(sizes) - sharded, world, micro_batches)
    results = json.loads(path.read_text())
    assert [result["rank"] for result in results] == list(range(world))
    for result in results:
        assert result["elements_sent"] == pytest.approx(elements_sent(*facts), rel=0.02)
        assert result["state_bytes"] == pytest.approx(model_state_bytes(*facts, gathered_bytes), rel=0.05)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[tuple[str, list[float], pathlib.Path]]:
    """(output, losses, report) of a run at each stage. That at stage 0 is of a torchrun agent with two ranks; that at
    stage 3 of two agents with one rank each, as on two machines that find each other; the others are of ranks that
    have a group already, and have no output here."""
    done = []
    for stage in range(4):
        folder = tmp_path_factory.mktemp(f"stage{stage}")
        log, report = folder / "losses.jsonl", folder / "report.json"
        options, out = {"stage": stage, "steps": STEPS}, ""
        if stage in (1, 2):
            ranks.run(train_in_group, str(report), str(log), options)
        else:
            out = launched(agents=2 if stage == 3 else 1, loss_log=log, report=report, **options)
        done.append((out, losses_in(log), report))
    return done


def launched(agents: int, **options) -> str:
    """The output of a run of two ranks under one torchrun agent or two."""
    launch = ["--standalone", "--nproc-per-node", str(WORLD)]
    if agents == 2:
        endpoint = f"127.0.0.1:{free_port()}"
        launch = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    started = [torchrun(launch, **options) for _ in range(agents)]
    try:
        return "".join(output_of(agent) for agent in started)
    finally:
        for agent in started:
            stop(agent)


def train_in_group(rank, world, report, log, options):
    train(prepare(TrainOptions(**TINY | options, report=report, loss_log=log)))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stages_train_alike(runs):
    curves = [losses for _, losses, _ in runs]
    for curve in curves:
        assert len(curve) == STEPS and curve == pytest.approx(curves[0], abs=1e-3)
    assert curves[0][0] == pytest.approx(math.log(256), abs=0.2)
    assert curves[0][-1] < curves[0][0] - 1


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_measured_as_the_formulas_say(runs, stage):
    check_measured(runs[stage][2], stage, micro_batches=1)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_speaks_for_all(runs, stage):
    """At stage 3 that is one of two agents: they were one job of two ranks, not two of one."""
    out = runs[stage][0]
    for text in (f"stage {stage}, 2 ranks on cpu", "held-out loss", "--- held-out text"):
        assert out.count(text) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: PyTorch finds none")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_gpus(stage, tmp_path):
    """Inductor and nccl, one rank a GPU: measured as the formulas say, and it learns."""
    world, log, report = torch.cuda.device_count(), tmp_path / "losses.jsonl", tmp_path / "report.json"
    options = {"device": "cuda", "lowering": "inductor", "stage": stage, "steps": STEPS, "loss_log": log, "report": report}
    out = output_of(torchrun(["--standalone", "--nproc-per-node", str(world)], **options), timeout_s=600)
    assert f"stage {stage}, {world} ranks on cuda" in out
    check_measured(report, stage, micro_batches=1, world=world)
    losses = losses_in(log)
    assert losses[-1] < losses[0] - 1


@pytest.mark.full
@pytest.mark.timeout(300)
def test_micro_batches(tmp_path):
    """The same with two micro-batches, in processes that have a group already."""
    curves = []
    for stage in range(4):
        log, report = tmp_path / f"{stage}.jsonl", tmp_path / f"{stage}.json"
        ranks.run(train_in_group, str(report), str(log), {"stage": stage, "steps": 6, "accumulate": 2})
        check_measured(report, stage, micro_batches=2)
        curves.append(losses_in(log))
    assert all(curve == pytest.approx(curves[0], abs=1e-3) for curve in curves)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(tmp_path, precision):
    """It learns, and measures what the formulas say."""
    for stage in range(4):
        log, report = tmp_path / f"{stage}.jsonl", tmp_path / f"{stage}.json"
        ranks.run(train_in_group, str(report), str(log), {"stage": stage, "steps": STEPS, "precision": precision})
        check_measured(report, stage, micro_batches=1, gathered_bytes=2)
        losses = losses_in(log)
        assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_resumed_bit_by_bit(tmp_path, capsys):
    """In fp16, whose loss scale is saved too. The log goes on after the checkpoint's step, whatever it had."""
    log, folder, scalars = tmp_path / "losses.jsonl", tmp_path / "run", tmp_path / "log" / "scalars.jsonl"
    options = {"stage": 3, "steps": 6, "precision": "fp16", "save": str(folder), "save_every": 2, "log_dir": str(tmp_path / "log")}
    ranks.run(train_in_group, None, str(log), options | {"resume": True})  # where nothing is yet
    before = log.read_text(), by_step(scalars)
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000004", "step-00000006"]
    assert main(["train", "--save", str(folder)]) == 2
    assert "there is a checkpoint of step 6 already; add --resume" in capsys.readouterr().err
    assert main(["train", "--save", str(folder), "--resume", "--steps", "6"]) == 2
    assert "--steps 6: 6 are done in the checkpoint" in capsys.readouterr().err
    for step in (4, 6):
        shutil.rmtree(folder / f"step-0000000{step}")
    log.write_text(log.read_text() + '{"step": 7, "lo')  # cut off
    ranks.run(train_in_group, None, str(log), options | {"resume": True, "keep": 1})
    assert log.read_text() == before[0]
    assert os.listdir(folder) == ["step-00000006"]
    after = by_step(scalars)
    assert list(after) == [1, 2, 3, 4, 5, 6]
    for step in after:
        assert all(after[step][tag] == before[1][step][tag] for tag in ("train/loss", "train/lr", "train/grad_norm"))


def test_a_number_that_json_has_not(tmp_path):
    with JsonLines(str(tmp_path / "x.jsonl"), 0) as lines:
        lines.write({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    assert by_step(tmp_path / "x.jsonl") == {1: {"step": 1, "loss": None, "grad_norm": None}}


def by_step(path: pathlib.Path) -> dict[int, dict]:
    return {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_what_is_logged(tmp_path):
    """TensorBoard has the scalars of the JSON lines; what a step sends is what the formula says."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, report = tmp_path / "log", tmp_path / "report.json"
    ranks.run(train_in_group, str(report), None, {"stage": 2, "steps": 4, "accumulate": 2, "log_dir": str(folder)})
    lines = by_step(folder / "scalars.jsonl")
    board = EventAccumulator(str(folder)).Reload()
    for tag in board.Tags()["scalars"]:
        events = {event.step: event.value for event in board.Scalars(tag)}
        assert events == pytest.approx({step: line[tag] for step, line in lines.items() if tag in line})
    measured = lines[3]
    assert len(measured) == len(board.Tags()["scalars"]) + 1 == 11
    assert measured["step/elements_sent"] == json.loads(report.read_text())[0]["elements_sent"]
    assert 0 < measured["step/exposed_communication_s"] < measured["train/step_s"]
    gpt = GPT(GPTConfig(TINY["layers"], TINY["dim"], TINY["heads"], TINY["seq"]))
    products = sum(param.numel() for param in gpt.parameters() if param.dim() > 1)  # tied: as embedding it is looked up
    assert measured["step/flops"] >= 6 * products * 2 * TINY["batch"] * TINY["seq"]  # and attention's
    assert "embed.weight" in (folder / "memory.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stage 7", "stage=7: expected 0, 1, 2 or 3"),
        ("--stage two", "argument --stage: invalid int value: 'two' (see zero-fx train --help)"),
        ("--steps 0", "--steps 0: expected 1 or more"),
        ("--accumulate -1", "--accumulate -1: expected 1 or more"),
        ("--lr nan", "--lr nan: expected a finite number above 0, such as 3e-3"),
        ("--clip -1", "--clip -1: expected a finite number of 0 or more"),
        ("--lr 0", "--lr 0: expected a finite number above 0, such as 3e-3"),
        ("--precision bf17", "precision='bf17': expected 'bf16', 'fp16' or a zero_fx.Precision"),
        ("--lowering triton", "lowering='triton': expected one of 'inductor', 'eager'"),
        ("--keep-whole-below -1", "keep_whole_below=-1: expected 0 or more elements"),
        ("--dim 100 --heads 8", "dim=100 with heads=8: expected a multiple of 2 * heads = 16, since each head"),
        ("--device tpu", "--device tpu: expected auto, cpu or cuda"),
        ("--data nowhere", "--data nowhere: there is no such file or folder"),
        ("--loss-log no/such/folder/losses", "--loss-log: there is no folder"),
        ("--resume", "--resume: from which checkpoints? Give their folder too, --save DIR"),
        ("--save pyproject.toml", "--save pyproject.toml: expected a folder, and this is a file"),
        ("--save x --save-every 0", "--save-every 0: expected 1 or more"),
        ("--save {one}", "--save {one}: this is one checkpoint; give the folder that it is in"),
        ("--keep -1", "--keep -1: expected 0 or more"),
        ("--log-dir pyproject.toml", "--log-dir pyproject.toml: expected a folder, and this is a file"),
        ("--stpes 3", "unrecognized arguments: --stpes 3"),
    ],
)
def test_a_bad_option_is_one_line_and_code_2(flags, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    (tmp_path / "COMPLETE").touch()
    flags, message = (text.replace("{one}", str(tmp_path)) for text in (flags, message))
    assert main(["train", *flags.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("zero-fx: " + message) and shown.err.count("\n") == 1


def test_bench_says_how_it_is_used(capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "--help"])
    assert end.value.code == 0 and "--quick" in capsys.readouterr().out


def test_no_command_is_refused(capsys):
    assert main([]) == 2
    assert "command" in capsys.readouterr().err


@pytest.mark.slow
def test_a_bad_option_ends_the_process_with_code_2():
    command = [sys.executable, "-m", "zero_fx", "train", "--stage", "7"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=60)
    assert (run.returncode, run.stderr, run.stdout) == (2, "zero-fx: stage=7: expected 0, 1, 2 or 3\n", "")


def test_learning_rate_rises_then_falls():
    rates = [lr_at(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.1 < rates[-1] < 0.11
    assert lr_at(0, 1, 1.0) == 1.0
