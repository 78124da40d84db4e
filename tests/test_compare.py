"""experiments/compare.py, report.py, bench.py, flops.py and tables.py."""
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

import model as model_file
import train
from common.checkpoint import load_model, make_model
from common.commandline import UserError
from conftest import TINY
from experiments import bench, compare, report, tables
from experiments.flops import flops_per_byte, muon_flops, paper_flops_per_byte, row_flops
from experiments.systems import SYSTEMS, Fixed
from model import BOS
from train import Hyperparameters, make_optimizer


def cells(path):
    """The rows of a Markdown table, without its head."""
    lines = path.read_text().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_here(flags, out_dir):
    """In place of compare.train_to_end: no new process."""
    train.main([*flags, f"--out_dir={out_dir}", f"--resume={(out_dir / 'ckpt.pt').exists()}"])
    return True


@pytest.mark.paper
@pytest.mark.parametrize("flags", [
    "", "--attention_window=64 --seq_len=300", "--system=none", "--system=hnet", "--system=gumbel",
    "--system=uniform --seq_len=20 --attention_window=64"])
def test_flops_are_those_that_torch_counts_except_for_fillers(flags, monkeypatch):
    monkeypatch.setattr(model_file, "M_MULTIPLE", 1)
    monkeypatch.setattr(model_file, "T_MULTIPLE", 1)
    hp = compare.hyperparameters(["--embedding_dim=32", *flags.split()])
    model = make_model(hp).train()
    y = torch.randint(256, (1, hp.seq_len))  # one row, so that none is shorter than another
    x = F.pad(y[:, :-1], (1, 0), value=BOS)
    optimizer = make_optimizer(model, hp, "float32")
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    with FlopCounterMode(display=False) as counter:
        logp, early_logp, l, a = model(x, y, torch.rand(1, hp.seq_len))
        early = 0 if early_logp is None else early_logp.sum()
        (logp.sum() + early + l.sum()).backward()
        model_flops = counter.get_total_flops()
        optimizer.step()
    flops = row_flops(model, (a > 0.5).float().mean().item())
    assert flops == pytest.approx(model_flops, rel=0.01)
    assert model_flops + muon_flops(model) == counter.get_total_flops()
    hp.effective_batch_size = 24
    per_byte = flops_per_byte(model, (a > 0.5).float().mean().item())
    assert per_byte * 24 * hp.seq_len == pytest.approx(24 * flops + muon_flops(model))


@pytest.mark.paper
def test_the_paper_counts_six_flops_per_matrix_parameter():
    """With D = 8 a byte layer has 3 + 1 + 2 + 1 matrices of D x D, a token layer 3 + 1 + 8 + 4."""
    shape = {"n_down_layers": 2, "n_mid_layers": 5, "n_up_layers": 3, "embedding_dim": 8,
             "num_heads": 1, "policy_window": 1}
    learned = make_model(Hyperparameters(**shape))
    uniform = make_model(Hyperparameters(**shape, system="uniform"))
    before = 2 * 7 * 64
    policy_and_early_head = 2 * 8 + 257 * 8
    from_middle = 0.3 * 5 * 16 * 64 + 3 * 7 * 64 + 257 * 8
    assert paper_flops_per_byte(uniform, 0.3) == pytest.approx(6 * (before + from_middle))
    assert paper_flops_per_byte(learned, 0.3) == pytest.approx(
        6 * (before + policy_and_early_head + from_middle))


@pytest.mark.parametrize("system", ["learned", "whitespace", "none"])
def test_a_run_of_equal_flops_reads_the_bytes_that_they_pay_for(
        system, data, tmp_path, monkeypatch):
    """The policy does not learn here. Validation rows are unlike training rows: one word each."""
    shutil.copytree(data, tmp_path / "data")
    val = tmp_path / "data/val_00000.bin"
    val.write_bytes(b"a" * val.stat().st_size)
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "train_to_end", train_here)
    compare.main([*TINY, f"--data={tmp_path}/data", f"--systems={system}", "--flops=1.1e9",
                  "--policy_learning_rate=0", "--eval_interval=999", "--name=x"])
    _, [*_, last] = tables.read_run(tmp_path / f"x/runs/{system}-1337")
    assert last["MB"] > 0.004
    assert last["FLOPs"] == pytest.approx(1.1e9, rel=0.03)


@pytest.fixture
def runs(tmp_path, trained, monkeypatch):
    """A folder of results with three runs.

    In run i, byte m million costs m FLOPs, and ten times as many as the paper counts them.
    """
    monkeypatch.setattr(tables, "flops_per_byte", lambda model, rate: rate / 10)
    monkeypatch.setattr(tables, "paper_flops_per_byte", lambda model, rate: rate)
    header = json.loads((trained / "log.jsonl").read_text().splitlines()[0])
    hp = header["hyperparameters"] | {"training_bytes": 4e6, "gamma": 0.5}
    for i, (system, seed) in enumerate([("learned", 1), ("learned", 2), ("uniform", 1)]):
        folder = tmp_path / f"runs/{system}-{seed}"
        folder.mkdir(parents=True)
        (folder / "ckpt.pt").touch()
        resumed = header | {"hyperparameters": hp | {"system": system, "seed": seed}}
        records = [header, resumed]
        for m in range(5):
            speed = 1e9 if m == 1 else 1e4
            if m > 0:
                records.append({"bytes": m * 1e6, "auto": 1.0, "rate": 10 * m, "undecided": 0.5,
                                "bytes_per_second": speed})
            if m in (0, 2, 4):
                records.append({"bytes": m * 1e6, "val_bpb": 3 - m / 4 + i,
                                "val_rate": (1 + i) / 5, "outside": i / 4, "line": []})
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / "log.jsonl").write_text("".join(lines))
    return tmp_path


