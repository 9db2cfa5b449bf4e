"""Matrix products in float8 for training: each operand is scaled by its own largest element (current scaling).

Activations and weights become float8_e4m3fn and gradients float8_e5m2 (arXiv 2209.05433). Scales are computed from the
arrays at hand, so there is no state. They are powers of two: multiplying by one is exact in bfloat16, so a program in
which XLA multiplies float8 by cuBLASLt and one in which it does not differ by the order of their sums only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nsa_jax.nn.sharding import constrain_whole

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2
_LEAST = 2.0**-100  # of a scale: zeros are not divided by zero, and what is multiplied by it stays a normal number


def _scale(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The least power of two by which |x| may be divided to be within `dtype`.

    If x holds infinity or NaN, the result is infinity or 0, with which every element of x becomes NaN.
    """
    least = jnp.max(jnp.abs(x)).astype(jnp.float32) / float(jnp.finfo(dtype).max)
    bits = jax.lax.bitcast_convert_type(jnp.maximum(least, _LEAST), jnp.int32)
    return jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)  # rounded up


def _rounded(x: jax.Array, dtype: jnp.dtype, weights: bool = False) -> jax.Array:
    """x [...] as it is in `dtype` with a scale, in x's dtype. XLA multiplies arrays of this form as float8."""
    scale = _scale(x, dtype)
    rounded = (x.astype(jnp.float32) / scale).astype(dtype)
    # Where fsdp splits weights they are gathered in float8; in bfloat16 they would not be multiplied as float8.
    rounded = constrain_whole(rounded) if weights else rounded
    return rounded.astype(x.dtype) * scale.astype(x.dtype)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return _rounded(x, FORWARD) @ _rounded(w, FORWARD, weights=True)


@jax.custom_vjp
def product(x: Float[Array, "... D"], w: Float[Array, "D F"]) -> Float[Array, "... F"]:
    """x @ w, its operands and those of its two gradients rounded to float8; sums are float32, results in x's dtype."""
    return _product(x, w)


def _forward(x, w):
    return _product(x, w), (x, w)


def _backward(residuals, grad):
    x, w = residuals
    return input_gradient(grad, w), weight_gradient(x, grad)


product.defvjp(_forward, _backward)


def input_gradient(grad: Float[Array, "... F"], w: Float[Array, "D F"]) -> Float[Array, "... D"]:
    """The gradient of x in `product`."""
    return _rounded(grad, GRADIENT) @ _rounded(w, FORWARD, weights=True).T


def weight_gradient(x: Float[Array, "... D"], grad: Float[Array, "... F"]) -> Float[Array, "D F"]:
    """The gradient of w in `product`."""
    return jnp.einsum("...d,...f->df", _rounded(x, FORWARD), _rounded(grad, GRADIENT))
