"""experiments/compare.py, search.py, bench.py, and the FLOPs in measures.py."""
import json
import shutil
import statistics
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import train
from config.command_line import read_command_line
from conftest import TINY
from experiments import bench, compare, search
from experiments.measures import executed_flops, muon_flops, paper_flops_per_byte
from experiments.systems import SYSTEMS, Fixed
from model import BOS, load_checkpoint, make_model
from train import DEFAULTS


def cells(path):
    """The rows of a Markdown table, without its head."""
    lines = path.read_text().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_here(flags, out_dir):
    """In place of compare.train_to_end: no new process."""
    train.main([*flags, f"--out_dir={out_dir}"])
    return True


@pytest.mark.parametrize("flags", [
    "--num_draws=3 --attention_window=64 --seq_len=300", "--num_draws=1 --early_exit=True",
    "--boundaries=none", "--boundaries=hnet", "--boundaries=gumbel",
    "--boundaries=uniform --seq_len=20 --attention_window=64"])
def test_executed_flops_are_those_that_torch_counts(flags):
    hp = DEFAULTS | read_command_line(["--embedding_dim=32", *flags.split()], DEFAULTS)
    model = make_model(hp).train()
    y = torch.randint(256, (3, hp["seq_len"]))
    x = F.pad(y[:, :-1], (1, 0), value=BOS)
    u = torch.rand(hp["num_draws"], *x.shape)
    _, muon = train.make_optimizers(model, SimpleNamespace(**hp))
    muon.param_groups[0]["lr"] = 0.1
    with FlopCounterMode(display=False) as counter:
        logp, early_logp, l, a = model(x, y, u)
        (logp[0] + early_logp + l[0]).sum().backward()
        model_flops = counter.get_total_flops()
        muon.step()
    assert executed_flops(model, a).item() == pytest.approx(model_flops, rel=0.01)
    assert model_flops + muon_flops(muon) == counter.get_total_flops()


def test_the_paper_counts_six_flops_per_matrix_parameter():
    """With D = 8 a byte layer has 3 + 1 + 2 + 1 matrices of D x D, a token layer 3 + 1 + 8 + 4."""
    layers = {"n_down_layers": 2, "n_mid_layers": 5, "n_up_layers": 3}
    shape = {"embedding_dim": 8, "num_heads": 1, "policy_window": 1}
    model = make_model(DEFAULTS | layers | shape)
    before = 2 * 7 * 64 + 2 * 8
    middle = 5 * 16 * 64
    after = 3 * 7 * 64 + 257 * 8
    one_draw = 6 * (before + 0.3 * middle + after)
    two_further_draws_of_half_the_rows = 2 * 2 * 0.5 * (0.3 * middle + after)
    assert paper_flops_per_byte(model, 0.3, 1) == pytest.approx(one_draw)
    assert paper_flops_per_byte(model, 0.3, 3) == pytest.approx(
        one_draw + two_further_draws_of_half_the_rows)


def test_expected_flops_are_those_of_a_run(data, tmp_path):
    """At the start of training, when learned boundaries are still at their target."""
    flags = [*TINY, f"--data={data}", "--seq_len=64", "--n_mid_layers=4"]
    _, hp = compare.hyperparameters("learned", 1337, flags)
    train_here([*flags, "--training_bytes=8192", "--learning_rate=1e-9"], tmp_path)
    logged = [r["flops_per_byte"] for r in read_jsonl(tmp_path / "log.jsonl") if "auto" in r]
    expected = search.expected_flops_per_byte(hp)
    assert expected == pytest.approx(statistics.mean(logged), rel=0.05)


def test_the_table_and_figure_show_means_and_costs(tmp_path, trained, monkeypatch):
    """In run i, byte m million costs m FLOPs at a rate of m / 10 tokens per byte."""
    figures = []
    monkeypatch.setattr(compare.plt, "close", figures.append)
    model, saved = load_checkpoint(trained / "ckpt.pt")
    saved["config"] |= {"training_bytes": 4e6, "num_draws": 2}
    for i, name in enumerate(["learned-1", "learned-2", "uniform-1"]):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        torch.save(saved, folder / "ckpt.pt")
        records = []
        for m in range(5):
            speed = 1e9 if m == 1 else 1e4
            if m > 0:
                records.append({"bytes": m * 1e6, "auto": 1.0, "rate": m / 10,
                                "flops_per_byte": m, "bytes_per_second": speed})
            if m in (0, 2, 4):
                records.append({"bytes": m * 1e6, "val_bpb": 3 - m / 4 + i, "val_stderr": i / 100,
                                "val_rate": (1 + i) / 5, "ends_between": i / 4, "line": []})
        (folder / "log.jsonl").write_text("\n".join(map(json.dumps, records)))

    compare.write(tmp_path)
    flops_at_2, flops_at_4 = 1e6 * (1 + 2), 1e6 * (1 + 2 + 3 + 4)
    assert cells(tmp_path / "table.md")[0] == [
        "learned", "2", "2.5000", "0.0050", "2.000, 3.000", "0.300", "12%", "1e+07", "6.7"]
    evaluations = read_jsonl(tmp_path / "evaluations.jsonl")
    assert [e["flops"] for e in evaluations] == pytest.approx([flops_at_2, flops_at_4] * 3)
    assert [e["seconds"] for e in evaluations] == pytest.approx([200, 400] * 3)
    lines = figures[0].axes[0].lines
    assert [[*line.get_ydata()] for line in lines] == [[2.5, 2.0], [3.5, 3.0], [4.5, 4.0]]
    paper = [1e6 * paper_flops_per_byte(model, m / 10, 2) for m in range(5)]
    for line in lines:
        assert [*line.get_xdata()] == pytest.approx([sum(paper[1:3]), sum(paper[1:5])])
    for style in ("color", "marker", "linestyle"):
        first, second, other = (getattr(line, f"get_{style}")() for line in lines)
        assert first == second != other