def test_the_table_and_figure_show_means_and_costs(runs, trained, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    compare.write_results(runs)
    at_2, at_4 = 1e6 * (1 + 2), 1e6 * (1 + 2 + 3 + 4)
    learned, uniform = cells(runs / "table.md")
    assert learned == ["learned", "2.500 ± 0.500 (2)", "0.30", "12%", "4.0", "1e+07", "6.7"]
    assert uniform == ["uniform", "4.000 (1)", "0.60", "50%", "4.0", "1e+07", "6.7"]
    lines = figures[0].axes[0].lines
    assert [[*line.get_ydata()] for line in lines] == [[2.5, 2.0], [3.5, 3.0], [4.5, 4.0]]
    for line in lines:
        assert [*line.get_xdata()] == pytest.approx([10 * at_2, 10 * at_4])
    for style in ("color", "marker", "linestyle"):
        first, second, other = (getattr(line, f"get_{style}")() for line in lines)
        assert first == second != other


def test_an_unfinished_run_is_in_no_table(tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "runs/learned-1337")
    lines = (folder / "log.jsonl").read_text().splitlines(True)
    (folder / "log.jsonl").write_text("".join(lines[:-1]))
    compare.write_results(tmp_path)
    assert cells(tmp_path / "table.md") == []


def test_recorded_runs_become_the_tables_of_the_readmes(runs, monkeypatch, capsys):
    readme = runs / "README.md"
    monkeypatch.setattr(report, "RUNS", runs / "runs.jsonl")
    monkeypatch.setattr(report, "READMES", [readme])
    (runs / "runs.jsonl").write_text("")
    readme.write_text("a\n\n<!-- x bits lead -->\nold\n\n<!-- x lead -->\n\n<!-- no table -->\n\n")
    folders = [str(path) for path in sorted((runs / "runs").iterdir())]
    report.main(["--table=x", "--text=C", "--machine=m", *folders])
    with open(readme, "a") as file:
        file.write("<!-- y file_bits recall -->")
    with pytest.raises(UserError, match="there are no runs of the table y"):
        report.main([])
    (runs / "runs/learned-1/measured.json").write_text('{"file_bits": 1.5, "recall": 0.75}')
    report.main(["--table=y", "--text=C", "--machine=m", *folders[:1]])
    report.main(["--table=y", "--text=D", "--machine=m", *folders[1:2]])  # lacks both
    log = runs / "runs/learned-2/log.jsonl"  # the first seed in another number format
    again = log.read_text().replace('"seed": 2', '"seed": 1').replace("float32", "float16")
    log.write_text(again)
    report.main(["--table=x", "--text=C", "--machine=m", *folders[1:2]])
    recorded = read_jsonl(runs / "runs.jsonl")
    assert [(r["table"], r["system"], r["seed"]) for r in recorded] == [
        ("x", "learned", 1), ("x", "learned", 2), ("x", "uniform", 1), ("y", "learned", 1),
        ("y", "learned", 2), ("x", "learned", 1)]
    assert recorded[0]["flags"]["gamma"] == 0.5 and "seed" not in recorded[0]["flags"]
    assert recorded[0]["commit"] and recorded[0]["MB"] == 4
    assert readme.read_text() == """a

<!-- x bits lead -->
| tokens | C: bits | lead |
| --- | --- | --- |
| learned | 2.750 ± 0.250 (2) |  |
| uniform | 4.000 (1) | +1.250 |

<!-- x lead -->
| tokens | C |
| --- | --- |
| uniform | +1.250 |

<!-- no table -->

<!-- y file_bits recall -->
| tokens | C: file bits | recall |
| --- | --- | --- |
| learned | 1.500 (1) | 75% |
"""
    written = readme.read_text(), (runs / "runs.jsonl").read_text()
    report.main(["--table=x", "--text=C", "--machine=m", *folders[1:2]])  # replaces its line
    assert (readme.read_text(), (runs / "runs.jsonl").read_text()) == written
    report.main(["--table=x", "--text=C", "--machine=m", "--label=z", *folders[:1]])
    assert "| z | 2.000 (1) | -0.750 |\n" in readme.read_text()
    with pytest.raises(UserError, match="give --table, --text and --machine"):
        report.main([*folders, "--table=x"])


def test_the_readmes_tables_are_those_of_the_recorded_runs():
    recorded = read_jsonl(report.RUNS)
    for path in report.READMES:
        text = path.read_text(encoding="utf-8")
        assert report.with_tables(text, recorded) == text


def test_a_log_without_a_header_is_refused(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "bytes": 128, "auto": 2.0}\n')
    with pytest.raises(UserError, match="has no header"):
        tables.read_run(tmp_path)


def test_a_plain_adamw_will_do_as_the_optimizer(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "make_optimizer", lambda model, hp, dtype: torch.optim.AdamW(
        model.parameters(), lr=hp.learning_rate))
    assert muon_flops(make_model(Hyperparameters(embedding_dim=16))) == 0
    monkeypatch.setattr(bench, "TURNS", 2)
    bench.main([*TINY, "--setting="])
    assert "| default | " in capsys.readouterr().out
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "train_to_end", train_here)
    compare.main([*TINY, f"--data={data}", "--systems=learned", "--training_bytes=512"])
    assert cells(tmp_path / "try/table.md")[0][1].endswith("(1)")


