"""Flags of generate, evaluate, export and report that cannot be used: one line that names the flag, status 2."""

import pytest

from nsa_jax import evaluate, export, generate
from nsa_jax.report.__main__ import main as report

from .runs import small_config, write_run


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "small"
    write_run(path, small_config())
    return path


NUMBERS = {
    generate.main: {
        "--max-tokens": ["0", "-1", "x", "1e3", "9" * 20],
        "--num-samples": ["0", "nan"],
        "--context": ["0", "1", "-5", "9" * 20],
        "--temperature": ["-1", "nan", "inf"],
        "--top-k": ["-1", "9" * 20, "0.5"],
        "--top-p": ["-0.1", "1.1", "nan"],
        "--min-p": ["-0.1", "2", "nan"],
        "--repetition-penalty": ["-1", "inf", "nan"],
        "--seed": ["-1", "9" * 30],
    },
    evaluate.main: {
        "--context": ["0", "-5"],
        "--stride": ["0", "-1"],
        "--max-tokens": ["0", "-1"],
        "--batch-size": ["0", "-1", "x"],
        "--lengths": ["", "0,64", "64,x"],
        "--depths": ["2", "0.5,nan", ""],
        "--samples": ["0"],
        "--num-keys": ["0", "-2"],
        "--seed": ["-1", "9" * 30],
        "--tasks": ["", "singing"],
    },
}


@pytest.mark.parametrize(
    ("main", "flag", "value"),
    [(main, flag, value) for main, flags in NUMBERS.items() for flag, values in flags.items() for value in values],
    ids=lambda value: getattr(value, "__module__", value)[-20:],
)
def test_numbers_out_of_range_are_refused_before_a_model_is_looked_for(main, flag, value, capsys):
    try:
        status = main(["no-such-run", f"{flag}={value}"])
    except SystemExit as error:  # of argparse
        status = error.code
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2 and (f"argument {flag}" in last or f"error: {flag[2:].replace('-', '_')}=" in last)


@pytest.mark.parametrize(
    ("main", "arguments", "expected"),
    [
        (generate.main, ["RUN", "--top-p=0"], "top_p"),
        (generate.main, ["RUN", "--repetition-penalty=0"], "repetition_penalty"),
        (generate.main, ["RUN", "--prompt-file=FILE/none"], "--prompt-file"),
        (generate.main, ["RUN", "--prompt-file=RUN"], "--prompt-file"),
        (generate.main, ["FILE"], "is no directory"),
        (generate.main, ["RUN@99"], "no such step"),
        (evaluate.main, ["RUN", "--output=FILE"], "FILE"),
        (evaluate.main, ["RUN", "--output=/proc/none"], "/proc/none"),
        (evaluate.main, ["RUN", "--tasks=perplexity", "--files=FILE/none"], "FILE/none"),
        (evaluate.main, ["RUN@99"], "no such step"),
        (evaluate.main, ["x" * 300], "x" * 300),
        (export.main, ["RUN"], "name the directory to write"),
        (export.main, ["RUN", "FILE"], "FILE"),
        (export.main, ["RUN", "/proc/none"], "/proc/none"),
        (export.main, ["FILE", "OUT"], "is no directory"),
        (export.main, ["RUN", "RUN"], "is what is to be exported"),
        (report, ["FILE"], "FILE"),
    ],
)
def test_paths_that_cannot_be_used_are_one_line(main, arguments, expected, workdir, tmp_path, capsys):
    (tmp_path / "file").write_text("a file")
    places = {"RUN": str(workdir), "FILE": str(tmp_path / "file"), "OUT": str(tmp_path / "out")}

    def placed(text):
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    assert main([placed(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and placed(expected) in error and "Traceback" not in error
