"""Runs Mosaic GPU (Hopper) kernels on the CPU in JAX's interpreter for them, which lacks a little.

The interpreter simulates warpgroups, shared memory, TMA and barriers and finds data races. What changes in JAX 0.12's:

- It does not know `pl.run_state` on accumulators: a scoped one starts at zero and its initial value is added behind.
- It does not know products whose left operand is in registers, nor look for races in what products read.
- It asks for a fence between a warpgroup's read and TMA's writing over it, where a barrier is enough: every read counts
  as a fence. A missing barrier is still found; a missing fence only where nobody reads between the two accesses.
- What a warpgroup writes, fences and multiplies would be a race: a fence takes time of its own here.
- It lets TMA read from any address: here only from multiples of 16 bytes, as the hardware does.
- It keeps a buffer for each view of `boxed_tiles` and `row_boxes`: here the two views of a tile are one.
- It cannot reshape what TMA copies: here that takes the shape of the place it is copied to.
- It knows nothing of `sm90_columns`, `sm90_gather`, `sm90_products`, `sm90_reduce` and `sm90_warp`, written in MLIR:
  here the same is done row by row, with columns in the order that products have them in, so that they do not fit those
  of a matrix that came otherwise. What a warp decides for itself is decided for its warpgroup.
- It compiles a kernel anew for every warpgroup of every program: here once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from nsa_jax.ops.target import Target, compile_for
from nsa_jax.ops.tiles import ROWS


def skip_where_missing() -> None:
    """Skips the test module where JAX cannot interpret the kernels."""
    if jax.__version_info__ < (0, 12):
        pytest.skip("needs the Mosaic GPU interpreter of JAX 0.12, which knows plgpu.load", allow_module_level=True)
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu", exc_type=ImportError)


@contextlib.contextmanager
def interpret(monkeypatch, *, unread_row: int | None = None):
    """Makes ops traced in this context choose Hopper's kernels and interpret them; a data race raises.

    Args:
      monkeypatch: pytest's, whose end undoes all changes to JAX.
      unread_row: a row of an output that several writers may fill at once, since nobody reads it.

    Yields:
      A list that takes the module names of the Mosaic kernels as they are called.
    """
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, race_detection_state
    from jax._src.state.types import ReshapeTransform
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from nsa_jax.ops.kernels import sm90_columns, sm90_gather, sm90_products, sm90_reduce, sm90_rows, sm90_warp

    called: list[str] = []
    # Copies take turns on the simulated threads of TMA; those that share one look as if they were ordered.
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
    kernel = plgpu.kernel

    def recording_kernel(entry, **kwargs):
        called.append(entry.__module__.rpartition(".")[-1])
        return kernel(entry, interpret=params, **kwargs)

    kernel_in_place = pl.kernel

    def recording_kernel_in_place(entry, **kwargs):
        called.append(entry.__module__.rpartition(".")[-1])
        return kernel_in_place(entry, interpret=params, **kwargs)

    run_any_state = pl.run_state

    def run_state(body):
        def run(init):
            leaves, tree = jax.tree.flatten(init)
            begun = [x.begun for x in leaves if isinstance(x, _Sum)]
            if not begun:
                return run_any_state(body)(init)

            def scoped(*accumulators):
                rest = iter(accumulators)
                refs = [next(rest) if isinstance(x, _Sum) else _Value(x) for x in leaves]
                body(jax.tree.unflatten(tree, refs))
                return [ref[...] for ref in refs]

            results = pl.run_scoped(scoped, *(plgpu.ACC(x.shape, x.dtype) for x in begun))
            pairs = zip(leaves, results, strict=True)
            return jax.tree.unflatten(tree, [x.begun + y if isinstance(x, _Sum) else y for x, y in pairs])

        return run

    races = race_detection_state.GPURaceDetectionState
    check_write = races.check_write

    def check_write_of_read_rows(self, thread, clock, key, place, *args, **kwargs):
        if unread_row is None or place.range[:1] != (unread_row,):
            check_write(self, thread, clock, key, place, *args, **kwargs)

    def boxed_tiles(slots, width, dtype):
        return [plgpu.SMEM((slots, ROWS, width), dtype)]

    def box_rows(tiles, slot, tokens, group):
        return tiles[0].at[slot, pl.ds(0, tokens * group)].reshape(tokens, group, tiles[0].shape[-1])

    memory = gpu_callbacks.memory.GPUSharedMemory
    commit, store = memory.commit_smem, memory.store_buffer_content

    def commit_later(self, thread):
        self.incr_clock(thread)
        commit(self, thread)

    def row_boxes(slots, width, dtype):
        return [plgpu.SMEM((slots, ROWS, width), dtype)]

    def row_box(tile, group, part=None):
        shape = 8 // group, group, tile.shape[-1] // 64, 64
        return tile.reshape(8, *shape) if part is None else tile.at[pl.ds(8 * part, 8)].reshape(*shape)

    for replacement in _ROWS:
        name = replacement.__name__[1:]
        owner = next(x for x in (sm90_columns, sm90_reduce, sm90_warp, sm90_gather, sm90_products) if hasattr(x, name))
        monkeypatch.setattr(owner, name, replacement)
    monkeypatch.setattr(memory, "commit_smem", commit_later)
    monkeypatch.setattr(gpu_callbacks, "AsyncCopyGmemToSmemTask", _aligned_copy(gpu_callbacks))
    monkeypatch.setattr(races, "check_write", check_write_of_read_rows)
    monkeypatch.setattr(plgpu, "kernel", recording_kernel)
    monkeypatch.setattr(pl, "kernel", recording_kernel_in_place)

    def store_reshaped(self, key, place, value, *args, **kwargs):
        return store(self, key, place, value.reshape(place.shape), *args, **kwargs)

    clip, remove_noops = gpu_callbacks._clip_store_to_shape, gpu_callbacks._remove_noop_transforms

    def remove_reshapes(transforms):
        return tuple(x for x in remove_noops(transforms) if not isinstance(x, ReshapeTransform))

    monkeypatch.setattr(gpu_callbacks, "_remove_noop_transforms", remove_reshapes)
    monkeypatch.setattr(
        gpu_callbacks, "_clip_store_to_shape", lambda at, value, shape: clip(at, value.reshape(at.shape), shape)
    )
    monkeypatch.setattr(memory, "store_buffer_content", store_reshaped)
    monkeypatch.setattr(sm90_rows, "row_boxes", row_boxes)
    monkeypatch.setattr(sm90_rows, "row_box", row_box)
    monkeypatch.setattr(sm90_rows, "boxed_tiles", boxed_tiles)
    monkeypatch.setattr(sm90_rows, "box_rows", box_rows)
    monkeypatch.setattr(pl, "run_state", run_state)
    monkeypatch.setattr(plgpu.ACC, "init", staticmethod(_Sum))
    monkeypatch.setattr(gpu_callbacks, "_get", _read_and_fence(gpu_callbacks))
    multiply = gpu_callbacks.fail_on_exception(_multiply)
    monkeypatch.setattr(gpu_callbacks, "wgmma", functools.partial(multiply, gpu_callbacks))
    monkeypatch.setattr(thread_map, "_run_jaxpr", _run_compiled(thread_map._run))
    try:
        # A CPU with Hopper's compute capability: Triton kernels between the Mosaic ones are interpreted as well.
        with jax.default_device(jax.devices("cpu")[0]), compile_for(Target("cpu", (9, 0))):
            yield called
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()  # a kernel that failed leaves its memory behind


@dataclasses.dataclass
class _Sum:
    """What an accumulator begins with."""

    begun: jax.Array


@dataclasses.dataclass
class _Value:
    """A reference to registers that are no accumulator."""

    value: jax.Array

    def __getitem__(self, index):
        return self.value

    def __setitem__(self, index, value):
        self.value = value


def _reorder(rows):
    """Swaps the columns that threads hold 8 of with those that products want 2 of; its own inverse."""
    parts = rows.reshape(rows.shape[0], -1, 4, 4, 2)
    return parts.swapaxes(2, 3).reshape(rows.shape)


def _load_rows(ref, rows):
    return _reorder(ref[...][rows])


def _prefetch_rows(ref, rows):
    """Only time depends on it."""


def _store_rows(ref, rows, values, inside=None):
    values = _reorder(values)

    def store(i, _):
        @pl.when(True if inside is None else inside[i] != 0)
        def _():
            ref[rows[i]] = values[i]

    jax.lax.fori_loop(0, rows.shape[0], store, None)


def _copy_rows(ref, rows, tile):
    tile[...] = ref[...][rows]


def _wait_copies():
    """A copy here is one at once."""


def _read_tile(tile):
    return _reorder(tile[...])


def _store_tile(tile, values):
    tile[...] = values


def _weighted_sum(weights, parts):
    total = sum(weight[:, None] * part.astype(jnp.float32) for weight, part in zip(weights, parts, strict=True))
    return total.astype(parts[0].dtype)


def _load_numbers(ref, index):
    numbers = ref[...][index]
    return numbers.astype(jnp.float32) if numbers.dtype == jnp.bfloat16 else numbers


def _store_numbers(ref, index, values, inside=None):
    def store(i, _):
        @pl.when(True if inside is None else inside[i] != 0)
        def _():
            ref[index[i]] = values[i]

    def store_run():
        ref[pl.ds(index[0], index.shape[0])] = values

    # One by one takes minutes in a long test.
    run = jnp.array_equal(index, index[0] + jnp.arange(index.shape[0])) & (inside is None)
    pl.when(run)(store_run)
    pl.when(jnp.logical_not(run))(lambda: jax.lax.fori_loop(0, index.shape[0], store, None))


def _zeros(columns):
    return jnp.zeros((64, columns), jnp.float32)


def _own_columns(begin, end, first, columns):
    column = jnp.arange(columns) + first
    inside = column >= begin[:, None]
    return inside if end is None else inside & (column < end[:, None])


def _where_columns(inside, chosen, otherwise):
    return jnp.where(inside, chosen, otherwise)


def _max_in_thread(values):
    return values.max(axis=1)


def _sum_in_thread(values):
    return values.sum(axis=1)


def _max_of_row(numbers):
    return numbers


def _sum_of_row(numbers):
    return numbers


def _any_in_warp(numbers):
    return (numbers != 0).any()


def _max_in_warp(numbers):
    return numbers.max()


def _computed_here(number):
    return number


def _row_products(rows, tile):
    return rows.astype(jnp.float32) @ tile[...].astype(jnp.float32).T


def _add_product(acc, left, tile):
    return acc + left.astype(jnp.float32) @ tile[...].astype(jnp.float32)


_ROWS = (
    _load_rows, _prefetch_rows, _store_rows, _copy_rows, _wait_copies, _read_tile, _store_tile, _weighted_sum,
    _load_numbers, _store_numbers, _zeros, _own_columns, _where_columns, _max_in_thread, _sum_in_thread, _max_of_row,
    _sum_of_row, _any_in_warp, _max_in_warp, _computed_here, _row_products, _add_product,
)  # fmt: skip


def _aligned_copy(callbacks):
    """As the interpreter's copy to shared memory; one from an address that TMA cannot take raises."""
    copy = callbacks.AsyncCopyGmemToSmemTask

    def aligned(*, src_allocation_key, src_access, **kwargs):
        array = callbacks._get_shared_memory().buffer_shape_and_dtype(src_allocation_key)
        first = [part.start or 0 if isinstance(part, slice) else part for part in src_access.range]
        first += [0] * (len(array.shape) - len(first))
        strides = np.cumprod((1, *array.shape[:0:-1]))[::-1]
        at = int(np.dot(first, strides)) * np.dtype(array.dtype).itemsize
        if at % 16:
            raise ValueError(f"TMA reads from byte {at} of {array}: no multiple of 16")
        return copy(src_allocation_key=src_allocation_key, src_access=src_access, **kwargs)

    return aligned


