import json
import re
import shutil

import pytest
import torch

from config.command_line import read_command_line
from conftest import TINY
from experiments import compare, distance, figures, search
from model import ModelConfig, load_checkpoint, make_model
from train import DEFAULTS, flops_per_byte, model_config_of, open_rows, read_log


def test_a_run_of_which_numbers_are_missing_is_a_row_that_says_so(tmp_path, trained):
    folder = tmp_path / "runs/learned-1337"
    shutil.copytree(trained, folder)
    record = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    (folder / "log.jsonl").write_text(json.dumps(record | {"val_bpb": None, "ends_between": None}) + "\n")
    assert not compare.write(tmp_path) and "diverged" in (tmp_path / "table.md").read_text()
    (folder / "log.jsonl").write_text(json.dumps(record | {"ends_between": None}) + "\n")
    (tmp_path / "runs/.DS_Store").write_text("of a Mac")
    assert compare.write(tmp_path) and f"{record['val_bpb']:.4f}" in (tmp_path / "table.md").read_text()
    shutil.copytree(folder, tmp_path / "runs/random-1337")  # a good one, last in the table
    (folder / "failure.txt").write_text("no disk")
    assert not compare.write(tmp_path) and "| seed 1337: no disk |" in (tmp_path / "table.md").read_text()
    (folder / "failure.txt").unlink()
    (folder / "log.jsonl").write_text(json.dumps(record | {"bytes": 1408}) + "\n")
    assert not compare.write(tmp_path) and "| seed 1337 stopped at 0.0 MB |" in (tmp_path / "table.md").read_text()


def test_a_table_has_the_means_of_the_runs_last_evaluations_and_what_reaching_them_cost(tmp_path, trained, monkeypatch):
    """Each stretch of bytes at the rate that it had; seconds at the run's median speed; entropy over five log lines."""
    figures, (model, saved) = [], load_checkpoint(trained / "ckpt.pt")
    monkeypatch.setattr(compare.plt, "close", figures.append)
    for seed, system, entropies in (1, "learned", [4, 4, 2, 2, 1.9, 1.9, 2.3, 1]), (2, "learned", [4] * 8), (1, "learned-w1", [0] * 8):
        folder = tmp_path / f"runs/{system}-{seed}"
        folder.mkdir(parents=True)
        torch.save(saved | {"config": saved["config"] | {"training_bytes": 8e6}}, folder / "ckpt.pt")
        records = [{"step": i, "bytes": i * 1e6, "auto": 1.0, "rate": i / 10, "entropy": entropy, "bytes_per_second": 1e6 * (i < 4) + 1e4}
                   for i, entropy in enumerate(entropies, 1)]
        records += [{"step": i, "bytes": i * 1e6, "val_bpb": bpb + seed, "val_stderr": 0.01 * seed, "val_rate": 0.2 * seed,
                     "ends_between": seed / 4} for i, bpb in ((4, 0.5), (8, 1.0))]
        (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in sorted(records, key=lambda r: r["step"])))
    assert compare.write(tmp_path)
    per_byte = [flops_per_byte(model, rate / 10, saved["config"]) for rate in range(9)]
    half, whole = (sum(1e6 * per_byte[i] for i in range(1, n + 1)) for n in (4, 8))
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in (tmp_path / "table.md").read_text().splitlines()]
    minutes = 8e6 / 1e4 / 60
    assert rows[2] == ["learned", "2", "2.5000", "0.0150", "2.000, 3.000", "0.300", "38%", "8.0, never", f"{whole:.3g}", f"{minutes:.1f}"]
    evaluations = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [e["flops"] for e in evaluations] == pytest.approx([half, whole] * 3)
    assert [e["seconds"] for e in evaluations] == pytest.approx([4e6 / 1e4, 8e6 / 1e4] * 3)
    lines = figures[0].axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[1.5, 2.0], [2.5, 3.0], [1.5, 2.0]]
    assert all(list(line.get_xdata()) == pytest.approx([half, whole]) for line in lines)
    assert lines[0].get_linestyle() == lines[1].get_linestyle() != lines[2].get_linestyle()


