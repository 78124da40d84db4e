"""experiments/compare.py, report.py, bench.py, flops.py and context.py."""
import json
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import train
from common.commandline import UserError
from common.models import load_model, make_model
from conftest import TINY
from experiments import bench, compare, context, flops, report
from experiments.flops import flops_per_byte, paper_flops_per_byte
from experiments.systems import SYSTEMS, Fixed
from model import Output
from train import Hyperparameters


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Counting FLOPs takes 16 rows of TINY."""
    monkeypatch.setattr(flops, "BYTES", 512)


def cells(path):
    """The rows of a Markdown table, without its head."""
    lines = path.read_text().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_here(flags, out_dir):
    """In place of compare.train_to_end: no new process."""
    resume = (out_dir / "ckpt.pt").exists()
    return train.main([*flags, f"--out_dir={out_dir}", f"--resume={resume}"])


@pytest.mark.paper
@pytest.mark.parametrize("system, target, tokens, own", [
    ("uniform", 1 / 2, 16, 0),
    ("none", 1 / 2, 32, 0),
    ("learned", 0.99, 32, 16 * 2 + 16 * 256),  # the policy and the early exit's head
    ("gumbel", 0.99, 32, 16 * 16 + 16),  # its MLP
    ("hnet", 1 / 2, 32, 3 * 16 * 16)])  # three projections
@pytest.mark.parametrize("rows", [4, 8])
def test_flops_are_those_of_all_matmuls(system, target, tokens, own, rows):
    """TINY has 32 bytes in a row, D = 16, a window of 8, and one layer of each kind.

    Padding brings the rows of learned and gumbel to 32 tokens. The return is a matmul, too.
    """
    flags = [f"--system={system}", f"--downsample_rate_target={target}"]
    hp = compare.hyperparameters([*TINY, *flags, f"--effective_batch_size={rows}"])
    model = make_model(hp).eval()
    if system == "hnet":
        torch.nn.init.zeros_(model.q.weight)  # p is 1/2 at every byte: a boundary
    old = {name: z.clone() for name, z in model.state_dict().items()}
    head = 16 * 256
    matrices = 32 * (2 * 7 * 16**2 + head + own) + tokens * 16 * 16**2
    attention = 2 * (2 * 32 * 16 * 16) + 2 * tokens**2 * 16  # a byte's products are with 16 keys
    # five iterations for each matrix; the shorter side is always 16
    longer = 2 * [48, 16, 32, 16] + [48, 16, 128, 64]
    muon = sum(5 * (2 * 16**2 * side + 16**3) for side in longer)
    returns = rows * 32 * 32 if system == "learned" else 0
    # a multiply-add is two FLOPs
    expected = 2 * (3 * (matrices + attention) * rows + returns + muon)
    shards = [torch.randint(256, (24, 32), dtype=torch.uint8).numpy()]
    assert flops_per_byte(model, shards) * rows * 32 == pytest.approx(expected, rel=1e-9)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(z, old[name]) for name, z in model.state_dict().items())


@pytest.mark.paper
def test_the_paper_counts_six_flops_per_matrix_parameter():
    """With D = 8 a byte layer has 3 + 1 + 2 + 1 matrices of D x D, a token layer 3 + 1 + 8 + 4."""
    shape = {"n_down_layers": 2, "n_mid_layers": 5, "n_up_layers": 3, "embedding_dim": 8,
             "num_heads": 1, "policy_window": 1}
    learned = make_model(Hyperparameters(**shape))
    uniform = make_model(Hyperparameters(**shape, system="uniform"))
    before = 2 * 7 * 64
    policy_and_early_head = 2 * 8 + 256 * 8
    from_middle = 0.3 * 5 * 16 * 64 + 3 * 7 * 64 + 256 * 8
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
    (tmp_path / "x.py").write_text("out_dir = 'y'\ntraining_bytes = 1\nseed = 2")
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "train_to_end", train_here)
    compare.main([f"{tmp_path}/x.py", *TINY, f"--data={tmp_path}/data", f"--systems={system}",
                  "--flops=1.1e9", "--policy_scale=1e9", "--eval_interval=999", "--name=x"])
    _, [*_, last] = report.read_run(tmp_path / f"x/runs/{system}-1337")
    assert last["MB"] > 0.004
    assert last["FLOPs"] == pytest.approx(1.1e9, rel=0.03)


def test_hnet_is_charged_for_the_target_rate(data):
    """A new one makes fewer tokens."""
    def per_byte(system):
        flags = [*TINY, f"--data={data}", f"--system={system}"]
        return 1e15 / compare.affordable_bytes(compare.hyperparameters(flags), 1e15)

    assert per_byte("hnet") == per_byte("uniform")


@pytest.fixture
def runs(tmp_path, trained, monkeypatch):
    """A folder of results with three runs.

    A byte costs 2 FLOPs, and as the paper counts, its mean rate in training: 2.5.
    """
    monkeypatch.setattr(report, "run_flops_per_byte", lambda folder, records: 2)
    monkeypatch.setattr(report, "paper_flops_per_byte", lambda model, rate: rate)
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
                records.append({"bytes": m * 1e6, "auto": 1.0, "rate": m,
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
    learned, uniform = cells(runs / "table.md")
    assert learned == ["learned", "2.500 ± 0.500 (2)", "0.30", "12%", "4.0", "8e+06", "6.7"]
    assert uniform == ["uniform", "4.000 (1)", "0.60", "50%", "4.0", "8e+06", "6.7"]
    lines = figures[0].axes[0].lines
    assert [[*line.get_ydata()] for line in lines] == [[2.5, 2.0], [3.5, 3.0], [4.5, 4.0]]
    for line in lines:
        assert [*line.get_xdata()] == [5e6, 10e6]
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
        file.write("<!-- y first later -->")
    with pytest.raises(UserError, match="there are no runs of the table y"):
        report.main([])
    (runs / "runs/learned-1/measured.json").write_text('{"first": 1.5, "later": 0.75}')
    report.main(["--table=y", "--text=C", "--machine=m", *folders[:1]])
    report.main(["--table=y", "--text=D", "--machine=m", *folders[1:2]])  # lacks both
    log = runs / "runs/learned-2/log.jsonl"  # the first seed in another precision
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

<!-- y first later -->
| tokens | C: first | later |
| --- | --- | --- |
| learned | 1.500 | 0.750 |
"""
    written = readme.read_text(), (runs / "runs.jsonl").read_text()
    report.main(["--table=x", "--text=C", "--machine=m", *folders[1:2]])  # replaces its line
    assert (readme.read_text(), (runs / "runs.jsonl").read_text()) == written
    report.main(["--table=x", "--text=C", "--machine=m", "--label=z", *folders[:1]])
    assert "| z | 2.000 (1) | -0.750 |\n" in readme.read_text()
    with pytest.raises(UserError, match="give --table, --text and --machine"):
        report.main([*folders, "--table=x"])


