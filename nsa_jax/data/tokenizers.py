"""Tokenizers: bytes, BPE trained on the corpus, and any Hugging Face tokenizer.json.

All have `vocab_size`, `eos_id` (ends every document in the token stream), `token_bytes` (bytes of text per token, for
bits per byte), `encode`, `encode_batch`, `decode`, `fingerprint` and `save`. `load` reads what `save` wrote.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers as hf_tokenizers

from nsa_jax.data.errors import DataError

if TYPE_CHECKING:  # tokenising processes import this module, and need not wait for what they do not use
    from ml_collections import ConfigDict

# Enough text for stable merges, and a bound of training time and memory on large corpora.
BPE_TRAINING_BYTES = 64 << 20
BPE_EOS = "<|endoftext|>"
CONFIG_FILE = "tokenizer_config.json"  # in the folder of a tokenizer
TEMPLATES = "additional_chat_templates/*.jinja"  # there, too: chat templates but the default, each named by its file
_MOST_IDS = 1 << 24  # larger vocabularies are mistakes, and tables of their size would fill the memory
# Of a tokenizer_config.json: what `save` writes itself, and what names code to be run, which nothing here does.
_OWN_SETTINGS = ("kind", "eos_token", "fingerprint", "auto_map")
_ANCHOR = "\n"  # no tokenizer of words joins it with what follows
_SPECIAL = ("eos_token", "bos_token", "pad_token", "unk_token")
_KNOWN_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")


class Tokenizer:
    """Base class of the tokenizers.

    Attributes:
      name: short name for messages.
      vocab_size: number of token ids, the end-of-document token included.
      eos_id: end-of-document token.
      token_bytes: int32 [vocab_size], bytes of text that each token stands for; 0 for tokens that stand for no text.
      fingerprint: hash of everything that decides what `encode` returns.
      settings: what its tokenizer_config.json says besides, such as a chat template; kept by `save`.
      prefix_ids: tokens that it puts before a text in transformers, such as one that begins it; `encode` adds none.
    """

    name: str
    vocab_size: int
    eos_id: int
    token_bytes: np.ndarray
    fingerprint: str
    settings: Mapping[str, Any] = MappingProxyType({})
    prefix_ids: tuple[int, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def check_fits(self, vocab_size: int) -> None:
        """Raises ValueError if a model with so many ids does not have all of this tokenizer's."""
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"the tokenizer has {self.vocab_size:,} ids and the model {vocab_size:,}: give the tokenizer that the "
                "model was trained with"
            )

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, without end-of-document token: int32 [n]."""
        return self.encode_batch([text])[0].astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of several texts, in the tokenizer's own dtype."""
        raise NotImplementedError

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As `encode_batch`, of documents of a corpus: none of their tokens ends a document."""
        return self.encode_batch(texts)

    def encode_within(self, text: str) -> np.ndarray:
        """Token ids of a text that continues another: int32 [n].

        Some tokenizers put a space before a text, those of Llama 2 and Mistral 7B for instance; there is none here.
        """
        return self.encode(text)

    def decode(self, ids: Any) -> str:
        """The text of token ids; end-of-document tokens are left out."""
        raise NotImplementedError

    def decode_each(self, ids: Any) -> list[str]:
        """The text of each token as it is within a text, where `decode` may leave out a space at the beginning."""
        return [self.decode([int(i)]) for i in np.asarray(ids).ravel()]

    def save(self, directory: str | os.PathLike) -> None:
        """Writes tokenizer files into `directory`, which is created if needed."""
        raise NotImplementedError

    @staticmethod
    def load(directory: str | os.PathLike) -> Tokenizer:
        """Reads what `save` wrote.

        Raises:
          DataError: `directory` holds no tokenizer.
        """
        path = Path(directory, CONFIG_FILE)
        fix = "copy the file again, or name a directory that save() wrote"
        try:
            saved = _json_object(path, fix)
            kind = saved.get("kind")
            if kind == "byte":
                tokenizer: Tokenizer = ByteTokenizer()
            elif kind == "synthetic":
                size, copy = saved.get("vocab_size"), saved.get("copy")
                if type(size) is not int or not 2 <= size <= _MOST_IDS or type(copy) is not bool:
                    raise DataError(
                        str(path), f"vocab_size={size!r:.80} and copy={copy!r:.80} are no synthetic task's", fix
                    )
                tokenizer = SyntheticTokenizer(size, copy=copy)
            elif kind == "hf" and isinstance(saved.get("eos_token"), str):
                text = Path(directory, "tokenizer.json").read_bytes().decode("utf-8")
                tokenizer = HuggingFaceTokenizer(text, eos=saved["eos_token"], settings=saved)
            else:
                raise DataError(str(path), f"kind={kind!r:.80}, or its eos_token, is none that save() writes", fix)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(str(directory), f"holds no saved tokenizer ({error})", fix) from error
        if saved.get("fingerprint", tokenizer.fingerprint) != tokenizer.fingerprint:
            raise DataError(
                str(directory),
                "the tokenizer is not the one that was saved (its fingerprint differs)",
                "copy it again; or, if it was changed on purpose, delete fingerprint from tokenizer_config.json",
            )
        return tokenizer


def _json_object(path: Path, fix: str) -> dict[str, Any]:
    """The object in a JSON file; raises DataError if it holds something else."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(str(path), f"is not JSON ({error})", fix) from error
    if not isinstance(value, dict):
        raise DataError(str(path), "is no JSON object", fix)
    return value