@pytest.mark.parametrize("system, rate", [("learned", 0.25), ("hnet", 0.25), ("random", 0.25), ("none", 1.0), ("whitespace", None)])
def test_a_byte_costs_the_flops_of_the_rate_that_its_system_will_have(system, rate, data):
    """The rate asked for where it is learned or drawn, else the one that its rule has on the training rows."""
    flags = [*TINY, f"--boundaries={system}", f"--data={data}", "--downsample_rate_target=0.25"]
    h = DEFAULTS | read_command_line(flags, DEFAULTS)
    if rate is None:  # one token before every row, and one after each word
        rows = [bytes(row) for shard in open_rows(data, "train", 32)[0] for row in shard]
        ends = [1 + len(re.findall(rb"(?=[0-9A-Za-z\x80-\xbf][^0-9A-Za-z\x80-\xbf])", row[:-1])) for row in rows[:256]]
        rate = sum(ends) / (32 * len(ends))
    assert compare.flops_of_a_byte(h) == pytest.approx(flops_per_byte(make_model(ModelConfig(**model_config_of(h))), rate, h))


def test_a_comparison_has_a_row_for_every_system_the_failed_too_and_a_finished_run_is_not_repeated(
        data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    flags = ["--bytes=1024", "--name=x", *TINY, f"--data={data}"]
    assert compare.main([*flags, "--systems=uniform,learned-w1,bpe"]) == 1  # the data has no marks of BPE tokens
    first = (tmp_path / "x/table.md").read_text()
    (tmp_path / "x/runs/uniform-1337/failure.txt").write_text("of a try before")
    assert compare.main([*flags, "--systems=uniform"]) == 1
    assert (tmp_path / "x/table.md").read_text() == first
    with pytest.raises(SystemExit):
        compare.main([*flags, "--systems=uniform", "--gamma=0.5"])
    assert "made with gamma=0.99, not 0.5" in capsys.readouterr().err
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in first.splitlines()]
    assert [row[0] for row in rows[2:]] == ["learned-w1", "uniform", "bpe"] and "has no marks of BPE tokens" in rows[4][2]
    evaluations = [json.loads(line) for line in (tmp_path / "x/evaluations.jsonl").read_text().splitlines()]
    last = [e for e in evaluations if e["system"] == "uniform"][-1]
    assert last["bytes"] == 1024 and f"{last['val_bpb']:.4f}" == rows[3][2]
    model, saved = load_checkpoint(tmp_path / "x/runs/uniform-1337/ckpt.pt")
    assert last["flops"] == pytest.approx(1024 * flops_per_byte(model, 6 / 32, saved["config"]))  # 6 tokens in a row of 32 bytes
    assert load_checkpoint(tmp_path / "x/runs/learned-w1-1337/ckpt.pt")[1]["config"]["policy_window"] == 1
    for name in "loss.png", "loss.svg":
        assert (tmp_path / "x" / name).stat().st_size > 1000
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.main(["--name=x"])
    page = (tmp_path / "x/boundaries.html").read_text()
    assert page.index("learned-w1-1337") < page.index("uniform-1337") and page.count("<h2>") == 2
    for name in "boundaries.png", "entropy.png", "entropy.svg":
        assert (tmp_path / "x" / name).stat().st_size > 1000


def test_every_system_and_seed_is_trained_as_asked_for_as_many_bytes_as_equal_compute_allows(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "flops_of_a_byte", lambda h: {"uniform": 2.0, "learned": 5.0}[h["boundaries"]])
    monkeypatch.setattr(compare, "run", lambda flags, out_dir: asked.update({out_dir.name: read_command_line(flags, DEFAULTS)}))
    flags = ["--systems=uniform,learned-w2", "--seeds=2", "--first_seed=7", "--bytes=1e6", "--equal=flops", "--gamma=0.5"]
    compare.main(flags)
    uniform, learned = {"gamma": 0.5, "boundaries": "uniform"}, {"gamma": 0.5, "boundaries": "learned", "policy_window": 2}
    assert asked == {f"{name}-{seed}": its | {"seed": seed, "training_bytes": length} for seed in (7, 8)
                     for name, its, length in (("uniform", uniform, 1_000_000), ("learned-w2", learned, 400_000))}


