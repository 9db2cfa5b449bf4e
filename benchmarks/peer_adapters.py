"""How `benchmarks/peers.py` calls published NSA kernels: one small function for each project.

An adapter takes the folder of a checkout and the geometry to run with, imports the project's public functions from that
folder, and returns a `Peer`. PyTorch and Triton are imported here only, when an adapter runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from nsa_jax import NSAConfig


@dataclasses.dataclass(frozen=True)
class Peer:
    """An implementation of NSA, and what it computes in this library's terms.

    Attributes:
      attend: (query [B, T, N, H], key [B, T, K, H], value [B, T, K, H], logits [B, T, N, 3]) -> [B, T, N, H]; one key
        and one value serve all branches, and the gates are sigmoid(logits) in the order compressed, selected, window.
      config: the geometry that it runs with.
      window: whether the window branch is computed.
      notes: what differs from `nsa_jax.nsa_self_attention`, for the reader of the table.
      framework: "torch" or "jax", whose arrays `attend` takes and whose gradients it has.
      agrees: whether it computes the function of `nsa_jax.nsa_self_attention` with `config` (and without its window
        branch if `window` is False) where every block is selected, so that outputs can be compared.
      same_selection: whether it also chooses the same blocks where there are more than it reads.
    """

    attend: Callable[..., Any]
    config: NSAConfig
    window: bool
    notes: str = ""
    framework: str = "torch"
    agrees: bool = True
    same_selection: bool = True


def import_torch() -> Any:
    """PyTorch, for peers that need it.

    Raises:
      SystemExit: PyTorch or Triton is missing; the message says what to install.
    """
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"{error}: the published kernels need PyTorch and Triton. Make an environment of its own for this program "
            "and run `pip install torch triton einops transformers pandas` there beside nsa_jax"
        ) from error
    return torch


def import_from(checkout: pathlib.Path, name: str) -> Any:
    """The module `name` of a checkout.

    Raises:
      ImportError: the module is missing, or Python found one of this name elsewhere.
    """
    sys.path.insert(0, str(checkout))
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(checkout))
    places = [module.__file__] if module.__file__ else list(module.__path__)
    if not any(checkout.resolve() in pathlib.Path(place).resolve().parents for place in places):
        raise ImportError(
            f"{name} was imported from {places[0]}, not from {checkout}: give only one checkout with a package of this "
            "name, or name the folder that holds it"
        )
    return module


@contextlib.contextmanager
def stand_ins(**modules: dict[str, Any]) -> Iterator[list[str]]:
    """Lets a project be imported without packages that what is timed here does not use.

    Args:
      modules: the names that the project reads of each package. A package that is installed is left alone.

    Yields:
      The packages that are missing, each with a module of these names in its place until the end of the block.
    """
    missing = [name for name in modules if name not in sys.modules and importlib.util.find_spec(name) is None]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(modules[name])
    try:
        yield missing
    finally:
        for name in missing:
            del sys.modules[name]


def _version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version, which can be compared."""
    return tuple(int(part) for part in text.split(".")[:2])


def _flash_attn() -> Any:
    """The package flash_attn, or None: the projects below compute their window branch with it."""
    try:
        return importlib.import_module("flash_attn")
    except ImportError:
        return None


def _window_note(window: bool) -> str:
    return "window by flash_attn" if window else "no window branch, because flash_attn is not installed"


def _gated_sum(logits: Any, *branches: Any) -> Any:
    """Sum of the branches [..., N, H], weighted by sigmoid(logits) [..., N, 3], in PyTorch's eager operations."""
    gates = logits.sigmoid()
    return sum(gates[..., i, None] * branch for i, branch in enumerate(branches))


def fla(checkout: pathlib.Path, config: NSAConfig) -> Peer:
    """flash-linear-attention: `fla.ops.nsa.parallel_nsa`."""
    import_torch()
    parallel_nsa = import_from(checkout, "fla.ops.nsa").parallel_nsa
    window = _flash_attn() is not None
    block = config.select_block
    # It has one block size, and its selection kernel always takes the first block and the last two.
    config = dataclasses.replace(config, compress_block=block, compress_stride=block, num_initial=1, num_local=2)

    def attend(query, key, value, logits):
        gates = logits.sigmoid()
        return parallel_nsa(
            query,
            key,
            value,
            g_cmp=gates[..., 0],
            g_slc=gates[..., 1],
            g_swa=gates[..., 2],
            block_counts=config.num_selected,
            block_size=block,
            window_size=config.window if window else 0,
        )

    notes = f"compressed blocks do not overlap (l = d = l' = {block}); {_window_note(window)}"
    return Peer(attend, config, window, notes)


def _packed(attend: Callable) -> Callable:
    """`attend` of packed tokens [B*T, heads, dim] and their cu_seqlens, as a function of [B, T, heads, dim]."""

    @functools.cache
    def offsets(batch: int, length: int, device: Any) -> Any:
        torch = import_torch()
        return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)

    def batched(*arrays):
        query = arrays[0]
        cu_seqlens = offsets(*query.shape[:2], query.device)
        return attend(*(array.flatten(0, 1) for array in arrays), cu_seqlens, query.shape[1]).view(query.shape)

    return batched


