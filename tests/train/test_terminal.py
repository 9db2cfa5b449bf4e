"""What a run shows on terminals of 80 and 120 columns, and elsewhere."""

import io
import json
import subprocess
import sys

import pytest

from nsa_jax.train import metrics, terminal

ROW = {"train/loss": 1.0, "train/loss_mean": 2.35, "train/bits_per_byte": 3.455, "norm/grad": 0.562}
ROW |= {"learning_rate": 1.44e-3, "perf/tokens_per_second": 588_000.4}


def test_a_training_row_fits_the_terminal_and_elsewhere_has_everything():
    whole = "step 50/20000  loss 2.3500  bits/byte 3.455  grad 0.562  lr 1.44e-03  588,000 tokens/s"
    assert terminal.train_line(50, 20000, ROW) == whole
    assert terminal.train_line(50, 20000, ROW, 120) == whole.replace("50/", "   50/")
    assert terminal.train_line(50, 20000, ROW, 80) == (
        "step    50/20000  loss 2.3500  bits/byte 3.455  grad 0.562  588,000 tokens/s"
    )
    assert terminal.train_line(50, 20000, ROW, 50) == "step    50/20000  loss 2.3500  588,000 tokens/s"


def test_bits_per_byte_are_of_the_same_steps_as_the_loss():
    assert "bits/byte 3.391" in terminal.train_line(50, 20000, {**ROW, "train/bits_per_byte_mean": 3.391})


def test_a_speed_that_was_not_measured_is_not_said():
    untimed = {name: value for name, value in ROW.items() if not name.startswith("perf/")}
    assert "tokens/s" not in terminal.train_line(1, 10, untimed)
    assert "nan" not in terminal.train_line(1, 10, untimed)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_status_line_begins_with_the_steps_and_fits(width):
    for doing in ("training", "compiling the train step", "stopping after step 123456"):
        for left in (None, 400.0):
            line = terminal.status_line(doing, 12.4, width, (50_000, 100_000), left)
            assert line.startswith(" 50000/100000 ") and len(line) <= width
            assert doing.split()[0] in line


def test_the_status_line_says_what_is_done_and_for_how_long():
    assert terminal.status_line("preflight: data", 12.4, 80) == "preflight: data (12 s)"
    line = terminal.status_line("training", 99.0, 40, (1, 4), 3725.0)
    assert line == "1/4 ━━━─────────  training, 1:02:05 left"
    assert terminal.status_line("saving", 3.0, 30, (2, 4), ascii_only=True) == "2/4 ######------  saving (3 s)"


def summary(**changes):
    found = {
        "step": 100, "steps": 100, "finished": True, "stopped_by": None, "saved": True, "alarms": {},
        "validation": {"step": 100, "val/loss": 2.31, "val/bits_per_byte": 3.34},
        "best_checkpoint": {"step": 100, "val/loss": 2.31},
        "goodput": {"start": {"wall_seconds": 82.4}}, "workdir": "/runs/my toy", "start_step": 0,
    }  # fmt: skip
    return {**found, **changes}


def test_the_end_says_what_happened_where_it_is_and_what_is_next():
    assert terminal.ending(summary()) == [
        "done: 100 of 100 steps, this start took 1:22",
        "  validation   loss 2.3100, 3.340 bits/byte at step 100",
        "  run          '/runs/my toy'",
        "next",
        "  nsa-jax generate '/runs/my toy' --interactive",
        "  nsa-jax evaluate '/runs/my toy'",
        "  nsa-jax report '/runs/my toy'",
    ]


def test_the_end_of_a_run_that_was_stopped_says_how_it_goes_on():
    early = {"step": 90, "finished": False, "stopped_by": "SIGINT", "validation": None}
    lines = terminal.ending(summary(**early, alarms={"spike": 2, "plateau": 1}), "python -m nsa_jax.", "runs/toy")
    assert lines[0] == "stopped by Ctrl-C after step 90 of 100, this start took 1:22"
    assert "  alarms       3, in alarms.jsonl" in lines
    assert lines[-4:] == [
        "  the same command goes on after step 90",
        "  python -m nsa_jax.generate runs/toy --interactive",
        "  python -m nsa_jax.evaluate runs/toy",
        "  python -m nsa_jax.report runs/toy",
    ]
    unsaved = terminal.ending(summary(**early, saved=False, best_checkpoint=None))
    assert not any("generate" in line for line in unsaved) and any("save_every is 0" in line for line in unsaved)


@pytest.mark.parametrize(
    ("changes", "does"),
    [
        ({"saved": True}, "goes on after step 90"),
        ({"saved": False}, "begins again"),
        ({"saved": False, "start_step": 50}, "goes on after step 50"),
        (
            {"saved": True, "stopped_by": "early stopping: 2 validations without improvement on 2.3"},
            "ends at once: to go on, raise config.guards.early_stop",
        ),
    ],
)
def test_the_end_says_what_the_same_command_does(changes, does):
    lines = terminal.ending(summary(**{"step": 90, "finished": False, "stopped_by": "HALT", **changes}))
    assert f"  the same command {does}" in lines


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_a_status_line_and_a_pipe_has_lines_alone(tmp_path):
    outputs = []
    for stream in (io.StringIO(), Screen()):
        writer = metrics.MetricsWriter(tmp_path, start_step=0, total_steps=5, stream=stream)
        writer._terminal.doing("training")
        writer.progress(3, ROW)
        writer.say("hello [bold]x[/bold]")
        writer.write(3, ROW)
        writer.close()
        outputs.append(stream.getvalue())
    assert outputs[0] == f"{terminal.train_line(3, 5, ROW)}\nhello [bold]x[/bold]\n"
    assert "0/5 ━" in outputs[1] or "0/5 ─" in outputs[1]
    assert "hello [bold]x[/bold]" in outputs[1] and "\x1b[" in outputs[1]
    assert "\x1b[?25h" in outputs[1]  # the cursor is there even if the run is killed
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["step"] == 3


LEFT_ALONE = """
import sys
from nsa_jax.train.terminal import Terminal
terminal = Terminal()
terminal.say("one")
sys.stdin.read()
for _ in range(2):
    terminal.say("two")
print("went on", file=sys.stderr)
"""


@pytest.mark.parametrize(("output", "warnings"), [("", 1), (">&-", 0), (">/dev/full", 1)])
def test_a_run_goes_on_where_its_output_cannot_be_written(output, warnings):
    """The reader of a pipe leaves, standard output is closed, and the disk is full."""
    pipe = subprocess.PIPE
    command = ["sh", "-c", f"exec {sys.executable} -c '{LEFT_ALONE}' {output}"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == ("" if output else "one\n")
        process.stdout.close()
        process.stdin.close()
        said = process.stderr.read()
        assert process.wait(60) == 0
    assert said.count("standard output cannot be written") == warnings and said.rstrip().endswith("went on")


def test_a_run_goes_on_whose_output_lacks_characters_of_its_samples():
    for errors, shown in (("strict", "1 \u00e9 ??\n"), ("backslashreplace", "1 \u00e9 \\u6771\\u4eac\n")):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, "latin-1", errors, write_through=True)
        terminal.Terminal(stream).say("1 \u00e9 \u6771\u4eac")
        assert raw.getvalue().decode("latin-1") == shown


def test_the_pace_is_that_of_finished_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    screen = terminal.Terminal(Screen())
    screen.steps(10, 50)
    screen.advance(11)
    assert screen._left() is None
    now[0] += 8.0
    screen.advance(15)
    assert screen._left() == 70.0