def test_a_pilot_run_tells_what_seconds_a_byte_takes_or_why_not(data, tmp_path, capsys):
    flags = [*TINY, f"--data={data}", "--boundaries=none"]
    cost = compare.seconds_of_a_byte(flags, tmp_path)
    speeds = {r["step"]: r["bytes_per_second"] for r in read_log(tmp_path / "log.jsonl") if "auto" in r}
    assert [*speeds] == [20, 40, 60, 80] and cost == 1 / sorted(speeds[step] for step in (40, 60, 80))[1]  # the first line's have compiled
    (tmp_path / "ckpt.pt").unlink()
    with pytest.raises(SystemExit):
        compare.seconds_of_a_byte([*flags, "--data=no/such"], tmp_path)
    assert ": no pilot run: train.py: no no/such/meta.json" in capsys.readouterr().err


def test_a_search_gives_every_system_and_shape_the_same_flops_once(data, tmp_path, monkeypatch, capsys):
    for module in compare, search:
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    flags = ["--name=x", "--systems=none,uniform", "--flops=1e9", "--shape=--n_mid_layers=2", *TINY, f"--data={data}", "--eval_interval=9999"]
    assert search.main(flags) == 0
    records = [json.loads(line) for line in (tmp_path / "x/runs.jsonl").read_text().splitlines()]
    assert [(r["system"], r["shape"], r["seed"]) for r in records] == [(name, "n_mid_layers=2", 1337) for name in ("none", "uniform")]
    assert all(r["flops"] == pytest.approx(1e9, rel=0.02) for r in records) and records[1]["bytes"] > 1.3 * records[0]["bytes"]
    row = [cell.strip() for cell in (tmp_path / "x/table.md").read_text().splitlines()[2].split("|")]
    assert row[1:3] == ["1e+09", "n_mid_layers=2"] and [cell[:5] for cell in row[4:6]] == [f"{records[i]['bpb']:.3f}" for i in (1, 0)]
    with pytest.raises(SystemExit):
        search.main([*flags, "--gamma=0.5"])
    assert "made with gamma=0.99, not 0.5; give another --name" in capsys.readouterr().err
    assert all((tmp_path / f"x/search.{suffix}").stat().st_size > 1000 for suffix in ("png", "svg"))


@pytest.mark.parametrize("flag, message", [
    ("--flops=abc", "--flops='abc' or --shape=[]: could not convert"), ("--shape='", "No closing quotation"),
    ("--flops=0", "--flops='0' is no"), ("--flops=inf", "--flops='inf' is no"),
    ("--shape=--num_heads=3", "embedding_dim=16 is no multiple of 2 * num_heads=6"), ("--systems=no", "--systems='no' is none of")])
def test_a_search_of_nothing_possible_is_refused_in_one_line(data, flag, message, capsys):
    with pytest.raises(SystemExit) as end:
        search.main(["--name=x", "--systems=none", "--flops=1e9", *TINY, f"--data={data}", flag])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_the_distance_to_plain_bytes_is_that_of_the_same_shape_budget_and_seed():
    def record(system, bpb, budget=1.0, size=16, seed=1):
        return {"budget": budget, "shape": f"embedding_dim={size},num_heads=2", "seed": seed, "system": system, "bpb": bpb}

    records = [record("none", 2.0), record("hnet", 1.5), record("none", 3.0, size=8), record("hnet", 3.25, size=8),
               record("none", 7.0, budget=2.0), record("gumbel", 6.0, budget=2.0), record("hnet", 9.0, size=4), record("hnet", 9.0, seed=2)]
    lines = distance.distances(records, distance.flag("embedding_dim", 128))
    assert lines == {(1.0, "hnet"): [(8, -0.25), (16, 0.5)], (2.0, "gumbel"): [(16, 1.0)]}
    assert distance.flag("n_mid_layers", 4)(records[0]) == 4
    assert distance.best(records, distance.flag("embedding_dim", 128)) == [(16, 0.5), (16, 1.0)]


def test_a_search_of_which_a_run_failed_says_which_and_exits_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "RESULTS", tmp_path)
    assert search.main(["--name=x", "--systems=learned", "--flops=1e9", "--data=no/such", *TINY]) == 1
    assert "learned-1337 failed: train.py: no no/such/meta.json" in capsys.readouterr().err