def _read_and_fence(callbacks):
    """As the interpreter's `_get`, followed by the fence of `plgpu.commit_smem`."""
    read = callbacks._get

    def get(token, mesh_location, thread, *args, **kwargs):
        result = read(token, mesh_location, thread, *args, **kwargs)
        if thread is not None:
            callbacks._get_shared_memory().commit_smem(thread)
        return result

    return get


def _multiply(callbacks, *, token, mesh_location, thread, source_info=None, **operands):
    """Adds a product to an accumulator; the left operand is a buffer or, from registers, the matrix itself."""
    memory = callbacks._get_shared_memory()
    log = callbacks.memory.GPULoggingInfo(mesh_location, thread, source_info)

    def access(name):
        key = callbacks.HostAllocationKey.from_array(operands[f"{name}_allocation_key_as_array"])
        transforms = callbacks._remove_noop_transforms(operands[f"{name}_transforms"])
        return key, memory.access(key, jax.tree.map(int, transforms))

    def read(name):
        key, place = access(name)
        content, _, clock = memory.get_buffer_content(key, place, thread, logging_info=log)
        if memory.detect_races and name != "acc":
            callbacks.get_races().check_read(thread, clock.async_smem_clock, key, place, source_info=source_info)
        return np.asarray(content, np.float32)

    left = np.asarray(operands["a_allocation_key_as_array"])
    left = left.astype(np.float32) if left.ndim == 2 else read("a")
    total = read("acc") + left @ read("b")
    memory.store_buffer_content(*access("acc"), total, thread, logging_info=log)
    return token


def _run_compiled(run):
    """As the interpreter's `_run_jaxpr`, compiling once."""
    compiled, lock = {}, threading.Lock()

    def run_jaxpr(jaxpr, consts, *args):
        with lock:
            if jaxpr not in compiled:
                compiled[jaxpr] = jax.jit(run, static_argnums=0).trace(jaxpr, consts, *args).lower().compile()
        compiled[jaxpr](consts, *args)

    return run_jaxpr