@pytest.mark.parametrize("old, new, message", [
    ('"embedding_dim": 16', '"embedding_dim": 32', "has a run of flags={"),
    ('"bytes": 4000000.0', '"bytes": 4300000.0', "has a run of MB=4.0 and seed 1, and this one has "
     "MB=4.3; give another --label or --text"),
    ('"held_out": "', '"held_out": "other', "has a run of held_out="),
    ('"system": "learned"', '"system": "random"', "has a run of system=learned and seed 1, and")])
def test_only_runs_that_differ_in_seed_and_precision_share_a_cell(
        old, new, message, runs, monkeypatch):
    monkeypatch.setattr(report, "RUNS", runs / "runs.jsonl")
    monkeypatch.setattr(report, "READMES", [])
    report.RUNS.write_text("")
    log = runs / "runs/learned-2/log.jsonl"
    changed = log.read_text().replace("float32", "float16")
    add = ["--table=x", "--text=C", "--machine=m", "--label=all"]
    log.write_text(changed.replace(old, new))
    with pytest.raises(UserError, match=message):
        report.main([*add, f"{runs}/runs/learned-1", f"{runs}/runs/learned-2"])
    assert report.RUNS.read_text() == ""
    log.write_text(changed)
    report.main([*add, f"{runs}/runs/learned-1", f"{runs}/runs/learned-2"])
    assert len(read_jsonl(report.RUNS)) == 2


def test_the_readmes_tables_are_those_of_the_recorded_runs():
    recorded = read_jsonl(report.RUNS)
    for path in report.READMES:
        text = path.read_text(encoding="utf-8")
        assert report.with_tables(text, recorded) == text


def test_a_log_without_a_header_is_refused(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "bytes": 128, "auto": 2.0}\n')
    with pytest.raises(UserError, match="has no header"):
        report.read_run(tmp_path)


def test_a_run_without_its_checkpoint_or_its_data_is_refused(tmp_path, trained):
    out = shutil.copytree(trained, tmp_path / "out")
    saved = torch.load(out / "ckpt.pt")
    saved["config"]["data"] = str(tmp_path)
    torch.save(saved, out / "ckpt.pt")
    with pytest.raises(UserError, match="no .*meta.json; make the data first"):
        report.read_run(out)
    (out / "ckpt.pt").unlink()
    with pytest.raises(UserError, match="there is no checkpoint"):
        report.read_run(out)


def test_flops_are_counted_again_only_after_the_log_has_grown(tmp_path, trained, monkeypatch):
    out = shutil.copytree(trained, tmp_path / "out")
    monkeypatch.setattr(report, "flops_per_byte", lambda model, shards: next(costs))
    costs = iter([10, 20])
    evaluation = {"bytes": 1e6, "val_bpb": 1, "val_rate": 1}
    for extra, cost in ("", 10), ("", 10), (json.dumps(evaluation) + "\n", 20):
        with open(out / "log.jsonl", "a") as log:
            log.write(extra)
        _, [*_, last] = report.read_run(out)
        assert last["FLOPs"] == pytest.approx(cost * 1e6 * last["MB"])


