"""Matrix products in float8: close to those of bfloat16, finite for outliers and zeros, and only where they belong."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nsa_jax import aot
from nsa_jax.config import validate
from nsa_jax.nn import float8, layers
from nsa_jax.train import preflight
from nsa_jax.train.preflight import memory
from nsa_jax.train.state import setup
from nsa_jax.train.step import make_eval_step
from tests.kernels.hollow import hollow_kernels

from .test_resume import stop_before
from .tiny import VOCAB, losses, make_run, one_device, random_batch, steps, tiny_config

# As a training step in float8 is compiled.
CUBLAS = {"xla_gpu_enable_triton_gemm": False} if jax.devices()[0].platform == "gpu" else None
FLOAT8 = dict(model__matmul_dtype="float8")


def arrays(rows=512, width=384, features=256, dtype=jnp.bfloat16):
    """x, w and the gradient of their product."""
    random = np.random.default_rng(0)
    shapes = (2, rows // 2, width), (width, features), (2, rows // 2, features)
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


def products(multiply, x, w, grad):
    out, vjp = jax.vjp(multiply, x, w)
    return (out, *vjp(grad))


def errors(got, want):
    """Relative to the norm, of each array."""
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(got, want, strict=True)]
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in wide]


def test_a_product_and_its_gradients_are_those_of_bfloat16_up_to_the_digits_of_float8():
    x, w, grad = arrays()
    forward, *gradients = errors(products(float8.product, x, w, grad), products(jnp.matmul, x, w, grad))
    # e4m3 has 3 binary digits after the first, e5m2 has 2: an element's error is uniform in up to 2^-4 and 2^-3 of it.
    assert 0.03 < forward < 0.045
    assert all(0.05 < error < 0.07 for error in gradients)


def test_products_are_those_of_the_rounded_operands():
    x, w, grad = arrays()
    run = jax.jit(lambda *given: products(float8.product, *given), compiler_options=CUBLAS)
    compiled = run.lower(x, w, grad).compile()
    if jax.devices()[0].platform == "gpu":
        assert compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    kinds = (float8.FORWARD, float8.FORWARD, float8.GRADIENT)
    rounded = [np.asarray(float8._rounded(a, kind), np.float64) for a, kind in zip((x, w, grad), kinds, strict=True)]
    x, w, grad = rounded
    want = x @ w, grad @ w.T, np.einsum("btd,btf->df", x, grad)
    assert max(errors(compiled(*arrays()), want)) < 4e-3  # a result in bfloat16 is rounded by up to 2^-9 of itself


@pytest.mark.parametrize("factors", [(1e-20, 1.0, 1.0), (1.0, 1e20, 1e-8), (3e4, 1e-3, 1e12)], ids=str)
def test_the_scale_of_an_operand_does_not_matter(factors):
    plain = arrays(dtype=jnp.float32)
    x, w, grad = (array * factor for array, factor in zip(plain, factors, strict=True))
    got = products(float8.product, x, w, grad)
    assert errors(got, products(jnp.matmul, x, w, grad)) == pytest.approx(
        errors(products(float8.product, *plain), products(jnp.matmul, *plain)), rel=0.1
    )


def test_outliers_neither_overflow_nor_spoil_the_rest():
    x, w, grad = arrays()
    x, grad = x.at[0, 3, 5].set(2.0**14), grad.at[1, 7, 2].set(2.0**20)
    got, want = products(float8.product, x, w, grad), products(jnp.matmul, x, w, grad)
    assert all(np.isfinite(np.asarray(array, np.float32)).all() for array in got)
    assert max(errors(got, want)) < 0.07
    others = np.s_[1:]  # with the outlier a normal number's least step is 2^-4
    (error,) = errors([got[0][others]], [want[0][others]])
    assert error < 0.06


def test_zeros_give_zeros_and_what_is_not_finite_is_passed_on():
    x, w, grad = arrays()
    for array in products(float8.product, 0 * x, 0 * w, 0 * grad):
        assert not np.asarray(array, np.float32).any()
    for bad in (np.nan, np.inf, -np.inf):
        out, d_x, d_w = products(float8.product, x.at[0, 0, 0].set(bad), w, grad)
        assert (
            not np.isfinite(np.asarray(out, np.float32)[0, 0]).any() and np.isfinite(np.asarray(d_x, np.float32)).all()
        )
        assert not np.isfinite(np.asarray(d_w, np.float32)[0]).any()


def test_scales_are_powers_of_two_that_just_hold_the_largest_element():
    for largest in (448.0, 448.1, 1.0, 7e-9, 3e30):
        scale = float(float8._scale(jnp.asarray([largest / 3, -largest], jnp.float32), float8.FORWARD))
        assert np.log2(scale) % 1 == 0 and scale * 448 >= largest > scale * 224


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_projections_are_in_float8_and_gates_are_not(attention):
    changes = dict(model__attention=attention, model__dim=64, model__mlp_dim=96, model__num_layers=1)
    x = jax.random.normal(jax.random.key(1), (2, 48, 64))

    def parts(kind):
        made = setup(tiny_config(model__matmul_dtype=kind, **changes), VOCAB, one_device())
        params = made.init()["params"]
        graphdef, stacked = nnx.split(made.model(params).blocks)
        block = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], stacked))
        attended = x[..., :32].reshape(2, 48, 4, 8)
        return list(block.attention.project(x, jnp.arange(48))), block.attention.output(attended), block.mlp(x)

    got, want = parts("float8"), parts("")
    if attention == "nsa":
        np.testing.assert_allclose(got[0].pop(), want[0].pop(), atol=1e-6)  # gates
    for error in errors(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert 0.02 < error < 0.08  # the MLP has two products in a row


@pytest.mark.parametrize("keep", [True, False])
def test_the_gradients_of_kernels_are_those_of_the_formula(keep):
    """SwiGLU's own backward pass, its kernel interpreted here, rounds the same three products."""
    made = setup(tiny_config(), VOCAB, one_device())
    config = dataclasses.replace(made.model_config, matmul_dtype="float8")
    both, w_out, grad = arrays(rows=64, width=384, features=64, dtype=jnp.float32)
    w_out = w_out[:192]
    own = products(lambda both, w: layers._gated_product(both, w, keep, config), both, w_out, grad)
    formula = products(lambda both, w: layers._gated_product_plain(both, w, config), both, w_out, grad)
    plain = products(lambda both, w: layers._gated_product_plain(both, w, made.model_config), both, w_out, grad)
    assert max(errors(own, formula)) < 5e-3  # some element is rounded to the other side
    assert min(errors(own, plain)) > 0.03


