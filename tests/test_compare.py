import json
import shutil
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import train
from config.command_line import read_command_line
from conftest import TINY
from experiments import compare, search
from experiments.measures import executed_flops, paper_flops_per_byte
from model import BOS, ModelConfig, load_checkpoint, make_model
from train import DEFAULTS, model_config_of


def cells(path):
    """The rows of a table, without its head."""
    return [[cell.strip() for cell in line.strip("|\n").split("|")]
            for line in path.read_text().splitlines()[2:]]


def write_log(folder, records):
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.mark.parametrize("system, K, flags", [
    ("learned", 3, ["--attention_window=64", "--seq_len=300"]), ("learned", 1, []), ("none", 2, []),
    ("hnet", 2, []), ("gumbel", 2, []), ("uniform", 2, ["--seq_len=20", "--attention_window=64"])])
def test_the_flops_of_a_training_pass_are_those_that_torch_counts(system, K, flags):
    flags = [f"--boundaries={system}", f"--num_draws={K}", "--embedding_dim=32", *flags]
    h = DEFAULTS | read_command_line(flags, DEFAULTS)
    model, N = make_model(ModelConfig(**model_config_of(h))).train(), h["seq_len"]
    y = torch.randint(256, (3, N))
    x = torch.cat((torch.full((3, 1), BOS), y[:, :-1]), dim=1)
    with FlopCounterMode(display=False) as counter:
        logp, early_logp, l, a = model(x, y, torch.rand(K, 3, N))
        (logp[0] + early_logp + l[0]).sum().backward()
    assert executed_flops(model, a).item() == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_the_paper_counts_six_flops_a_matrix_parameter_of_a_byte_or_token():
    """D = 8: a byte layer has 3 + 1 + 2 + 1 matrices of D x D, a middle layer 3 + 1 + 8 + 4."""
    h = DEFAULTS | {"embedding_dim": 8, "num_heads": 1, "policy_window": 1,
                    "n_down_layers": 2, "n_mid_layers": 5, "n_up_layers": 3}
    model = make_model(ModelConfig(**model_config_of(h)))
    before, middle, after = 2 * 7 * 64 + 2 * 8, 5 * 16 * 64, 3 * 7 * 64 + 257 * 8
    assert paper_flops_per_byte(model, 0.3, 1) == pytest.approx(6 * (before + 0.3 * middle + after))
    further = paper_flops_per_byte(model, 0.3, 3) - paper_flops_per_byte(model, 0.3, 1)
    assert further == pytest.approx(2 * 2 * 0.5 * (0.3 * middle + after))


@pytest.mark.parametrize("system", ["learned", "hnet", "random", "none", "whitespace"])
def test_a_byte_is_expected_to_cost_what_it_costs_in_a_run(system, data, tmp_path):
    """At the start of training, when learned boundaries are still at their target."""
    flags = [*TINY, f"--boundaries={system}", f"--data={data}", "--downsample_rate_target=0.25"]
    h = DEFAULTS | read_command_line(flags, DEFAULTS)
    train.main([*flags, f"--out_dir={tmp_path}", "--training_bytes=4096", "--learning_rate=1e-9"])
    logged = [json.loads(line) for line in open(tmp_path / "log.jsonl")]
    mean = statistics.mean(r["flops_per_byte"] for r in logged if "auto" in r)
    assert compare.expected_flops_per_byte(h) == pytest.approx(mean, rel=0.05)


def test_a_table_has_the_means_of_the_last_evaluations_and_what_reaching_them_cost(
        tmp_path, trained, monkeypatch):
    """Each stretch of bytes at its own rate; seconds at the median speed; entropy of five lines."""
    figures, (model, saved) = [], load_checkpoint(trained / "ckpt.pt")
    monkeypatch.setattr(compare.plt, "close", figures.append)
    saved["config"] |= {"training_bytes": 8e6, "num_draws": 2}
    for seed, system, entropies in ((1, "learned", [4, 4, 2, 2, 1.9, 1.9, 2.3, 1]),
                                    (2, "learned", [4] * 8), (1, "learned-w1", [0] * 8)):
        folder = tmp_path / f"runs/{system}-{seed}"
        folder.mkdir(parents=True)
        torch.save(saved, folder / "ckpt.pt")
        records = [{"bytes": i * 1e6, "auto": 1.0, "rate": i / 10, "entropy": entropies[i - 1],
                    "bytes_per_second": 1e6 * (i < 4) + 1e4, "flops_per_byte": i}
                   for i in range(1, 9)]
        records += [{"bytes": i * 1e6, "val_bpb": bpb + seed, "val_stderr": 0.01 * seed, "line": {},
                     "val_rate": 0.2 * seed, "ends_between": seed / 4}
                    for i, bpb in ((0, 9), (4, 0.5), (8, 1.0))]
        write_log(folder, sorted(records, key=lambda r: r["bytes"]))
    compare.write(tmp_path)
    half, whole = (sum(1e6 * i for i in range(1, n + 1)) for n in (4, 8))
    paper = [paper_flops_per_byte(model, i / 10, 2) for i in range(9)]
    paper_half, paper_whole = (sum(1e6 * paper[i] for i in range(1, n + 1)) for n in (4, 8))
    assert cells(tmp_path / "table.md")[0] == [
        "learned", "2", "2.5000", "0.0150", "2.000, 3.000", "0.300", "38%", "8.0, never",
        f"{whole:.3g}", f"{8e6 / 1e4 / 60:.1f}"]
    evaluations = [json.loads(line) for line in open(tmp_path / "evaluations.jsonl")]
    assert [e["flops"] for e in evaluations] == pytest.approx([half, whole] * 3)
    assert [e["seconds"] for e in evaluations] == pytest.approx([4e6 / 1e4, 8e6 / 1e4] * 3)
    drawn = figures[0].axes[0].lines
    assert [list(line.get_ydata()) for line in drawn] == [[1.5, 2.0], [2.5, 3.0], [1.5, 2.0]]
    for line in drawn:
        assert list(line.get_xdata()) == pytest.approx([paper_half, paper_whole])
    assert [line.get_linestyle() for line in drawn] == ["-", "-", "--"]


