"""Makes one HTML file that shows what runs did: curves, health of NSA, alarms, samples, configuration.

    python -m nsa_jax.report runs/quickstart
    python -m nsa_jax.report runs/quickstart runs/wider --out comparison.html
    python -m nsa_jax.report s3://team/runs/a

The file contains everything, including the charting library (2 MB), and opens from disk without a network. A run that
was interrupted, or is still training, is shown as far as it got. Several runs are drawn into the same charts, with the
differences of their configurations. Health, samples and configuration are shown for one run at a time.

`python -m nsa_jax.evaluate RUN` beforehand adds loss by position of whole documents, and needles. After
`python -m nsa_jax.inspect RUN --text FILE` the report links to the page that this writes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_jax.command_line import EXIT_USAGE, forgive
from nsa_jax.hub import remote_run
from nsa_jax.hub.output import check_writable
from nsa_jax.object_store import Folder, normal, scheme_of
from nsa_jax.report.page import build
from nsa_jax.report.reading import ReportError, read_run


def write(path: Path, text: str) -> None:
    """Writes a file atomically; if that fails, an existing file stays as it is.

    Raises:
      OSError: it cannot be written.
    """
    number, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(number, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp allows access to the owner only
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def _local(run: str):
    """The workdir of a run; of one in an object store, a copy without what checkpoints hold.

    Raises:
      StoreError: the store does not answer.
    """
    if not scheme_of(run):
        yield Path(run)
        return
    with tempfile.TemporaryDirectory() as directory:
        store, workdir = Folder(run), Path(directory)
        remote_run.fetch_small_files(store, workdir)
        for step in remote_run.whole_steps(store):
            (workdir / remote_run.CHECKPOINTS / str(step)).mkdir(parents=True)
        yield workdir


def _read(run: str) -> dict[str, Any]:
    address = normal(run) if scheme_of(run) else ""
    try:
        with _local(run) as workdir:
            return read_run(workdir, address=address)
    except ReportError as error:
        raise ReportError(f"{run}: {str(error).partition(': ')[2]}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """The command line tool; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_jax.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's workdir, or its address (s3://, gs://)")
    parser.add_argument(
        "--out", type=Path, help="file to write; default: report.html in the first run's directory, or in this one"
    )
    args = parser.parse_args(argv)
    out = args.out or Path("" if scheme_of(args.runs[0]) else args.runs[0]) / "report.html"
    try:
        # A run that is named twice appears once.
        once = {normal(run) if scheme_of(run) else str(Path(run).resolve()): run for run in args.runs}
        text = build([_read(run) for run in once.values()], out.parent)
        if out.is_dir():
            raise ReportError(f"--out {out}: a directory; name a file")
        if not out.parent.is_dir():
            raise ReportError(f"--out {out}: there is no directory {out.parent}")
        check_writable(out.parent, "name another place with --out")
        write(out, text)
    except (ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    forgive(sys.stdout)
    print(f"{out} ({len(text.encode()) / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
