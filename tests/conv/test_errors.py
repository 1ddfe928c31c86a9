"""Bad input: each gives its one sentence, of the right kind, eagerly and when traced; and no message is untested."""

# ruff: noqa: E501, RUF043 (the table reads best with one bad input a line)

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.activation.formulas import ACTIVATIONS
from jaxdnn._src.core import engines, selection

ROOT = Path(__file__).parents[2] / "jaxdnn" / "_src"
SOURCES = (
    *("core/checks", "core/cropping", "core/frames", "core/windows", "core/engines", "core/determinism"),
    *("conv/arguments", "conv/primitive", "activation/epilogues"),
)
E4M3 = ml_dtypes.float8_e4m3fn
LAYOUT_CHOICES = "`layout` must be one of NWC, NCW, CWN, NHWC"

# x (2, 6, 5, 4), w (3, 2, 4, 7), y (2, 4, 4, 7)
X, W, Y = (np.ones(shape, np.float32) for shape in ((2, 6, 5, 4), (3, 2, 4, 7), (2, 4, 4, 7)))
BIAS = np.ones(7, np.float32)
with jax.enable_x64(True):
    X64 = jnp.asarray(X, jnp.float64)


def conv(x: Any = X, w: Any = W, **options: Any) -> Any:
    return dnn.conv(x, w, **options)


def skip(x: Any = X, w: Any = W, **options: Any) -> Any:
    return dnn.conv_skip(x, w, **options)


def dgrad(dy: Any = Y, w: Any = W, shape: Any = X.shape, **options: Any) -> Any:
    return dnn.conv_dgrad(dy, w, shape, **options)


def wgrad(x: Any = X, dy: Any = Y, shape: Any = W.shape, **options: Any) -> Any:
    return dnn.conv_wgrad(x, dy, shape, **options)


def bgrad(dy: Any = Y, **options: Any) -> Any:
    return dnn.conv_bgrad(dy, **options)


def transpose(x: Any = Y, w: Any = W, **options: Any) -> Any:
    return dnn.conv_transpose(x, w, **options)


def reduce(x: Any = X, **options: Any) -> Any:
    return dnn.reduce(x, **options)


def transform(x: Any = X, **options: Any) -> Any:
    return dnn.transform(x, **options)


def dropout(x: Any = X, **options: Any) -> Any:
    return dnn.dropout(x, 0, **options)


def conv64(**options: Any) -> Any:
    with jax.enable_x64(True):
        return dnn.conv(jnp.asarray(X, jnp.float64), jnp.asarray(W, jnp.float64), **options)


def transposed(**options: Any) -> Any:
    return jax.linear_transpose(lambda x: dnn.conv(x, W, **options), X)(Y)


def i8(shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, np.int8)


Bad = tuple[str, Callable[..., Any], dict[str, Any], type[Exception], str]
INTEGERS = r"must be made of integers known when traced, got"