def _write_config(directory: str | os.PathLike, fields: dict[str, Any]) -> None:
    Path(directory).mkdir(parents=True, exist_ok=True)
    _write_whole(Path(directory, CONFIG_FILE), json.dumps(fields, indent=2) + "\n")


def _write_whole(path: Path, text: str) -> None:
    """Replaces a file when all is written: every start saves its tokenizer, and a full disk must not empty it."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255 and the end-of-document token 256."""

    name = "byte"
    vocab_size = 257
    eos_id = 256
    fingerprint = "byte-1"

    def __init__(self) -> None:
        self.token_bytes = np.ones(self.vocab_size, np.int32)
        self.token_bytes[self.eos_id] = 0

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(t.encode("utf-8", "replace"), np.uint8).astype(np.uint16) for t in texts]

    def decode(self, ids: Any) -> str:
        ids = np.asarray(ids).reshape(-1)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, directory: str | os.PathLike) -> None:
        _write_config(directory, {"kind": "byte", "fingerprint": self.fingerprint})


class SyntheticTokenizer(Tokenizer):
    """Synthetic tokens as text: their ids separated by spaces.

    Every token counts as one byte, so that bits per byte is bits per token. In the copy task the last id separates
    the halves. In the random task every id is an ordinary token, and there is no end-of-document token.

    Args:
      vocab_size: number of ids.
      copy: whether the last id is the separator of the copy task.
    """

    name = "synthetic"

    def __init__(self, vocab_size: int, *, copy: bool):
        self.vocab_size = vocab_size
        self.eos_id = vocab_size - 1
        self.copy = copy
        self.token_bytes = np.ones(vocab_size, np.int32)
        if copy:
            self.token_bytes[self.eos_id] = 0
        self.fingerprint = f"synthetic-1-{vocab_size}-{'copy' if copy else 'random'}"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # Words that are no numbers (in a sample prompt) become their length, so that any string can be encoded.
        return [
            np.array([int(w) % self.vocab_size if w.isdecimal() else len(w) for w in t.split()], np.int64).astype(
                self.dtype
            )
            % self.vocab_size
            for t in texts
        ]

    def decode(self, ids: Any) -> str:
        return " ".join(str(int(i)) for i in np.asarray(ids).reshape(-1))

    def save(self, directory: str | os.PathLike) -> None:
        fields = {"vocab_size": self.vocab_size, "copy": self.copy}
        _write_config(directory, {"kind": "synthetic", **fields, "fingerprint": self.fingerprint})


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    Args:
      serialized: text of a tokenizer.json.
      eos: its end-of-document token. If empty, the first of `eos_ids`, else of the usual names in its vocabulary is
        used.
      name: for messages.
      settings: what its tokenizer_config.json says besides, such as a chat template; kept by `save`, used by nothing
        here.
      eos_ids: ids that end a text.

    Raises:
      DataError: the file is no tokenizer, or has no end-of-document token.
    """

    def __init__(
        self,
        serialized: str,
        *,
        eos: str = "",
        name: str = "tokenizer.json",
        settings: Mapping[str, Any] | None = None,
        eos_ids: Sequence[int] = (),
    ):
        self.name = name
        self.settings = {key: value for key, value in (settings or {}).items() if key not in _OWN_SETTINGS}
        try:
            self._tokenizer = hf_tokenizers.Tokenizer.from_str(serialized)
            eos.encode()  # raises for half of a surrogate pair, which JSON can hold
        except BaseException as error:
            # The library raises Exception, and PanicException (a BaseException) when its Rust code panics.
            if isinstance(error, MemoryError):
                raise
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise DataError(
                f"tokenizer {name}", f"is not a tokenizer.json ({error})", "name a tokenizer.json file"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._serialized = serialized
        named = [token for i in eos_ids if i < _MOST_IDS and (token := self._tokenizer.id_to_token(i))]
        candidates = (eos,) if eos else (*named, *_KNOWN_EOS)
        self.eos_token = next((c for c in candidates if self._tokenizer.token_to_id(c) is not None), "")
        if not self.eos_token:
            raise DataError(
                f"tokenizer {name}",
                f"none of {', '.join(candidates)} is in its vocabulary",
                "set config.data.tokenizer_eos to its end-of-document token",
            )
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.eos_id = vocabulary[self.eos_token]
        # Ids may have gaps, so an embedding needs as many rows as the highest id + 1.
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > _MOST_IDS:
            raise DataError(
                f"tokenizer {name}", f"has the token id {self.vocab_size - 1}", f"use ids below {_MOST_IDS:,}"
            )
        digest = hashlib.blake2b(serialized.encode(), digest_size=16)
        digest.update(self.eos_token.encode())
        self.fingerprint = digest.hexdigest()

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:  # type: ignore[override]
        """See Tokenizer; counted when it is first used, which is not where text is tokenised."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        description = json.loads(self._serialized)
        model = description.get("model") or {}
        # "##" before a piece that goes on within a word is no text; in BPE and Unigram it is. The suffix ends a word.
        default = "" if model.get("type") in ("BPE", "Unigram") else "##"
        prefix, suffix = model.get("continuing_subword_prefix") or default, model.get("end_of_word_suffix") or ""
        byte_level = '"ByteLevel"' in json.dumps([description.get("pre_tokenizer"), description.get("decoder")])
        counts = np.zeros(self.vocab_size, np.int32)
        for token, index in vocabulary.items():
            if byte_level:  # one character of the vocabulary per byte
                counts[index] = len(token.removesuffix(suffix))
            elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):  # byte fallback of SentencePiece vocabularies
                counts[index] = 1
            else:
                counts[index] = len(token.removeprefix(prefix).removesuffix(suffix).replace("\u2581", " ").encode())
        for added in description.get("added_tokens") or []:
            # The library's id counts. The id in the file may differ or lie outside the vocabulary.
            if (given := vocabulary.get(added["content"])) is not None:
                counts[given] = 0 if added.get("special") else len(added["content"].encode())
        counts[self.eos_id] = 0
        return counts

    @functools.cached_property
    def prefix_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """See Tokenizer; the post-processor of tokenizer.json puts them there."""
        plain, whole = (self._tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
        starts = range(len(whole) - len(plain) + 1)
        return tuple(whole[: next((at for at in starts if whole[at : at + len(plain)] == plain), 0)])

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, self.dtype) for e in encodings]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self.encode_batch(texts)
        for i, ids in enumerate(found):
            if (ids == self.eos_id).any():
                found[i] = self._encode_as_text(texts[i])
                if (found[i] == self.eos_id).any():
                    raise DataError(
                        f"tokenizer {self.name}",
                        f"finds its end-of-document token {self.eos_token!r} in the text of a document",
                        "set config.data.tokenizer_eos to a token that no text has",
                    )
        return found

    def _encode_as_text(self, text: str) -> np.ndarray:
        """Tokens of a text that spells out the end-of-document token, which is cut behind its first character."""
        head, tail = self.eos_token[:1], self.eos_token[1:]
        *parts, last = text.split(self.eos_token)
        first, *others = *(part + head for part in parts), last
        return np.concatenate([self.encode(first), *(self.encode_within(tail + x) for x in others)]).astype(self.dtype)

    @functools.cached_property
    def _anchor(self) -> np.ndarray:
        return self.encode(_ANCHOR)

    @functools.cached_property
    def _marks_beginnings(self) -> bool:
        """Whether a text has other tokens at its beginning than within another."""
        return self.encode(_ANCHOR + "a")[len(self._anchor) :].tolist() != self.encode("a").tolist()

    def encode_within(self, text: str) -> np.ndarray:
        if self._marks_beginnings:
            first = len(self._anchor)
            both = self.encode(_ANCHOR + text)
            if np.array_equal(both[:first], self._anchor):
                return both[first:]
        return self.encode(text)

    def decode_each(self, ids: Any) -> list[str]:
        before = self.decode(self._anchor)
        pairs = ((int(i), self.decode([*self._anchor, int(i)])) for i in np.asarray(ids).ravel())
        return [both[len(before) :] if both.startswith(before) else self.decode([i]) for i, both in pairs]

    def decode(self, ids: Any) -> str:
        kept = [int(i) for i in np.asarray(ids).reshape(-1) if i != self.eos_id and i < self.vocab_size]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def save(self, directory: str | os.PathLike) -> None:
        own = {"kind": "hf", "eos_token": self.eos_token, "fingerprint": self.fingerprint}
        _write_config(directory, {**self.settings, **own})
        _write_whole(Path(directory, "tokenizer.json"), self._serialized)


