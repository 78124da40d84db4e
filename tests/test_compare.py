import json
import shutil

import pytest

from conftest import TINY
from experiments import compare, figures
from model import load_checkpoint
from train import flops_per_byte


def test_a_run_of_which_numbers_are_missing_is_a_row_that_says_so(tmp_path, trained):
    folder = tmp_path / "runs/learned-1337"
    shutil.copytree(trained, folder)
    record = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    (folder / "log.jsonl").write_text(json.dumps(record | {"val_bpb": None, "ends_between": None}) + "\n")
    assert not compare.write(tmp_path) and "diverged" in (tmp_path / "table.md").read_text()
    (folder / "log.jsonl").write_text(json.dumps(record | {"ends_between": None}) + "\n")
    assert compare.write(tmp_path) and f"{record['val_bpb']:.4f}" in (tmp_path / "table.md").read_text()


def test_a_comparison_has_a_row_for_every_system_the_failed_too_and_a_finished_run_is_not_repeated(
        data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    flags = ["--bytes=1024", "--name=x", *TINY, f"--data={data}"]
    assert compare.main([*flags, "--systems=uniform,learned-w1,bpe"]) == 1  # the data has no marks of BPE tokens
    first = (tmp_path / "x/table.md").read_text()
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
    assert page.index("learned-w1-1337") < page.index("uniform-1337") and page.count("<h3>") == 2
    for name in "boundaries.png", "entropy.png", "entropy.svg":
        assert (tmp_path / "x" / name).stat().st_size > 1000


def test_systems_of_equal_compute_read_what_it_allows(data, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    flags = [*TINY, f"--data={data}", "--eval_interval=1000"]
    compare.main(["--systems=uniform,none", "--bytes=2e4", "--equal=flops", "--name=x", *flags])
    evaluations = [json.loads(line) for line in (tmp_path / "x/evaluations.jsonl").read_text().splitlines()]
    uniform, none = ([e for e in evaluations if e["system"] == system][-1] for system in ("uniform", "none"))
    assert none["length"] < 0.8 * uniform["length"] and none["flops"] == pytest.approx(uniform["flops"], rel=0.01)
    log = tmp_path / "x/pilots/none/log.jsonl"
    records = [json.loads(line) | {"bytes_per_second": 1000 * number} for number, line in enumerate(log.read_text().splitlines()[:-1], 1)]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert compare.cost_of_a_byte([*flags, "--boundaries=none"], log.parent, "seconds") == pytest.approx(1 / 3000)  # of 2, 3 and 4 kB/s