def test_a_step_trains_and_evaluation_has_no_float8():
    changes = dict(model__attention="dense", model__remat="none", train__steps=20)
    batches = [random_batch(tiny_config(), 0)] * 20
    want, _ = steps(tiny_config(**changes), batches)
    got, state = steps(tiny_config(**changes, **FLOAT8), batches)
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(got, want, strict=True)]
    assert 1e-4 < max(differences) < 0.05 and want[-1]["loss"] < want[0]["loss"] - 0.3
    evaluated = []
    for kind in ("", "float8"):
        made = setup(tiny_config(**changes, model__matmul_dtype=kind), VOCAB, one_device())
        evaluated.append(make_eval_step(made, np.ones(VOCAB, np.int32))(state["params"], batches[0]))
    chex.assert_trees_all_equal(*evaluated)


@pytest.mark.parametrize("remat", ["attention_saved", "dots_saved", "block"])
def test_what_is_computed_again_is_rounded_again_alike(remat):
    changes = dict(model__implementation="xla", **FLOAT8)
    batches = [random_batch(tiny_config(), seed) for seed in range(2)]
    want, _ = steps(tiny_config(model__remat="none", **changes), batches)
    got, _ = steps(tiny_config(model__remat=remat, **changes), batches)
    for one, other in zip(got, want, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-3)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)


def test_a_run_is_resumed_bit_exactly(tmp_path, monkeypatch):
    changes = dict(model__attention="dense", model__num_layers=1, train__steps=4, train__save_every=100, **FLOAT8)
    make_run(tmp_path / "whole", **changes).run()
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_before(patch, 2, (stopped.mkdir() or stopped / "HALT").touch)
        assert make_run(stopped, **changes).run()["step"] == 2
    assert make_run(stopped, **changes).run()["start_step"] == 2
    assert losses(stopped) == losses(tmp_path / "whole")


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100", "l40s", ""])
def test_devices_without_float8_tensor_cores_are_refused(gpu):
    config = tiny_config(**FLOAT8)
    found = preflight.check_float8(config, setup(config, VOCAB, one_device()), gpu)
    assert [problem.rule for problem in found] == ([] if gpu in ("h100", "l40s") else ["R061"])
    for problem in found:
        assert problem.severity == "error" and (gpu or "cpu") in problem.message and "8.9" in problem.fix
    assert preflight.check_float8(tiny_config(), setup(tiny_config(), VOCAB, one_device()), gpu) == []


def test_a_mesh_with_a_tensor_axis_is_refused():
    (problem,) = validate(tiny_config(mesh__tensor=2, model__vocab_size=64, **FLOAT8))
    assert problem.rule == "R020" and "matmul_dtype" in problem.message and "fsdp" in problem.fix


@pytest.mark.parametrize(("attention", "devices"), [("dense", 1), ("nsa", 2)])
def test_cublas_multiplies_float8_on_hopper(attention, devices, usual_compilation):
    changes = dict(model__attention=attention, model__num_layers=1, model__dim=128, model__mlp_dim=256)
    changes |= dict(
        model__head_dim=32, model__compute_dtype="bfloat16", model__implementation="xla", mesh__fsdp=devices
    )

    def counts(kind):
        config = tiny_config(model__matmul_dtype=kind, **changes)
        try:
            made = memory.for_target(config, "h100", devices, VOCAB)
        except aot.AheadOfTimeUnavailable as error:
            pytest.skip(str(error))
        with hollow_kernels():
            text = memory._lower_train_step(made, "h100").compile().as_text()
        return text.count('custom_call_target="__cublas$lt$matmul$f8"'), len(re.findall(r"f8e\w+\[", text))

    if attention == "dense":
        assert counts("") == (0, 0)
    # In, out, MLP in and MLP out: forward, gradient of the input and of the weights.
    assert counts("float8")[0] == 12
