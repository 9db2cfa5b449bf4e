"""Programs that threads compile while their run reads data and tests its model: calls then find them compiled."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nsa_jax.train.program_store import Program, ProgramStore, Stored, compile_and_tell
from nsa_jax.train.state import Setup

# Traces and lowers for the whole process, one program after the other: both are Python, so that threads that did this
# side by side would wait for each other's lock, and the first program would come to the compiler as late as the last.
_tracer: ThreadPoolExecutor
THREADS = "compile"  # the names of threads that compile programs begin with it


def _make_tracer() -> None:
    global _tracer
    _tracer = ThreadPoolExecutor(1, thread_name_prefix="trace")


_make_tracer()
os.register_at_fork(after_in_child=_make_tracer)  # a child has no threads of its parent


class CompileAhead:
    """Compiles jitted functions in threads. JAX keeps the programs, so that a call after `wait` compiles nothing.

    Programs are traced in the order given, and compiled side by side. Those after the first queue up when it has been
    traced, behind what others asked for meanwhile. A function that cannot be compiled raises its error when it is
    called, as it would without this.

    Args:
      programs: by name, a jitted function and arguments like those of its calls: arrays, or shapes with the sharding
        that the arrays will have.
      context: entered by each thread: what the calls will run under, such as a mesh.
      store: has programs of earlier starts, for which nothing is traced, and gets those that are compiled. The
        functions are each a `Program` then.
    """

    def __init__(
        self,
        programs: Mapping[str, tuple[Any, tuple]],
        context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        store: ProgramStore | None = None,
    ):
        self._programs = programs
        self._context = context
        self._store = store
        self._abandoned = threading.Event()
        self._threads = ThreadPoolExecutor(max(len(programs), 1), thread_name_prefix=THREADS)
        lowerings: dict[str, Future] = {name: Future() for name in programs}
        self._left: dict[str, Future] = {name: Future() for name in programs}
        for name, lowering in lowerings.items():
            self._threads.submit(self._compile, name, lowering, self._left[name])

        def trace(names: list[str]) -> None:
            for name in names:
                self._trace(name, lowerings[name])

        for first in list(programs)[:1]:
            lowerings[first].add_done_callback(lambda _: trace(list(programs)[1:]))
            trace([first])

    def _trace(self, name: str, lowering: Future, stored: bool = True) -> None:
        """Has a function traced; the future receives what is to be compiled, or a stored program."""
        try:
            _tracer.submit(self._lower, name, lowering, stored)
        except RuntimeError:  # the interpreter is ending, and waits for the threads
            lowering.set_result(None)

    def _lower(self, name: str, lowering: Future, stored: bool) -> None:
        function, arguments = self._programs[name]
        try:
            with self._context(), while_tracing():
                if self._abandoned.is_set():
                    lowering.set_result(None)
                else:
                    found = self._store.find(name, arguments) if self._store is not None and stored else None
                    lowering.set_result(found or function.lower(*arguments))
        except BaseException as error:
            lowering.set_exception(error)

    def _compile(self, name: str, lowering: Future, done: Future) -> None:
        program = None
        try:
            lowered = lowering.result()
            if isinstance(lowered, Stored):
                lowered = self._load(name, lowered)
            if lowered is not None and not self._abandoned.is_set():
                with self._context():
                    compiled, serialisable = compile_and_tell(lowered)
                    if self._store is not None and serialisable:
                        program = self._store.serialise(name, compiled)
        except BaseException as error:
            done.set_exception(error)
            return
        done.set_result(None)
        if self._store is not None and program is not None:
            with self._context():
                self._store.add(name, self._programs[name][1], program)

    def _load(self, name: str, stored: Stored) -> Any:
        """None if a stored program could be loaded, else what is to be compiled in its place."""
        function: Program = self._programs[name][0]
        try:
            with self._context():
                function.loaded = stored.compile()
        except Exception as error:
            stored.forget(error)
        else:
            stored.recall()
            return None
        lowering: Future = Future()
        self._trace(name, lowering, stored=False)
        return lowering.result()

    def wait(self, *names: str) -> None:
        """Waits until programs are compiled, or have failed; those of other names are called as ever."""
        for name in names:
            if (future := self._left.pop(name, None)) is not None:
                future.exception()
        if not self._left:
            self._threads.shutdown(wait=False)

    def abandon(self) -> None:
        """Compiles nothing more. What is being compiled cannot be stopped."""
        self._abandoned.set()
        self._left.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


_setting = threading.Lock()
_depth, _before = 0, (True, 5e-3)


@contextlib.contextmanager
def while_tracing() -> Iterator[None]:
    """Sets Python up for threads that trace for seconds beside others, until the last of them is done.

    Python looks for unreachable objects only afterwards; it would find millions alive. Threads change every 0.5 ms: one
    that reads files or calls NumPy lets go of Python's lock each time, and would wait 5 ms to have it again.
    """
    global _depth, _before
    with _setting:
        if not _depth:
            _before = gc.isenabled(), sys.getswitchinterval()
            gc.disable()
            sys.setswitchinterval(5e-4)
        _depth += 1
    try:
        yield
    finally:
        with _setting:
            _depth -= 1
            if not _depth:
                sys.setswitchinterval(_before[1])
                if _before[0]:
                    gc.enable()


def compiling() -> bool:
    """Whether programs are being compiled ahead: a normal exit of the process waits for them."""
    return any(thread.name.startswith(THREADS) for thread in threading.enumerate())


def first_programs(
    setup: Setup, train_step: Any, eval_step: Any, health_program: Any | None, initialises: bool
) -> dict[str, tuple[Any, tuple]]:
    """What a run calls until its first step is done, as `CompileAhead` takes it.

    With a batch ramp, whose batches have other shapes, the initial state alone. Where XLA times matrix products to
    choose among them, it has the GPU to itself: other programs of the process wait.

    Args:
      setup: of the run.
      train_step: the jitted step.
      eval_step: the jitted evaluation.
      health_program: the jitted health figures; None: there are none.
      initialises: the run begins with parameters or averages that no checkpoint has.
    """
    initial: dict[str, tuple[Any, tuple]] = {"initial state": (setup.initialise, ())} if initialises else {}
    if setup.config.train.batch_ramp:
        return initial
    state, batch = setup.target(), setup.abstract_batch()
    programs: dict[str, tuple[Any, tuple]] = {"train step": (train_step, (state, batch))}
    if setup.config.train.eval_batches:
        programs["evaluation"] = (eval_step, (state["params"], batch))
    programs |= initial
    if health_program is not None:
        programs["health"] = (health_program, (state["params"], batch))
    return programs
