"""The program of a tokenising process. shards.py starts it: python -P tokenize_worker.py TOKENIZER_DIRECTORY PARENT.

It reads pickled (path, documents) from its standard input, writes each group of documents as one file, and answers with
(documents, tokens) or with the exception that prevented it. It ends with its input or with its parent.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import types
from pathlib import Path


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent, which may have been killed while this process tokenises."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get among the answers
    # These packages' own __init__ would import JAX, which takes seconds and may touch a GPU that the trainer uses.
    here = Path(__file__).resolve().parent
    for name, directory in (("nsa_jax", here.parent), ("nsa_jax.data", here)):
        package = types.ModuleType(name)
        package.__path__ = [str(directory)]
        sys.modules[name] = package
    from nsa_jax.data.encoding import encode
    from nsa_jax.data.tokenizers import Tokenizer

    tokenizer = Tokenizer.load(sys.argv[1])
    while True:
        try:
            path, documents = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: object
        try:
            encoded = encode(documents, tokenizer)
            encoded.save(path)
            answer = (len(encoded.lengths), len(encoded.tokens))
        except Exception as error:
            answer = error
        answers.write(pickle.dumps(answer))
        answers.flush()


if __name__ == "__main__":
    main()