def train_bpe(documents: Iterable[str], vocab_size: int, *, max_bytes: int = BPE_TRAINING_BYTES) -> str:
    """Trains a byte-level BPE tokenizer.

    Args:
      documents: text to train on, read until `max_bytes`.
      vocab_size: size to reach, the 256 bytes and the end-of-document token included.
      max_bytes: characters of text to read: bytes if all are ASCII.

    Returns:
      The text of a tokenizer.json.

    Raises:
      DataError: `vocab_size` is too small, or the corpus has no text.
    """
    if vocab_size < 257:
        raise DataError(
            f"config.data.bpe_vocab_size={vocab_size}", "too small for 256 bytes and EOS", "use at least 257"
        )
    seen = 0

    def sample() -> Iterator[str]:
        nonlocal seen
        for text in documents:
            if seen >= max_bytes:
                return
            seen += len(text)
            # The trainer holds each piece in memory, so pieces are small.
            for start in range(0, len(text), 1 << 16):
                yield text[start : start + (1 << 16)]

    tokenizer = hf_tokenizers.Tokenizer(hf_tokenizers.models.BPE())
    tokenizer.pre_tokenizer = hf_tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf_tokenizers.decoders.ByteLevel()
    trainer = hf_tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BPE_EOS],
        initial_alphabet=hf_tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    if not seen:
        raise DataError("config.data", "the corpus has no text to train a tokenizer on", "use a corpus with text")
    # The end-of-document token stays in the vocabulary alone: added tokens are also found in the text of documents.
    return json.dumps(json.loads(tokenizer.to_str()) | {"added_tokens": []}, ensure_ascii=False)