def test_a_run_that_did_not_end_is_a_row_without_numbers(tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "runs/learned-1337")
    record = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    compare.write(tmp_path)
    assert cells(tmp_path / "table.md")[0][2] == f"{record['val_bpb']:.4f}"
    write_log(folder, [record | {"bytes": 1408}])
    compare.write(tmp_path)
    row, = cells(tmp_path / "table.md")
    assert row == ["learned", "1", "seed 1337 stopped at 0.0 MB"] + [""] * 7


def test_every_system_and_seed_is_trained_for_as_many_bytes_as_equal_flops_allow(
        tmp_path, monkeypatch):
    asked, costs = {}, {"uniform": 2.0, "learned": 5.0}

    def run(flags, out_dir):
        out_dir.mkdir(parents=True)
        asked[out_dir.name] = read_command_line(flags, DEFAULTS)
        return True

    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "expected_flops_per_byte", lambda h: costs[h["boundaries"]])
    monkeypatch.setattr(compare, "run", run)
    compare.main(["--systems=uniform,learned-w2", "--seeds=2", "--first_seed=7", "--bytes=1e6",
                  "--equal=flops", "--gamma=0.5"])
    flags = {"uniform": {"boundaries": "uniform", "training_bytes": 1_000_000},
             "learned-w2": {"boundaries": "learned", "training_bytes": 400_000, "policy_window": 2}}
    assert asked == {f"{name}-{seed}": flags[name] | {"seed": seed, "gamma": 0.5}
                     for seed in (7, 8) for name in flags}


def test_a_comparison_goes_on_past_a_failed_run_and_repeats_no_finished_one(
        data, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    results, flags = tmp_path / "x", ["--bytes=1024", "--name=x", *TINY, f"--data={data}"]
    (results / "runs/none-1337/ckpt.part").mkdir(parents=True)  # in the way of a checkpoint
    assert compare.main([*flags, "--systems=none,uniform-w2"]) == 1
    assert capfd.readouterr().err.count("train.py: ") == 1
    uniform, none = cells(results / "table.md")
    assert uniform[:2] == ["uniform-w2", "1"] and none[2] == "a run without evaluation"
    evaluations = (results / "evaluations.jsonl").read_text()
    assert compare.main([*flags, "--systems=uniform-w2"]) == 0
    assert (results / "evaluations.jsonl").read_text() == evaluations
    last = json.loads(evaluations.splitlines()[-1])
    model, saved = load_checkpoint(results / "runs/uniform-w2-1337/ckpt.pt")
    a = torch.ones(1, 4, 6, dtype=torch.bool)  # 6 tokens in a row of 32 bytes
    flops = executed_flops(model, F.pad(a, (0, 26))) / 4 / 32
    assert last["bytes"] == 1024 and last["flops"] == pytest.approx(1024 * flops.item())
    assert saved["config"]["policy_window"] == 2
    with pytest.raises(SystemExit):
        compare.main([*flags, "--systems=uniform-w2", "--gamma=0.5"])
    assert "made with gamma=0.97, not 0.5; give another --name" in capfd.readouterr().err


def test_a_search_gives_every_system_and_shape_the_same_flops(data, tmp_path, monkeypatch):
    def run(flags, out_dir):
        train.main([*flags, f"--out_dir={out_dir}"])
        return True

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(search, "RESULTS", tmp_path)
    flags = ["--name=x", "--systems=none,uniform", "--flops=1e9", "--shape=--n_mid_layers=2"]
    assert search.main([*flags, *TINY, f"--data={data}", "--eval_interval=9999"]) == 0
    none, uniform = map(json.loads, open(tmp_path / "x/runs.jsonl"))
    assert [none["system"], uniform["system"]] == ["none", "uniform"]
    assert none["shape"] == uniform["shape"] == "n_mid_layers=2"
    assert uniform["bytes"] > 1.3 * none["bytes"]
    assert [none["flops"], uniform["flops"]] == pytest.approx([1e9, 1e9], rel=0.02)
    row, = cells(tmp_path / "x/table.md")
    bits = [f"{r['bpb']:.3f}" for r in (uniform, none)]
    assert row[:2] == ["1e+09", "n_mid_layers=2"] and [cell[:5] for cell in row[3:]] == bits


@pytest.mark.parametrize("flag, message", [
    ("--flops=abc", "--flops='abc' or --shape=[]: could not convert"), ("--flops=inf", "=inf"),
    ("--shape='", "No closing quotation"), ("--shape=--num_heads=3", "embedding_dim=16 is no"),
    ("--systems=no", "--systems='no' is none of"), ("--data=no/such", "no no/such/meta.json")])
def test_a_search_of_nothing_possible_is_refused_in_one_line(data, flag, message, capsys):
    with pytest.raises(SystemExit) as end:
        search.main(["--name=x", "--systems=none", "--flops=1e9", *TINY, f"--data={data}", flag])
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error and error.count("\n") == 1
