"""What the compiler is told: options of a config, and those that make programs give the same bits in every process."""

from __future__ import annotations

from typing import Any

import jax
from ml_collections import ConfigDict

from nsa_jax.config import ConfigError, Problem
from nsa_jax.nn import ModelConfig
from nsa_jax.ops import plan
from nsa_jax.ops.pallas import WIDTHS_SERVED
from nsa_jax.ops.target import Target


def compiler_options(config: ConfigDict, device: Any, *, measured: bool = False) -> dict[str, Any] | None:
    """What XLA is told so that a program gives the same bits in every run, and `config.train.xla_options`.

    XLA excludes operations that add with atomics, and takes the first algorithm of each matrix product. With `measured`
    it chooses, on a GPU, the fastest of those whose results have the bits of the first one. It does not read what
    programs without this comparison measured. This package's kernels do not add with atomics; where XLA serves in their
    place, nothing is measured.

    Args:
      config: the training config.
      device: what the program is compiled for.
      measured: the program runs so often that measuring is worth its time, in which all others wait for the GPU.
    """
    given = xla_options(config)
    if device.platform == "cpu":
        return given or None
    # float8 products are cuBLASLt's: Triton's tiles would be chosen without being timed.
    options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False} if config.model.matmul_dtype else {}
    if not config.train.deterministic:
        return {**options, **given} or None
    tried = jax.__version_info__ >= (0, 11) and not config.model.matmul_dtype
    if measured and tried and _kernels_serve(config, device):
        options |= {
            "xla_gpu_autotune_level": 4,  # measure and compare
            "xla_gpu_autotune_gemm_rtol": "0.0",  # a number would arrive as 0, which is none for JAX 0.11
            "xla_gpu_experimental_enable_fusion_autotuner": False,
            "xla_gpu_per_fusion_autotune_cache_dir": "",
        }
    else:
        options |= {"xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_autotune_level": 0}
    if jax.__version_info__ >= (0, 12) and device not in jax.devices():
        # Without the GPU, XLA of JAX 0.12 cannot choose a deterministic kernel for Triton's matrix products.
        options["xla_gpu_enable_triton_gemm"] = False
    return {**options, **given}


def _kernels_serve(config: ConfigDict, device: Any) -> bool:
    """Whether this package's kernels serve all that XLA would differentiate by adding with atomics."""
    model = ModelConfig.from_config(config, vocab_size=1)
    major, minor = str(getattr(device, "compute_capability", "8.0")).split(".")[:2]
    sizes = config.train.batch_size, config.data.seq_len, config.data.seq_len
    heads = model.num_heads, model.num_kv_heads, model.head_dim, model.value_head_dim
    reason = plan.unsupported(
        "select_blocks",
        plan.Shape(*sizes, *heads, model.compute_dtype),
        Target("gpu", (int(major), int(minor))),
        select_block=model.nsa.select_block,
    )
    return model.implementation in (None, "pallas") and model.dim % WIDTHS_SERVED == 0 and reason is None


def xla_options(config: ConfigDict) -> dict[str, Any]:
    """`config.train.xla_options` as JAX takes them: numbers and truth values where a text is one."""
    found: dict[str, Any] = {}
    for text in config.train.xla_options:
        name, _, value = text.partition("=")
        found[name] = {"true": True, "false": False}.get(value.lower(), value)
    return found


def check_xla_options(config: ConfigDict) -> None:
    """ConfigError if this version of XLA does not know an option, or not with this value."""
    for name, value in xla_options(config).items():
        try:
            jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            message = f"config.train.xla_options: {name}={value}: {error}"
            fix = "correct it; options and values are those of this version's XLA, booleans True or False"
            raise ConfigError([Problem("R059", "error", message, fix)]) from error