def _load_or_train_bpe(config: ConfigDict, documents: Iterable[str] | None, directory: Path | None) -> Tokenizer:
    """Loads the BPE from `directory`, or trains it and keeps it there. Each corpus and size has its own directory."""
    vocab_size = config.data.bpe_vocab_size
    if directory is not None and Path(directory, CONFIG_FILE).exists():
        return _load_trained(directory)
    if documents is None:
        raise DataError("config.data.tokenizer='bpe'", "there is no text to train on", "pass documents")
    if directory is None:
        return HuggingFaceTokenizer(train_bpe(documents, vocab_size), eos=BPE_EOS, name="bpe")
    import filelock

    directory.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{directory}.lock"):
        if not Path(directory, CONFIG_FILE).exists():
            trained = HuggingFaceTokenizer(train_bpe(documents, vocab_size), eos=BPE_EOS, name="bpe")
            unfinished = directory.with_name(f"{directory.name}.tmp{os.getpid()}")
            trained.save(unfinished)
            shutil.rmtree(directory, ignore_errors=True)  # what is left of one whose files were deleted
            os.rename(unfinished, directory)
    return _load_trained(directory)


def _load_trained(directory: Path) -> Tokenizer:
    try:
        return Tokenizer.load(directory)
    except DataError as error:
        raise DataError(error.where, error.what, f"delete {directory}: the tokenizer is trained again") from error