BAD: list[Bad] = [
    # shapes
    ("rank of x", conv, {"x": X[0]}, ValueError, r"`x` must have 4 dimensions for layout NHWC, got shape \(6, 5, 4\) \(as NWC has; one example is a batch as `x\[None\]`\)\."),
    ("rank 0", conv, {"x": np.float32(1)}, ValueError, r"`x` must have 4 dimensions .* got shape \(\)"),
    ("python number", conv, {"x": 1.0}, ValueError, r"`x` must have 4 dimensions .* got shape \(\)"),
    ("rank of w", conv, {"w": W[0]}, ValueError, r"`w` must have 4 dimensions for filter layout HWIO, got shape"),
    ("channels", conv, {"x": X[..., :3]}, ValueError, r"`w` must have 3 input channels for 3 channels of x in 1 groups, got 4"),
    ("channels first", conv, {"x": np.moveaxis(X, 3, 1)}, ValueError, r"got 4 \(in layout NCHW x has 4\)\."),
    ("a line for an image", conv, {"x": X[0]}, ValueError, r'`x` must have 4 dimensions for layout NHWC, got shape \(.*\) \(as NWC has; one example is a batch as `x\[None\]`\)\.'),
    ("what others call it", conv, {"activation": "silu"}, ValueError, r"got 'silu' \(did you mean 'swish'\?\)\."),
    ("lower case", conv, {"padding": "same"}, ValueError, r"got 'same' \(did you mean 'SAME'\?\)\."),
    ("nothing like it", conv, {"engine": "zzz"}, ValueError, r"got 'zzz'\."),
    ("channels of groups", conv, {"groups": 7, "x": np.ones((2, 6, 5, 7), np.float32)}, ValueError, "`w` must have 1 input"),
    ("groups divide", conv, {"groups": 3}, ValueError, "`groups` must divide the 4 input and 7 output channels, got 3"),
    ("groups zero", conv, {"groups": 0}, ValueError, "`groups` must be at least 1, got 0"),
    ("groups negative", conv, {"groups": -1}, ValueError, "`groups` must be at least 1, got -1"),
    ("groups float", conv, {"groups": 1.0}, TypeError, f"`groups` {INTEGERS} 1.0"),
    ("groups bool", conv, {"groups": True}, TypeError, f"`groups` {INTEGERS} True"),
    ("no taps", conv, {"w": W[:0]}, ValueError, r"`w` must have at least one tap along every axis, got \(0, 2\)"),
    ("filter too large", conv, {"dilation": 3}, ValueError, r"`w` must fit into the padded input, got taps \(3, 2\) that span \(7, 4\)"),
    ("empty input", conv, {"x": X[:, :0]}, ValueError, r"`w` must fit into the padded input"),
    ("dilation large", conv, {"dilation": 2**31 - 1}, ValueError, "`w` must fit into the padded input"),
    ("dilation huge", conv, {"dilation": 2**31}, ValueError, "`dilation` must be at most 2147483647 along every axis"),
    ("dgrad shape", dgrad, {"shape": (2, 7, 5, 4)}, ValueError, r"`dy` must have shape \(2, 5, 4, 7\), as a convolution of"),
    ("dgrad batch", dgrad, {"shape": (3, 6, 5, 4)}, ValueError, r"`dy` must have shape \(3, 4, 4, 7\)"),
    ("dgrad rank", dgrad, {"shape": (6, 5, 4)}, ValueError, r"`x_shape` must have 4 dimensions"),
    ("dgrad no shape", dgrad, {"shape": 6}, TypeError, "`x_shape` must be a shape, got 6"),
    ("dgrad None", dgrad, {"shape": None}, TypeError, "`x_shape` must be a shape, got None"),
    ("dgrad floats", dgrad, {"shape": (2, 6.0, 5, 4)}, TypeError, f"`x_shape` {INTEGERS} 6.0"),
    ("dgrad scalar array", dgrad, {"shape": np.array(3)}, TypeError, "`x_shape` must be a shape, got"),
    ("dgrad x", dgrad, {"shape": X}, TypeError, r"`x_shape` must be a shape, got an array of float32 of shape \(2, 6, 5, 4\)\."),
    ("dgrad x of JAX", dgrad, {"shape": jnp.asarray(X)}, TypeError, r"`x_shape` must be a shape, got an array of float32 of shape \(2,"),
    ("wgrad w", wgrad, {"shape": W}, TypeError, r"`w_shape` must be a shape, got an array of float32 of shape \(3, 2, 4, 7\)\."),
    ("dgrad list", dgrad, {"shape": X.tolist()}, TypeError, r"`x_shape` must be made of integers known when traced, got .{200}\.\.\.\."),
    ("dgrad negative", dgrad, {"shape": (2, -6, 5, 4)}, ValueError, "`x_shape` must have no negative size"),
    ("dgrad string", dgrad, {"shape": "NHWC"}, TypeError, f"`x_shape` {INTEGERS} 'N'"),
    ("wgrad shape", wgrad, {"shape": (3, 3, 4, 7)}, ValueError, r"`dy` must have shape \(2, 4, 3, 7\)"),
    ("wgrad batch", wgrad, {"dy": Y[:1]}, ValueError, r"`dy` must have shape \(2, 4, 4, 7\), as a convolution of"),
    ("wgrad channels", wgrad, {"shape": (3, 2, 5, 7)}, ValueError, "`w_shape` must have 4 input channels for 4 channels of x in 1 groups, got 5"),
    ("wgrad taps", wgrad, {"shape": (0, 2, 4, 7)}, ValueError, r"`w_shape` must have at least one tap along every axis, got \(0, 2\)"),
    ("wgrad many taps", wgrad, {"shape": (7, 2, 4, 7)}, ValueError, r"`w_shape` must fit into the padded input, got taps \(7, 2\)"),
    ("dgrad channels", dgrad, {"shape": (2, 6, 5, 3)}, ValueError, "`x_shape` must have 4 channels, 4 in w for each of 1 groups, got 3"),
    ("dgrad small", dgrad, {"shape": (2, 2, 5, 4)}, ValueError, r"`x_shape` must have room for w when padded, got taps \(3, 2\)"),
    ("transpose channels", transpose, {"x": Y[..., :6]}, ValueError, r"`w` must have 6 output channels, which are .* got 7 \(filter layout HWIO\)"),
    ("transpose groups", transpose, {"groups": 2}, ValueError, "`groups` must divide the 7 channels of x, got 2"),
    ("transpose no groups", transpose, {"groups": 0}, ValueError, "`groups` must be at least 1, got 0"),
    ("transpose large", transpose, {"stride": 2**30}, ValueError, r"`stride` must leave sizes below 2\^31 before the padding is cut off, got"),
    ("byte order", lambda: conv(X.astype(">f4")), {}, TypeError, r"`x` must have the byte order of this machine, got >f4; `x.astype\(x.dtype.newbyteorder"),
    ("no dtype of JAX", lambda: conv(np.zeros(X.shape, [("a", "f4")])), {}, TypeError, "`x` must be an array of a dtype that JAX has, got .*'a'"),
    ("masked", conv, {"x": np.ma.array(X)}, TypeError, "`x` must be an array, got MaskedArray"),
    ("beta without prior", conv, {"beta": jnp.float32(2)}, ValueError, r"`prior` must be given when `beta` is not zero, got beta (an|a traced) array of float32 of shape \(\) and no prior"),
    ("integer alpha", conv, {"x": X.astype(np.int8), "w": W.astype(np.int8), "alpha": jnp.float32(2), "out_dtype": "int32"}, TypeError, r"got alpha (an|a traced) array of float32 of shape \(\), beta 0.0"),
    ("filter layout in cuDNN's letters", conv, {"filter_layout": "KCRSc32"}, ValueError, "`w` must have 5 dimensions for filter layout KCRSc32, got shape"),
    ("transpose leaves nothing", transpose, {"padding": 4}, ValueError, "`padding` must leave a result, got sizes"),
    ("transpose groups", transpose, {"groups": 0}, ValueError, "`groups` must be at least 1"),
    ("bgrad rank", bgrad, {"dy": Y[0]}, ValueError, "`dy` must have 4 dimensions for layout NHWC"),
    # stride, padding, dilation
    ("stride zero", conv, {"stride": 0}, ValueError, "`stride` must be at least 1 along every axis, got 0"),
    ("stride negative", conv, {"stride": (1, -2)}, ValueError, r"`stride` must be at least 1 along every axis, got \(1, -2\)"),
    ("stride count", conv, {"stride": (1, 1, 1)}, ValueError, "`stride` must be an integer or 2 integers, one per spatial axis"),
    ("stride empty", conv, {"stride": ()}, ValueError, r"`stride` must be an integer or 2 integers.* got \(\)"),
    ("stride bool", conv, {"stride": True}, TypeError, f"`stride` {INTEGERS} True"),
    ("stride numpy bool", conv, {"stride": np.True_}, TypeError, f"`stride` {INTEGERS}"),
    ("stride float", conv, {"stride": 2.0}, TypeError, f"`stride` {INTEGERS} 2.0"),
    ("stride numpy float", conv, {"stride": np.float32(2)}, TypeError, f"`stride` {INTEGERS}"),
    ("stride string", conv, {"stride": "2"}, (TypeError, ValueError), "`stride` must be"),
    ("stride None", conv, {"stride": None}, TypeError, f"`stride` {INTEGERS} None"),
    ("stride jax array", conv, {"stride": jnp.array(2)}, TypeError, f"`stride` {INTEGERS}"),
    ("stride 0-d array", conv, {"stride": np.array(0)}, ValueError, "`stride` must be at least 1 along every axis"),
    ("stride huge", conv, {"stride": 2**70}, ValueError, "`stride` must be"),
    ("dilation zero", conv, {"dilation": 0}, ValueError, "`dilation` must be at least 1"),
    ("dilation negative", conv, {"dilation": (-1, 1)}, ValueError, "`dilation` must be at least 1"),
    ("dilation float", conv, {"dilation": (1, 1.5)}, TypeError, f"`dilation` {INTEGERS} 1.5"),
    ("padding cuts all", conv, {"padding": ((0, 0), (-2, -3))}, ValueError, r"`padding` must leave at least one element of every spatial axis that it cuts off, got \(\(0, 0\), \(-2, -3\)\) for sizes \(6, 5\)\."),
    ("padding cuts more", dgrad, {"padding": ((-7, 9), (0, 0))}, ValueError, r"`padding` must leave at least one element .* for sizes \(6, 5\)\."),
    ("padding leaves too little", conv, {"padding": -2}, ValueError, r"`w` must fit into the padded input, got taps \(3, 2\) .* padded sizes \(2, 1\)\."),
    ("padding negative, with what it reads", skip, {"padding": ((-1, 0), (0, 0))}, ValueError, r"`padding` must be at least 0, for h is all of what the convolution reads, got \(\(-1, 0\), \(0, 0\)\)\."),
    ("padding count", conv, {"padding": (1, 1, 1)}, ValueError, "`padding` must be an integer, 2 integers or 2"),
    ("padding pair count", conv, {"padding": ((1, 1, 1), 0)}, ValueError, "`padding` must be an integer or"),
    ("padding empty", conv, {"padding": ()}, ValueError, "`padding` must be an integer, 2 integers"),
    ("padding name", conv, {"padding": "same"}, ValueError, "`padding` must be one of 'SAME', 'SAME_LOWER', 'VALID', got 'same'"),
    ("padding bytes", conv, {"padding": b"ab"}, (TypeError, ValueError), "`padding` must be"),
    ("padding None", conv, {"padding": None}, TypeError, f"`padding` {INTEGERS} None"),
    ("padding float", conv, {"padding": 0.5}, TypeError, f"`padding` {INTEGERS} 0.5"),
    ("padding bool", conv, {"padding": (True, 1)}, TypeError, f"`padding` {INTEGERS} True"),
    ("padding dict", conv, {"padding": {0: 1}}, TypeError, f"`padding` {INTEGERS}"),
    ("padding huge", conv, {"padding": 2**62}, ValueError, "`padding` must be"),
    ("output_padding", transpose, {"output_padding": 1}, ValueError, r"`output_padding` must be smaller than the stride \(1, 1\) or the dilation \(1, 1\), got \(1, 1\)"),
    ("output_padding negative", transpose, {"output_padding": -1}, ValueError, "`output_padding` must be at least 0"),
    ("output_padding SAME", transpose, {"output_padding": 1, "stride": 2, "padding": "SAME"}, ValueError, '`output_padding` must be 0 for padding "SAME"'),
    ("transpose stride", transpose, {"stride": 0}, ValueError, "`stride` must be at least 1"),
    # names
    ("layout", conv, {"layout": "NHCW"}, ValueError, LAYOUT_CHOICES),
    ("layout lower case", conv, {"layout": "nhwc"}, ValueError, LAYOUT_CHOICES),
    ("layout None", conv, {"layout": None}, ValueError, LAYOUT_CHOICES),
    ("layout list", conv, {"layout": ["N", "H", "W", "C"]}, ValueError, LAYOUT_CHOICES),
    ("layout lanes", conv, {"layout": "NHWCc4"}, ValueError, LAYOUT_CHOICES),
    ("layout no lanes", conv, {"layout": "NCHWc0"}, ValueError, LAYOUT_CHOICES),
    ("lanes of x", conv, {"layout": "NCHWc4", "x": np.ones((2, 1, 6, 5, 3), np.float32)}, ValueError, "`x` must have 4 channels innermost for layout NCHWc4"),
    ("lanes of the result", conv, {"layout": "NCHWc4", "x": np.ones((2, 1, 6, 5, 4), np.float32), "w": np.ones((7, 1, 3, 2, 4), np.float32)}, ValueError, "`layout` needs the channels of the result divisible by 4, got 7"),
    ("filter layout", conv, {"filter_layout": "HWOO"}, ValueError, "`filter_layout` must be the letters KCRS .cuDNN. or OIHW"),
    ("filter layout mixed", conv, {"filter_layout": "KIHW"}, ValueError, "`filter_layout` must be the letters"),
    ("filter layout rank", conv, {"filter_layout": "KCS"}, ValueError, "`filter_layout` must be the letters KCRS"),
    ("filter layout list", conv, {"filter_layout": ["K"]}, ValueError, "`filter_layout` must be the letters"),
    ("mode", conv, {"mode": "correlation"}, ValueError, "`mode` must be one of 'cross_correlation', 'convolution', got 'correlation'"),
    ("mode None", conv, {"mode": None}, ValueError, "`mode` must be one of"),
    ("activation", conv, {"activation": "Relu"}, ValueError, "`activation` must be None, one of 'identity', 'relu'"),
    ("activation function", conv, {"activation": jax.nn.relu}, ValueError, "`activation` must be None, one of"),
    ("activation no parameter", conv, {"activation": ("relu", 1.0)}, ValueError, "`activation` 'relu' takes no parameter, got 1.0"),
    ("activation parameter", conv, {"activation": ("elu", "a")}, ValueError, "`activation` 'elu' takes one number, got 'a'"),
    ("activation slope", conv, {"activation": ("leaky_relu", 2)}, ValueError, "`activation` 'leaky_relu' needs a slope from 0 to 1, got 2"),
    ("activation ceiling", conv, {"activation": ("clipped_relu", -1)}, ValueError, "`activation` 'clipped_relu' needs a ceiling of at least 0, got -1"),
    ("activation softplus", conv, {"activation": ("softplus", 0.0)}, ValueError, "`activation` 'softplus' needs a positive parameter, got 0.0"),
    ("activation nan", conv, {"activation": ("elu", float("nan"))}, ValueError, "`activation` 'elu' needs a finite parameter, got nan"),
    ("activation digits", conv, {"activation": ("elu", 10**400)}, ValueError, "`activation` must be a number that a float holds, got one of 401 digits"),
    ("alpha digits", conv, {"alpha": 10**400}, ValueError, "`alpha` must be a number that a float holds, got one of 401 digits"),
    ("padding of 2^31", conv, {"padding": 2**31 - 1}, ValueError, r"`padding` must leave padded sizes below 2\^31, got"),
    ("activation bool", conv, {"activation": ("elu", True)}, ValueError, "`activation` 'elu' takes one number, got True"),
    ("transpose of relu", transposed, {"activation": "relu"}, NotImplementedError, "`conv` can be transposed where it is linear, .* got .*relu"),
    ("transpose of bias", transposed, {"bias": BIAS}, NotImplementedError, "`conv` can be transposed where it is linear"),
    ("activation triple", conv, {"activation": ("elu", 1.0, 2.0)}, ValueError, "`activation` must be None"),
    ("activation array", conv, {"activation": np.array(["relu", "relu"])}, ValueError, "`activation` must be None"),
    ("precision", conv, {"precision": "bf16"}, ValueError, "`precision` must be one of None, 'tf32', got 'bf16'"),
    ("precision dtype", conv, {"precision": "tf32", "x": X.astype(np.float16), "w": W.astype(np.float16)}, TypeError, "`precision` 'tf32' needs float32 operands and accumulator, got float16"),
    ("engine", conv, {"engine": "cudnn"}, ValueError, "`engine` must be one of None, .*'xla', 'ordered', got 'cudnn'"),
    ("engine array", conv, {"engine": np.array(["xla", "xla"])}, ValueError, "`engine` must be one of None, .*, got an array of <U3 of shape"),
    ("engine list", conv, {"engine": ["xla"]}, ValueError, "`engine` must be one of None"),
    ("level", conv, {"determinism": "always"}, ValueError, "`determinism` must be one of 'fast', 'run_to_run'"),
    ("level of bgrad", bgrad, {"determinism": "always"}, ValueError, "`determinism` must be one of"),
    ("level nobody has", conv, {"activation": "tanh", "determinism": "portable"}, NotImplementedError, "`conv` on cpu cannot be served by any engine at determinism level 'portable'"),
    ("level of a named engine", conv, {"determinism": "portable", "engine": "xla"}, NotImplementedError, "cannot be served by engine 'xla' at .*xla: it guarantees 'run_to_run' here, not 'portable'"),
    ("level of wgrad", wgrad, {"alpha": 0.1, "beta": 0.1, "prior": W, "determinism": "portable"}, NotImplementedError, "`conv_wgrad` on cpu cannot be served"),
    ("level of a traced scale", conv, {"alpha": jnp.ones(()), "activation": "tanh", "determinism": "portable"}, NotImplementedError, "`conv` on cpu cannot be served by any engine at determinism level 'portable'"),
    ("level of a scaled prior", bgrad, {"dy": X.astype(np.int8), "beta": 0.3, "prior": np.ones(X.shape[-1], np.float32), "out_dtype": "float32", "determinism": "portable"}, NotImplementedError, "'portable' cannot be guaranteed for conv_bgrad with a `beta` that is not 0 or 1, expected 'mesh_invariant' or less"),
    ("level of a sum", bgrad, {"determinism": "batch_invariant"}, NotImplementedError, "`determinism` 'batch_invariant' cannot be guaranteed for conv_bgrad of float32, expected 'run_to_run' or less"),
    # dtypes
    ("x int32", conv, {"x": X.astype(np.int32)}, TypeError, "`x` must have one of the dtypes float32, bfloat16, .*int8, got int32"),
    ("x bool", conv, {"x": X.astype(bool)}, TypeError, "`x` must have one of the dtypes .* got bool"),
    ("x uint8", conv, {"x": X.astype(np.uint8)}, TypeError, "`x` must have one of the dtypes .* got uint8"),
    ("x float64 of JAX", conv, {"x": X64}, TypeError, "`x` must have a dtype of JAX's 32-bit mode, got float64; enable jax_enable_x64 for the call, or convert it."),
    ("x complex", conv, {"x": X.astype(np.complex64)}, TypeError, "`x` must have one of the dtypes .* got complex64"),
    ("x object", conv, {"x": X.astype(object)}, TypeError, "`x` must be an array of numbers, got one of object"),
    ("x dates", conv, {"x": np.zeros(3, "datetime64[s]")}, TypeError, "`x` must be an array of numbers, got one of datetime64"),
    ("x random key", conv, {"x": jax.random.key(0)}, TypeError, "`x` must be an array of numbers, got one of key"),
    ("x string", conv, {"x": "image"}, TypeError, "`x` must be an array, got str"),
    ("x None", conv, {"x": None}, TypeError, "`x` must be an array, got NoneType"),
    ("x huge", conv, {"x": 10**400}, TypeError, "`x` must be an array, got an integer that JAX's integers do not hold"),
    ("x huge in a list", conv, {"x": [2**70]}, TypeError, "`x` must be an array, got an integer that JAX's"),
    ("x masked", conv, {"x": np.ma.masked_array(X, X > 0)}, TypeError, "`x` must be an array, got MaskedArray"),
    ("x without values", conv, {"x": jax.ShapeDtypeStruct(X.shape, X.dtype)}, TypeError, "`x` must be an array, got ShapeDtypeStruct"),
    ("x ragged", conv, {"x": [[1.0], [1.0, 2.0]]}, TypeError, "`x` must be an array, got list"),
    ("w int32", conv, {"w": W.astype(np.int32)}, TypeError, "`w` must have one of the dtypes"),
    ("mixed floats", conv, {"w": W.astype(np.float16)}, TypeError, "`w` must have the dtype of `x` or both must be float8, got float16 and float32"),
    ("mixed kinds", conv, {"w": W.astype(np.int8)}, TypeError, "`w` must have the dtype of `x`"),
    ("mixed float8", conv, {"w": W.astype(E4M3)}, TypeError, "`w` must have the dtype of `x`"),
    ("mixed in dgrad", dgrad, {"dy": Y.astype(np.float16)}, TypeError, "`w` must have the dtype of `dy`"),
    ("mixed in wgrad", wgrad, {"dy": Y.astype(np.float16)}, TypeError, "`dy` must have the dtype of `x`"),
    ("out_dtype", conv, {"out_dtype": np.int32}, TypeError, "`out_dtype` must have one of the dtypes float32"),
    ("mode array", conv, {"mode": np.array(["a", "b"])}, ValueError, "`mode` must be one of"),
    ("out_dtype complex", conv, {"out_dtype": np.complex64}, TypeError, "`out_dtype` must have one of the dtypes"),
    ("out_dtype nonsense", conv, {"out_dtype": "float33"}, TypeError, "`out_dtype` must be a dtype, got 'float33'"),
    ("out_dtype number", conv, {"out_dtype": 5}, TypeError, "`out_dtype` must be a dtype, got 5"),
    ("out_dtype wide", conv, {"out_dtype": np.float64}, TypeError, "`out_dtype` must not be wider than the accumulator float32, got float64"),
    ("accumulate", conv, {"accumulate": np.float16}, TypeError, "`accumulate` must have one of the dtypes float32, float64, got float16"),
    ("accumulate nonsense", conv, {"accumulate": "wide"}, TypeError, "`accumulate` must be a dtype, got 'wide'"),
    ("accumulate 64", conv, {"accumulate": np.float64}, TypeError, "`accumulate` float64 needs JAX's 64-bit mode"),
    ("accumulate narrow", conv64, {"accumulate": "float32"}, TypeError, "`accumulate` must be at least float64 for these operands, got float32"),
    ("accumulate int", conv, {"x": i8(X.shape), "w": i8(W.shape), "accumulate": "float32"}, TypeError, "`accumulate` must have the dtype int32"),
    ("int32 epilogue", conv, {"x": i8(X.shape), "w": i8(W.shape), "out_dtype": "int32", "alpha": 2}, TypeError, "`out_dtype` int32 needs an integer epilogue, .* got alpha 2.0"),
    ("int32 activation", conv, {"x": i8(X.shape), "w": i8(W.shape), "out_dtype": "int32", "activation": "tanh"}, TypeError, "`out_dtype` int32 needs an integer epilogue"),
    # the epilogue's operands
    ("beta without prior", conv, {"beta": 1.0}, ValueError, "`prior` must be given when `beta` is not zero, got beta 1.0 and no prior"),
    ("beta array without prior", conv, {"beta": jnp.zeros(())}, ValueError, "`prior` must be given when `beta` is not zero"),
    ("beta in wgrad", wgrad, {"beta": 1.0}, ValueError, "`prior` must be given"),
    ("beta in bgrad", bgrad, {"beta": 1.0}, ValueError, "`prior` must be given"),
    ("prior shape", conv, {"beta": 1.0, "prior": Y[:1]}, ValueError, r"`prior` must have shape \(2, 4, 4, 7\), the result's, got \(1, 4, 4, 7\)"),
    ("prior shape, unread", conv, {"beta": 0.0, "prior": Y[:1]}, ValueError, "`prior` must have shape"),
    ("prior rank", conv, {"beta": 1.0, "prior": BIAS}, ValueError, "`prior` must have 4 dimensions"),
    ("prior dtype", conv, {"beta": 1.0, "prior": Y.astype(np.float16)}, TypeError, "`prior` must have the dtype float32, got float16"),
    ("prior of bgrad", bgrad, {"beta": 1.0, "prior": BIAS[:3]}, ValueError, r"`prior` must have shape \(7,\)"),
    ("prior of wgrad", wgrad, {"beta": 1.0, "prior": Y}, ValueError, r"`prior` must have shape \(3, 2, 4, 7\)"),
    ("residual shape", conv, {"residual": X}, ValueError, "`residual` must have shape"),
    ("residual dtype", conv, {"residual": Y.astype(np.int32)}, TypeError, "`residual` must have the dtype"),
    ("bias shape", conv, {"bias": BIAS[:4]}, ValueError, r"`bias` must have shape \(7,\), one for each channel of the result, got \(4,\)"),
    ("bias rank", conv, {"bias": np.ones((1, 7), np.float32)}, ValueError, r"`bias` must have shape \(7,\)"),
    ("bias scalar", conv, {"bias": 1.0}, ValueError, r"`bias` must have shape \(7,\)"),
    ("bias dtype", conv, {"bias": BIAS.astype(np.complex64)}, TypeError, "`bias` must have the dtype"),
    ("bias string", conv, {"bias": "yes"}, TypeError, "`bias` must be an array, got str"),
    ("bias of transpose", transpose, {"bias": BIAS}, ValueError, r"`bias` must have shape \(4,\)"),
    ("alpha shape", conv, {"alpha": np.ones(3, np.float32)}, ValueError, r"`alpha` must have shape \(7,\), one for each channel of the result, if it is no number, got \(3,\)"),
    ("alpha of transpose", transpose, {"alpha": np.ones(7, np.float32)}, ValueError, r"`alpha` must have shape \(4,\)"),
    ("alpha of dgrad", dgrad, {"alpha": np.ones(4, np.float32)}, ValueError, r"`alpha` must have shape \(\), a number or a scalar array, got \(4,\)"),
    ("beta shape", conv, {"beta": np.ones(7, np.float32), "prior": Y}, ValueError, r"`beta` must have shape \(\), a number or"),
    ("alpha string", conv, {"alpha": "1"}, TypeError, "`alpha` must be an array, got str"),
    ("alpha None", conv, {"alpha": None}, TypeError, "`alpha` must be an array, got NoneType"),
    ("alpha complex", conv, {"alpha": 1j}, TypeError, "`alpha` must have one of the dtypes"),
    ("alpha bool", conv, {"alpha": True}, TypeError, "`alpha` must have one of the dtypes"),
    # what `checks` says of arguments that only other families have
    ("dtype that is an array", conv, {"out_dtype": X}, TypeError, "`out_dtype` must be a dtype, got an array of shape"),
    ("flag", reduce, {"keepdims": 1}, TypeError, "`keepdims` must be True or False, got 1"),
    ("class", reduce, {"keepdims": np.float32}, TypeError, "`keepdims` must be True or False, got <class 'numpy.float32'>"),
    ("axis", reduce, {"axis": (0, 4)}, ValueError, r"`axis` must be made of axes from -4 to 3 of `x`, got \(0, 4\)"),
    ("axis twice", reduce, {"axis": (3, -1)}, ValueError, r"`axis` must name every axis once, got \(3, -1\)"),
    ("axis of a scalar", reduce, {"x": 1.0, "axis": 0}, ValueError, "`x` must have at least one axis, got a scalar"),
    ("elements", transform, {"padding": 2**29, "x": np.ones((2, 4, 4, 9))}, ValueError, r"`padding` must give fewer than 2\^63 elements"),
    ("number", dropout, {"rate": None}, TypeError, "`rate` must be a number known when traced, got None"),
    ("beta complex array", conv, {"beta": jnp.array(1j), "prior": Y}, TypeError, "`beta` must have one of the dtypes"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "kind", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input(function: Callable[..., Any], arguments: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message) as eager:
        function(**arguments)
    _assert_one_sentence(str(eager.value))
    # The same when the arrays are traced, before anything is lowered.
    traced = {
        k: v
        for k, v in arguments.items()
        if isinstance(v, np.ndarray)
        and not isinstance(v, np.ma.MaskedArray)
        and v.dtype.kind not in "OMU"
        and v.ndim > 0
        and k not in ("activation", "engine", "shape", "out_dtype")
    }
    if traced:
        rest = {k: v for k, v in arguments.items() if k not in traced}
        with pytest.raises(kind, match=message):
            jax.eval_shape(lambda given: function(**given, **rest), traced)
    with pytest.raises(kind, match=message):
        jax.make_jaxpr(lambda: function(**arguments))()


def _assert_one_sentence(text: str) -> None:
    assert text.startswith("`")
    assert text.endswith(".")
    assert "\n" not in text
    assert "got" in text or "cannot be served" in text or "cannot be guaranteed" in text


def test_tracer_for_a_static_argument():
    for name, options in (("stride", {}), ("padding", {}), ("dilation", {}), ("groups", {})):
        with pytest.raises(TypeError, match=f"`{name}` {INTEGERS}"):
            jax.jit(lambda v, name=name, options=options: conv(**{name: v}, **options))(1)
    with pytest.raises(ValueError, match="`activation` 'elu' takes one number"):
        jax.jit(lambda v: conv(activation=("elu", v)))(1.0)
    with pytest.raises(TypeError, match="`x_shape` must be a shape"):
        jax.jit(lambda v: dgrad(shape=v))(jnp.array(X.shape))


def test_level_is_required_by_the_context_too():
    with dnn.determinism("portable"), pytest.raises(NotImplementedError, match="at determinism level 'portable'"):
        jax.eval_shape(lambda: conv(activation="tanh"))
    with pytest.raises(ValueError, match="`level` must be one of 'fast', .* got 'always'"), dnn.determinism("always"):
        pass


def test_what_is_called_by_position_or_by_name():
    with pytest.raises(TypeError, match="must be given by keyword"):
        dnn.conv(X, W, 2)  # type: ignore[misc]
    with pytest.raises(TypeError, match="has no argument `strides`"):
        dnn.conv(X, W, strides=2)  # type: ignore[call-arg]


def test_op_without_engine():
    call = engines.Call("conv", jax.tree_util.Partial(conv, engine="none"), (), "cpu")
    spec = type("Spec", (), {"engine": "none", "level": "fast"})()
    with pytest.raises(NotImplementedError, match=r"cannot be served by engine 'none' .*it has no such engine"):
        selection.select(engines.Call(call.op, spec, (), "cpu"))


def test_good_input_that_looks_bad():
    for options in (
        {"stride": np.int8(1)},
        {"padding": np.array([0, 1])},
        {"stride": [1, 2]},
        {"padding": [(0, 1), [1, 0]]},
    ):
        assert conv(**options).ndim == 4
    assert conv(x=X.tolist()).shape == Y.shape
    assert conv(alpha=np.float64(2), beta=np.int32(0)).dtype == np.float32
    assert transpose(padding=np.array([0, 1])).ndim == 4
    assert conv(stride=np.array(1), padding=np.array(1)).ndim == 4


# ---- every message of the source has a test --------------------------------------------------------------------------


def raised_messages(path: Path) -> Iterator[tuple[str, str]]:
    """(where, the longest fixed part) of every message that a file raises."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield f"{path.name}:{node.lineno}", max(_fixed_parts(node.exc.args[0]), key=len)


def _fixed_parts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.JoinedStr):
        return [str(v.value) for v in node.values if isinstance(v, ast.Constant)]
    return [str(node.value)] if isinstance(node, ast.Constant) else []


def plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", " ", text).strip()


@pytest.mark.parametrize("source", SOURCES)
def test_every_message_is_matched_by_a_test(source: str):
    raised = list(raised_messages(ROOT / f"{source}.py"))
    seen = [plain(message) for message in _messages()]
    missing = [f"{where}: {part}" for where, part in raised if not any(plain(part) in text for text in seen)]
    assert not missing


def _messages() -> list[str]:
    """What the bad inputs above say."""
    if not _said:
        for _, function, arguments, kind, _ in BAD:
            try:
                function(**arguments)
            except kind as error:
                _said.append(str(error))
    return _said


_said: list[str] = []


def test_every_activation_is_offered():
    with pytest.raises(ValueError, match=", ".join(map(repr, ACTIVATIONS))):
        conv(activation="none")