def _by_parts(ops: Any, selected_attention: Callable, config: NSAConfig, **options: Any) -> Callable:
    """XunhaoLai's functions in the order of its module, with `selected_attention` for the selected branch.

    `options` are those of its `compressed_attention`.
    """
    flash_attn = _flash_attn()

    def attend(query, key, value, logits, cu_seqlens, length):
        compress = functools.partial(
            ops.avgpool_compress,
            w=None,
            cu_seqlens=cu_seqlens,
            kernel_size=config.compress_block,
            kernel_stride=config.compress_stride,
        )
        key_cmp, cu_seqlens_cmp = compress(key)
        value_cmp, _ = compress(value)
        compressed, lists = ops.compressed_attention(
            query,
            key_cmp,
            value_cmp,
            config.compress_block,
            config.compress_stride,
            config.select_block,
            config.num_selected,
            cu_seqlens,
            cu_seqlens_cmp,
            length,
            (length - config.compress_block) // config.compress_stride + 1,
            init_blocks=config.num_initial,
            local_blocks=config.num_local,
            **options,
        )
        branches = [compressed, selected_attention(query, key, value, lists, config.select_block, cu_seqlens)]
        if flash_attn:
            # Its window does not count the query's own token.
            branches.append(
                flash_attn.flash_attn_varlen_func(
                    query,
                    key,
                    value,
                    cu_seqlens,
                    cu_seqlens,
                    length,
                    length,
                    causal=True,
                    window_size=(config.window - 1, -1),
                )
            )
        return _gated_sum(logits, *branches)

    return _packed(attend)


def xunhao(checkout: pathlib.Path, config: NSAConfig) -> Peer:
    """XunhaoLai/native-sparse-attention-triton: the functions of `native_sparse_attention.ops`."""
    import_torch()
    ops = import_from(checkout, "native_sparse_attention.ops")
    window = _flash_attn() is not None
    attend = _by_parts(ops, ops.topk_sparse_attention, config)
    return Peer(attend, config, window, f"gates applied by eager PyTorch; {_window_note(window)}")


def fsa(checkout: pathlib.Path, config: NSAConfig) -> Peer:
    """Relaxed-System-Lab/Flash-Sparse-Attention: its selected branch, made for small groups, and XunhaoLai's others."""
    import_torch()
    ops = import_from(checkout, "nsa_ref.ops")
    small = import_from(checkout, "fsa.ops").FSA_topk_sparse_attention
    window = _flash_attn() is not None

    def selected_attention(query, key, *rest):
        # Its module chooses by group size in this way.
        attend = small if query.shape[1] // key.shape[1] <= 8 else ops.topk_sparse_attention
        return attend(query, key, *rest)

    # Its module passes this as well: the other way reads the scores of other heads.
    attend = _by_parts(ops, selected_attention, config, parallel_topk_compute=False)
    notes = "selects by the first head of each group alone, in bfloat16 scores; its own kernels for groups of up to 8 "
    notes += f"heads, else those of XunhaoLai that it ships; gates applied by eager PyTorch; {_window_note(window)}"
    return Peer(attend, config, window, notes, same_selection=False)


def flash_nsa(checkout: pathlib.Path, config: NSAConfig) -> Peer:
    """mdy666/Scalable-Flash-Native-Sparse-Attention: `flash_nsa.HFNSACore`, or its parts without the window."""
    import_torch()
    # pandas prints its own benchmark, and pkg_resources (setuptools before 81) only compares Triton's version.
    with stand_ins(pandas={}, pkg_resources={"parse_version": _version}) as missing:
        package = import_from(checkout, "flash_nsa")
    window = any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_interface"))

    @functools.cache
    def core(num_heads: int, num_kv_heads: int, head_dim: int) -> Any:
        return package.HFNSACore(
            package.NSAConfig(
                head_dim=head_dim,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                kernel_size=config.compress_block,
                stride=config.compress_stride,
                block_size=config.select_block,
                top_n=config.num_selected,
                num_init_blocks=config.num_initial,
                num_local_blocks=config.num_local,
                window_size=config.window - 1,  # it does not count the query's own token
            )
        )

    def attend(query, key, value, logits, cu_seqlens, length):
        module = core(query.shape[1], key.shape[1], query.shape[2])
        if window:
            return module(query, key, value, logits, cu_seqlens)
        package.NSAHelper.init_cu_seqlens(cu_seqlens)
        key_cmp, value_cmp = module.compress_k(key), module.compress_v(value)
        compressed, lse = package.compress_attn(query, key_cmp, value_cmp, sm_scale=module.sm_scale)
        lists, _ = package.slc_topk_indices(
            query, key_cmp, lse, sm_scale=module.sm_scale, maybe_efficient_version=True, scale_slc_p=True
        )
        return _gated_sum(logits, compressed, package.select_attn(query, key, value, lists, sm_scale=module.sm_scale))

    notes = f"selects by float16 scores; {_window_note(window)}"
    if not window:
        notes += "; gates applied by eager PyTorch"
    if missing:
        notes += f"; imported without {' and '.join(missing)}, which what is timed does not need"
    return Peer(_packed(attend), config, window, notes)


ADAPTERS: dict[str, Callable[[pathlib.Path, NSAConfig], Peer]] = {
    "fla": fla,  # github.com/fla-org/flash-linear-attention
    "xunhao": xunhao,  # github.com/XunhaoLai/native-sparse-attention-triton
    "flash_nsa": flash_nsa,  # github.com/mdy666/Scalable-Flash-Native-Sparse-Attention
    "fsa": fsa,  # github.com/Relaxed-System-Lab/Flash-Sparse-Attention
}


def adapter_of(file: pathlib.Path) -> Callable[[pathlib.Path, NSAConfig], Peer]:
    """The function `load(checkout, config) -> Peer` that a Python file defines.

    Raises:
      ImportError: the file cannot be imported, or has no such function.
    """
    spec = importlib.util.spec_from_file_location(f"adapter_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look themselves up there
    spec.loader.exec_module(module)
    if not hasattr(module, "load"):
        raise ImportError(f"{file} has no function load(checkout, config)")
    return module.load