def _hf_tokenizer_files(path: str) -> tuple[str, dict[str, Any]]:
    """Text of tokenizer.json, and the settings of tokenizer_config.json and of files of chat templates beside it."""
    template, others = None, {}
    local = Path(path).expanduser()
    if local.is_dir():
        local = local / "tokenizer.json"
    if local.suffix == ".json" or local.exists():
        try:
            serialized = local.read_text(encoding="utf-8")
            settings_file = local.with_name(CONFIG_FILE)
            settings_text = settings_file.read_text(encoding="utf-8") if settings_file.is_file() else "{}"
            template_file = local.with_name("chat_template.jinja")
            template = template_file.read_text(encoding="utf-8") if template_file.is_file() else None
            files = sorted(local.parent.glob(TEMPLATES))
            others = {file.stem: file.read_text(encoding="utf-8") for file in files}
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"config.data.tokenizer_path={path!r}", f"cannot be read ({reason})", "correct the path"
            ) from error
    else:
        import huggingface_hub

        try:
            serialized = Path(huggingface_hub.hf_hub_download(path, "tokenizer.json")).read_text(encoding="utf-8")
        except Exception as error:
            raise DataError(
                f"config.data.tokenizer_path={path!r}",
                f"no local file, and not to be had from the Hugging Face hub ({type(error).__name__}: {error})",
                "name a local tokenizer.json, correct the hub id, or check the network",
            ) from error
        try:
            settings_file = Path(huggingface_hub.hf_hub_download(path, CONFIG_FILE))
            settings_text = settings_file.read_text(encoding="utf-8")
        except Exception:  # optional file
            settings_text = "{}"
    try:
        settings = json.loads(settings_text)
    except (ValueError, RecursionError):  # tokenizer.json may be enough, because the usual names are tried
        settings = None
    settings = settings if isinstance(settings, dict) else {}
    if template is not None:
        settings["chat_template"] = template
    if others:
        named = others if template is None else {"default": template, **others}
        settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    if not settings.get("eos_token") or local.exists():
        special = _object_beside(path, "special_tokens_map.json")
        for name in _SPECIAL:
            token = special.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token in serialized and not settings.get(name):
                settings[name] = token
    return serialized, settings


def _object_beside(path: str, name: str) -> dict[str, Any]:
    """What another file of the checkpoint says whose tokenizer a path or hub id names; nothing without such a file."""
    local = Path(path).expanduser()
    try:
        if local.exists():
            file = local / name if local.is_dir() else local.with_name(name)
        else:
            import huggingface_hub

            file = Path(huggingface_hub.hf_hub_download(path, name))
        found = json.loads(file.read_text(encoding="utf-8"))
    except Exception:  # optional
        return {}
    return found if isinstance(found, dict) else {}


def _end_ids_beside(path: str) -> list[int]:
    """The ids that end a text by the configs of the checkpoint."""
    for name in ("generation_config.json", "config.json"):
        ids = _object_beside(path, name).get("eos_token_id")
        ids = [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and i >= 0]
        if ids:
            return ids
    return []


def load_tokenizer(
    config: ConfigDict, documents: Iterable[str] | None = None, *, directory: str | os.PathLike | None = None
) -> Tokenizer:
    """The tokenizer that `config.data` names.

    Args:
      config: the training config.
      documents: training text of a `bpe` tokenizer; other tokenizers do not read it.
      directory: where a trained `bpe` tokenizer is kept; with None it is not kept.

    Returns:
      The tokenizer.

    Raises:
      DataError: unknown kind, unreadable tokenizer file, hub unreachable, no text to train on.
    """
    data = config.data
    if data.source == "synthetic":
        return SyntheticTokenizer(data.synthetic_vocab, copy=data.synthetic != "random")
    if data.tokenizer == "byte":
        return ByteTokenizer()
    if data.tokenizer == "bpe":
        return _load_or_train_bpe(config, documents, Path(directory) if directory else None)
    if data.tokenizer == "hf":
        if not data.tokenizer_path:
            raise DataError(
                "config.data.tokenizer_path=''", "tokenizer='hf' has none", "name a tokenizer.json or a hub id"
            )
        serialized, settings = _hf_tokenizer_files(data.tokenizer_path)
        found = settings.get("eos_token")
        found = found.get("content") if isinstance(found, dict) else found
        eos = data.tokenizer_eos or (found if isinstance(found, str) else "")
        ids = [] if eos else _end_ids_beside(data.tokenizer_path)
        return HuggingFaceTokenizer(serialized, eos=eos, name=data.tokenizer_path, settings=settings, eos_ids=ids)
    raise DataError(f"config.data.tokenizer={data.tokenizer!r}", "no such tokenizer", "use byte, bpe or hf")