def test_a_new_rule_is_compared_once_it_is_in_SYSTEMS(data, tmp_path, monkeypatch):
    class Vowels(Fixed):
        def rule(self, x, u):
            return torch.isin(x, torch.tensor([*b"aeiou"]))

    monkeypatch.setitem(SYSTEMS, "end-of-vowel", Vowels)
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "train_to_end", train_here)
    flags = [*TINY, f"--data={data}", "--training_bytes=512", "--first_seed=7", "--seeds=2"]
    compare.main([*flags, "--systems=end-of-vowel,learned"])
    learned, vowels = cells(tmp_path / "try/table.md")
    assert learned[0] == "learned" and learned[1].endswith("(2)")
    assert vowels[0] == "end-of-vowel" and vowels[1].endswith("(2)")
    for seed in (7, 8):
        _, saved = load_model(tmp_path / f"try/runs/learned-{seed}/ckpt.pt")
        assert saved["config"]["seed"] == seed


def test_a_failed_run_does_not_end_a_comparison(data, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    results = tmp_path / "x"
    (results / "runs/none-1337/ckpt.part").mkdir(parents=True)  # in the way of a checkpoint
    flags = [*TINY, f"--data={data}", "--training_bytes=512", "--name=x"]
    with pytest.raises(SystemExit):
        compare.main([*flags, "--systems=none,uniform"])
    assert capfd.readouterr().err.count("train.py: ") == 1
    [uniform] = cells(results / "table.md")
    assert uniform[0] == "uniform"

    monkeypatch.setattr(compare, "train_to_end", train_here)
    compare.main([*flags, "--systems=uniform"])  # nothing left to train
    assert cells(results / "table.md") == [uniform]
    with pytest.raises(UserError, match="trained with gamma=0.97, not 0.5; use another --name"):
        compare.main([*flags, "--systems=uniform", "--gamma=0.5"])
    (results / "runs/uniform-1337/ckpt.pt").write_bytes(b"")
    with pytest.raises(UserError, match="ckpt.pt is damaged"):
        compare.main([*flags, "--systems=uniform"])


def test_every_system_trains_in_every_shape(data, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "train_to_end", train_here)
    compare.main([*TINY, f"--data={data}", "--systems=none,uniform", "--training_bytes=512",
                  "--log_interval=99", "--shape=--n_mid_layers=3 --gamma=1/2", "--shape="])
    deep = "n_mid_layers=3,gamma=1:2"
    text = (tmp_path / "try/table.md").read_text()
    assert f"| {deep}: bits |" in text and "| bits |" in text
    assert [row[0] for row in cells(tmp_path / "try/table.md")] == ["uniform", "none"]
    small, large = (tables.read_run(tmp_path / f"try/runs/{folder}/none-1337")[0]["parameters"]
                    for folder in (".", deep))
    assert small < large


@pytest.mark.parametrize("flag, message", [
    ("--shape='", "argument --shape: invalid split value"),
    ("--seed=5", "--seed=5 is set for each run; use --systems, --first_seed"),
    ("--shape=--system=none", "--system=none is set for each run"),
    ("--flops=1e9 --training_bytes=9", "--training_bytes=9 is set for each run"),
    ("--seeds=0", "--seeds=0 must be above 0"),
    ("--flops=-1e9", "--flops=-1000000000.0 must be above 0"),
    ("--systems=no", "system=.no. must be one of learned")])
def test_mistakes_in_a_comparison_are_explained(flag, message):
    with pytest.raises(UserError, match=message):
        compare.main(["--name=x", "--systems=none", *TINY, *flag.split()])


def test_bench_converts_seconds_into_speeds(monkeypatch, capsys):
    """Every training step takes a hundredth of a second: one of 4 rows of 32 bytes, one of 8."""
    monkeypatch.setattr(bench, "seconds", lambda function: 0.01)
    bench.main([*TINY, "--setting=--system=none --effective_batch_size=8", "--setting="])
    lines = capsys.readouterr().out.splitlines()
    none, default = (line.strip("| ").split(" | ") for line in lines[3:5])
    assert default[:4] == ["default", "12.8", "0%", "10.0"] and default[-1] == "1.00"
    assert none[:4] == ["--system=none --effective_batch_size=8", "25.6", "0%", "10.0"]
    assert none[-1] == "0.50"
