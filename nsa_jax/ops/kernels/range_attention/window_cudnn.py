"""cuDNN's flash attention forward for the window branch, called without JAX's wrapper.

`jax.nn.dot_product_attention(implementation="cudnn")` pairs it with cuDNN's backward, which adds dq atomically: two
runs differ in the last bits. XLA makes it reproducible only for a whole program compiled with
`xla_gpu_deterministic_ops`, so a library cannot ask for it; here the forward alone is used.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp

_DTYPES = {jnp.dtype(jnp.bfloat16): "BF16"}


def version() -> int:
    """cuDNN's version as an integer, 0 without cuDNN."""
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return 0
    try:
        return int(cuda_versions.cudnn_get_version()) if cuda_versions is not None else 0
    except RuntimeError:
        return 0


def window_forward(query, key, value, window: int) -> tuple[jax.Array, jax.Array]:
    """Window attention of unpacked rows: the output [B, T, N, V] and the natural-log lse, float32 [B, T, N]."""
    batch, length, heads, h_dim = query.shape
    num_keys, _, v_dim = value.shape[1:]
    contiguous = (0, 1, 2, 3)  # major to minor
    call = jax.ffi.ffi_call(
        "__cudnn$fmhaSoftmax",
        [
            jax.ShapeDtypeStruct((batch, heads, length, v_dim), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
            jax.ShapeDtypeStruct((0,), jnp.uint8),  # workspace, sized by XLA
        ],
        input_layouts=[contiguous] * 3,
        output_layouts=[(0, 2, 1, 3), (0, 1, 2), (0,)],  # the output lies in memory as [B, T, N, V]
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(batch, heads, length, num_keys, query.dtype, h_dim**-0.5, window),
    )
    out, lse, _ = call(query, key, value)
    return out.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)


def _dims(lhs_contract: int, rhs_contract: int, lhs_batch, rhs_batch) -> dict:
    as_text = lambda dims: [str(d) for d in dims]  # noqa: E731
    return {
        "lhs_contracting_dimensions": as_text([lhs_contract]),
        "rhs_contracting_dimensions": as_text([rhs_contract]),
        "lhs_batch_dimensions": as_text(lhs_batch),
        "rhs_batch_dimensions": as_text(rhs_batch),
    }


def _backend_config(batch, heads, num_queries, num_keys, dtype, scale: float, window: int) -> str:
    """XLA's description of a fused attention call (`CudnnfMHABackendConfig`) as JSON."""
    config = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": _DTYPES[jnp.dtype(dtype)],
            "dimensions": [str(d) for d in (batch, heads, num_queries, num_keys)],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL",
        "bmm1_dot_dimension_numbers": _dims(3, 3, (0, 2), (0, 2)),
        "bmm2_dot_dimension_numbers": _dims(3, 1, (0, 1), (0, 2)),
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": window,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config})