def test_a_plain_adamw_will_do_as_the_optimizer(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "make_optimizer", lambda model, hp, dtype: torch.optim.AdamW(
        model.parameters(), lr=hp.learning_rate))
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
    started = []

    def train_to_end(flags, out_dir):
        started.append(out_dir.name)
        return train_here(flags, out_dir)

    monkeypatch.setattr(compare, "train_to_end", train_to_end)
    flags = [*TINY, f"--data={data}", "--training_bytes=512", "--first_seed=7", "--seeds=2"]
    compare.main([*flags, "--systems=end-of-vowel,learned"])
    assert started == ["end-of-vowel-7", "learned-7", "end-of-vowel-8", "learned-8"]
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
    assert compare.main([*flags, "--systems=none,uniform"]) == 2
    assert capfd.readouterr().err.count("train.py: ") == 1
    [uniform] = cells(results / "table.md")
    assert uniform[0] == "uniform"

    monkeypatch.setattr(compare, "train_to_end", train_here)
    compare.main([*flags, "--systems=uniform"])  # nothing left to train
    assert cells(results / "table.md") == [uniform]
    with pytest.raises(UserError, match="trained with gamma=0.97, not 0.5; use another --name"):
        compare.main([*flags, "--systems=uniform", "--gamma=0.5"])
    with pytest.raises(UserError, match="trained with training_bytes=512, not 1024"):
        compare.main([*flags, "--systems=uniform", "--first_seed=1", "--training_bytes=1024"])
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
    small, large = (report.read_run(tmp_path / f"try/runs/{folder}/none-1337")[0]["parameters"]
                    for folder in (".", deep))
    assert small < large


@pytest.mark.parametrize("flag, message", [
    ("--shape='", "argument --shape: invalid split value"),
    ("--seed=5", "--seed is set for each run; use --systems, --first_seed"),
    ("--seed 5", "--seed is set for each run"),
    ("--shape=--system=none", "--system is set for each run"),
    ("--flops 1e9 --training_bytes 9", "--training_bytes is set for each run"),
    ("--seeds=0", "--seeds=0 must be above 0"),
    ("--flops=-1e9", "--flops=-1000000000.0 must be above 0"),
    ("--systems=no", "system=.no. must be one of learned")])
def test_mistakes_in_a_comparison_are_explained(flag, message, monkeypatch):
    monkeypatch.delattr(compare, "train_to_end")  # nothing is trained
    with pytest.raises(UserError, match=message):
        compare.main(["--name=x", "--systems=none", *TINY, *flag.split()])


def test_bench_converts_seconds_into_speeds(monkeypatch, capsys):
    """Every training step takes a hundredth of a second: one of 4 rows of 32 bytes, one of 8."""
    monkeypatch.setattr(bench, "seconds", lambda function: 0.01)
    monkeypatch.setattr(bench, "flops_per_byte", lambda model, shards: 1e9)
    bench.main([*TINY, "--setting=--system=none --effective_batch_size=8", "--setting="])
    lines = capsys.readouterr().out.splitlines()
    none, default = (line.strip("| ").split(" | ") for line in lines[4:6])
    assert default == ["default", "12.8", "0%", "10.0", "128.0", "12.80", "1.00"]
    assert none == ["--system=none --effective_batch_size=8", "25.6", "0%", "10.0", "256.0",
                    "25.60", "0.50"]


def test_bits_are_those_of_a_rows_beginning_and_end_and_of_repeated_and_new_words():
    """A byte's bits are its value here. A regular expression finds the words."""
    text = (b"the cat sat on the mats, then the cat_ sat on the matter; then abcdefghijkl x.abcde y")
    rows = np.frombuffer(text * 8, np.uint8).reshape(2, -1)
    expected = {"repeated": {}, "new": {}}
    for row in rows:
        pieces = [*re.finditer(rb"[^a-z]*[a-z]+[^a-z]", row.tobytes())]
        seen = []
        for before, word in zip(pieces, pieces[1:]):
            pair = before[0], word[0]
            kind = expected["repeated" if pair in seen else "new"]
            seen.append(pair)
            for k, byte in enumerate(word[0][:9] if len(word[0]) >= 5 else b""):
                kind.setdefault(k, []).append(byte)

    def model(x, u):
        return Output(x, x, None, None)

    model.hp = train.Hyperparameters(seq_len=rows.shape[1])
    model.head = SimpleNamespace(logp=lambda Z, y: -math.log(2) * y.float())
    found = context.measure(model, [rows])
    assert found["first"] == pytest.approx(rows[:, :64].mean())
    assert found["later"] == pytest.approx(rows[:, 256:].mean())
    for kind in "repeated", "new":
        assert len(found[kind]) > 4
        assert found[kind] == pytest.approx([np.mean(z) for z in expected[kind].values()])
