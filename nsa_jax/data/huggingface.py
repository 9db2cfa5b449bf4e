"""Datasets of the Hugging Face hub, and local files that `datasets` reads, as a source of documents."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa_jax.data.documents import as_tuple, bounded, digest
from nsa_jax.data.errors import DataError

_READERS = ("arrow", "csv", "json", "pandas", "parquet", "text", "webdataset", "xml")  # kinds of files, not data sets


class HuggingFaceSource:
    """Any dataset that `datasets.load_dataset` reads: from the hub, or local parquet, jsonl, text or csv files.

    Args:
      path: first argument of `load_dataset`: a hub id, or `parquet`, `json`, ... with `data_files`.
      name: configuration of the dataset; empty: its default.
      data_files: files or globs; empty: what the dataset defines.
      split: split to read.
      text_field: column that holds the document.
      streaming: iterate without downloading first.
    """

    name = "hf"

    def __init__(
        self,
        *,
        path: str,
        name: str = "",
        data_files: Any = (),
        split: str = "train",
        text_field: str = "text",
        streaming: bool = False,
    ):
        if not path:
            raise DataError(
                "config.data.hf_path=''",
                "the hf source has no dataset",
                "set a hub id such as HuggingFaceFW/fineweb-edu, or 'parquet' or 'json' with hf_data_files",
            )
        if path in _READERS and not as_tuple(data_files):  # load_dataset would look for files in the working directory
            raise DataError(
                f"config.data.hf_path={path!r}",
                "is a kind of files, and hf_data_files names none",
                "name files there, or make hf_path the directory that holds them",
            )
        self.path = os.path.expanduser(path)  # as `files`; shells leave the ~ of --config.data.hf_path=~/data
        self.config_name = name
        self.data_files = tuple(map(os.path.expanduser, as_tuple(data_files)))
        self.split = split
        self.text_field = text_field
        self.streaming = streaming

    def __str__(self) -> str:
        return "/".join(part for part in (self.path, self.config_name, self.split) if part)

    def fingerprint(self) -> str:
        # Local files count with size and time. A hub dataset is assumed not to change after it was cached.
        local = []
        for pattern in (*self.data_files, *([self.path] if os.path.exists(self.path) else [])):
            for entry in sorted(glob.glob(pattern, recursive=True)):
                members = sorted(str(p) for p in Path(entry).rglob("*")) if os.path.isdir(entry) else [entry]
                local += [(m, os.stat(m).st_size, os.stat(m).st_mtime_ns) for m in members if os.path.isfile(m)]
        return digest(
            self.name, self.path, self.config_name, self.data_files, self.split, self.text_field, self.streaming, local
        )

    def load(self) -> Any:
        """Calls `load_dataset` and checks that the text column exists.

        Returns:
          A `datasets.Dataset`, or a `datasets.IterableDataset` if streaming.

        Raises:
          DataError: the hub cannot be reached, the dataset or split does not exist, or it has no such column.
        """
        for name, folder in (("state.json", ""), ("dataset_dict.json", f"{self.split.partition('[')[0]}/")):
            if Path(self.path, name).is_file():
                raise DataError(
                    f"config.data.hf_path={self.path!r}",
                    "was written by save_to_disk, which load_dataset does not read; only hf_tokens_field reads it",
                    f"set hf_path='arrow' and hf_data_files=({str(Path(self.path, f'{folder}*.arrow'))!r},)",
                )
        import datasets  # slow to import, and only this source needs it

        try:
            dataset = datasets.load_dataset(
                self.path,
                name=self.config_name or None,
                data_files=list(self.data_files) or None,
                split=self.split,
                streaming=self.streaming,
            )
            columns = dataset.column_names
            if columns is None:  # such as of csv; the stream itself must not move on by the row that is looked at
                columns = list(next(iter(dataset.take(1)), {self.text_field: ""}))
        except Exception as error:
            raise self.explain(error) from error
        if self.text_field not in columns:
            raise DataError(
                f"config.data.hf_text_field={self.text_field!r}",
                f"{self} has no such column; its columns are {', '.join(columns)}",
                "name the column that holds the text",
            )
        return dataset

    def explain(self, error: Exception) -> DataError:
        """The error to show to the user after `load_dataset` or reading failed."""
        chain: BaseException | None = error
        reasons = []
        while chain is not None:
            reasons.append(f"{type(chain).__name__}: {str(chain)[:300]}")
            names = {cls.__name__ for cls in type(chain).__mro__}
            if names & {"ConnectionError", "OfflineModeIsEnabled", "TransportError", "LocalEntryNotFoundError"}:
                return DataError(
                    f"config.data.hf_path={self.path!r}",
                    f"the Hugging Face hub cannot be reached ({type(error).__name__}: {error})",
                    "check the network, or use local files: hf_path='parquet' (or 'json') with "
                    "hf_data_files=('dir/*.parquet',), or source='text' with files",
                )
            chain = chain.__cause__ or chain.__context__
        return DataError(
            f"config.data.hf_path={self.path!r}",
            f"load_dataset failed for name={self.config_name!r}, split={self.split!r}, "
            f"data_files={self.data_files!r} ({'; from '.join(dict.fromkeys(reasons))})",
            "correct hf_path, hf_name, hf_split or hf_data_files",
        )

    def text(self, row: dict[str, Any]) -> str:
        """The document of one row; missing values count as empty.

        Raises:
          DataError: the column does not hold text.
        """
        value = row[self.text_field]
        if value is None:
            return ""
        if not isinstance(value, str):
            raise DataError(
                f"config.data.hf_text_field={self.text_field!r}",
                f"the column holds {type(value).__name__}, not text; the columns are {', '.join(row)}",
                "name the column that holds the text",
            )
        return value

    def documents(self) -> Iterator[str]:
        rows = iter(self.load())
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:
                raise self.explain(error) from error
            yield from bounded(self.text(row))

    def size_bytes(self) -> int | None:
        return None