def test_an_unfinished_run_is_a_row_without_numbers(tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "runs/learned-1337")
    lines = (folder / "log.jsonl").read_text().splitlines(True)
    (folder / "log.jsonl").write_text("".join(lines[:-1]))
    compare.write(tmp_path)
    [row] = cells(tmp_path / "table.md")
    assert row == ["learned", "1", "seed 1337 stopped at 0.0 MB"] + [""] * 6


def test_a_new_rule_is_compared_once_it_is_in_SYSTEMS(data, tmp_path, monkeypatch):
    class Vowels(Fixed):
        def rule(self, x, u):
            return torch.isin(x, torch.tensor([*b"aeiou"]))

    monkeypatch.setitem(SYSTEMS, "end-of-vowel", Vowels)
    monkeypatch.setattr(compare, "NAMES", ["learned", *SYSTEMS])
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "train_to_end", train_here)
    flags = [*TINY, f"--data={data}", "--training_bytes=512", "--first_seed=7", "--seeds=2"]
    assert compare.main([*flags, "--systems=end-of-vowel,learned"]) == 0
    learned, vowels = cells(tmp_path / "try/table.md")
    assert learned[:2] == ["learned", "2"]
    assert vowels[:2] == ["end-of-vowel", "2"]
    for seed in (7, 8):
        _, saved = load_checkpoint(tmp_path / f"try/runs/learned-{seed}/ckpt.pt")
        assert saved["config"]["seed"] == seed


def test_a_failed_run_does_not_end_a_comparison(data, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    results = tmp_path / "x"
    (results / "runs/none-1337/ckpt.part").mkdir(parents=True)  # in the way of a checkpoint
    flags = [*TINY, f"--data={data}", "--training_bytes=512", "--name=x"]
    assert compare.main([*flags, "--systems=none,uniform"]) == 1
    assert capfd.readouterr().err.count("train.py: ") == 1
    uniform, none = cells(results / "table.md")
    assert uniform[:2] == ["uniform", "1"]
    assert none[2] == "a run failed, or logged nothing"

    evaluations = (results / "evaluations.jsonl").read_text()
    assert compare.main([*flags, "--systems=uniform"]) == 0  # nothing left to train
    assert (results / "evaluations.jsonl").read_text() == evaluations
    with pytest.raises(SystemExit):
        compare.main([*flags, "--systems=uniform", "--gamma=0.5"])
    assert "trained with gamma=0.97, not 0.5; use another --name" in capfd.readouterr().err
    (results / "runs/uniform-1337/ckpt.pt").write_bytes(b"")
    with pytest.raises(SystemExit):
        compare.main([*flags, "--systems=uniform"])
    assert "ckpt.pt is damaged" in capfd.readouterr().err


def test_a_search_gives_systems_and_shapes_the_same_flops(data, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "train_to_end", train_here)
    monkeypatch.setattr(search, "RESULTS", tmp_path)
    flags = ["--name=x", "--systems=none,uniform", "--flops=1e9", "--shape=--n_mid_layers=2"]
    assert search.main([*flags, *TINY, f"--data={data}", "--eval_interval=9999"]) == 0
    none, uniform = read_jsonl(tmp_path / "x/runs.jsonl")
    assert [none["system"], uniform["system"]] == ["none", "uniform"]
    assert uniform["bytes"] > 1.3 * none["bytes"]
    assert [none["flops"], uniform["flops"]] == pytest.approx([1e9, 1e9], rel=0.02)
    assert "<!-- uniform -->" in (tmp_path / "x/flops.svg").read_text()  # its label
    for run, row in zip((none, uniform), cells(tmp_path / "x/table.md")):
        assert row == [
            "1e+09", "n_mid_layers=2", f"{run['parameters'] / 1e6:.2f}M", run["system"], "1",
            f"{run['bytes'] / 1e6:.1f}", f"{run['val_bpb']:.3f}"]


@pytest.mark.parametrize("flag, message", [
    ("--flops=abc", "cannot read --flops='abc'"),
    ("--flops=inf", "--flops=inf trains on inf bytes"),
    ("--shape='", "No closing quotation"),
    ("--systems=no", "unknown system 'no'; choose from learned, uniform"),
    ("--data=no/such", "no no/such/meta.json")])
def test_mistakes_in_a_search_are_explained_in_one_line(data, flag, message, capsys):
    with pytest.raises(SystemExit) as end:
        search.main(["--name=x", "--systems=none", "--flops=1e9", *TINY, f"--data={data}", flag])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert message in error
    assert error.count("\n") == 1


def test_bench_converts_seconds_into_speeds(trained, monkeypatch, capsys):
    """A step of 4 rows of 32 bytes takes a hundredth of a second."""
    monkeypatch.setattr(bench, "seconds", lambda function, *arguments: (0.01, function(*arguments)))
    bench.main([*TINY, f"--runs={trained}"])
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:6] == [str(trained), "12.8", "kB/s", "+-", "0%", "10.0"]
    assert row[-1] == "1.00"
