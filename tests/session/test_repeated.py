"""Runs whose shapes have occurred before give the results of the first run, although they compute them otherwise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest

from genai.errors import ArgumentError
from genai.kernels.cpu.program.recording import JoinedProgram
from genai.session.config import SessionConfig
from genai.session.session import Session

RNG = np.random.default_rng(5)


def _session(text, *, threads=1):
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\n{text}')
    return Session(model, SessionConfig(threads=threads))


def _numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def _constant(name, *shape):
    values = ", ".join(f"{x:.3f}" for x in _numbers(int(np.prod(shape))))
    return f"float[{','.join(map(str, shape))}] {name} = {{{values}}}"


def _plain(session, feed):
    """Run a session without stored shapes and joined programs."""
    return session.run(feed, stop=lambda: False)


def _form(session):
    """Return the calls of the faster form of the session's plan."""
    (form,) = session._repeated._forms.values()
    return [op.op_type for op in form.calls]


def _agree(session, feeds):
    for feed in feeds:
        found, expected = session.run(feed), _plain(session, feed)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)


LAYERS = f"""
g (float[N, S, 32] x, float[N, S, 32] y) => (float[N, S, 32] z, float[N, 4, S, 8] heads)
<{_constant("w", 32, 32)}, {_constant("v", 32, 32)}, {_constant("scale", 32)}, {_constant("shift", 32)},
 int64[1] four = {{4}}, int64[1] rest = {{-1}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}>
{{
    sum = Add(x, y)
    normed = LayerNormalization<axis = -1>(sum, scale, shift)
    a = MatMul(normed, w)
    shape = Shape(a)
    n = Slice(shape, zero, one)
    s = Slice(shape, one, two)
    split = Concat<axis = 0>(n, s, four, rest)
    parts = Reshape(a, split)
    heads = Transpose<perm = [0, 2, 1, 3]>(parts)
    soft = Softmax<axis = -1>(a)
    b = MatMul(soft, v)
    z = Relu(b)
}}"""


@pytest.fixture(scope="module")
def layers():
    return _session(LAYERS)


def _feed(batch=2, length=3):
    return {"x": _numbers(batch, length, 32), "y": _numbers(batch, length, 32)}


def test_layers(layers):
    _agree(layers, [_feed() for _ in range(4)])
    assert _form(layers) == ["Joined"]
    _agree(layers, [_feed(1, 5) for _ in range(3)])
    assert len(layers._repeated._forms) == 2


def test_results_are_separate(layers):
    feeds = [_feed() for _ in range(5)]
    results = [layers.run(feed) for feed in feeds]
    for feed, result in zip(feeds, results, strict=True):
        for name, value in _plain(layers, feed).items():
            np.testing.assert_array_equal(result[name], value)
            assert result[name].flags.writeable


def test_other_layouts(layers):
    """The program was recorded for arrays in C order."""
    for _ in range(3):
        layers.run(_feed())
    feed = _feed()
    _agree(layers, [{"x": np.asfortranarray(feed["x"]), "y": feed["y"][:, ::-1]}, feed])


def test_one_array_for_two_inputs():
    session, x = _session(LAYERS), _numbers(2, 3, 32)
    _agree(session, [{"x": x, "y": x}] * 3)
    _agree(session, [_feed(), {"x": x, "y": x}])


def test_several_threads(layers):
    feeds = [_feed() for _ in range(24)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(layers.run, feeds))
    for feed, result in zip(feeds, results, strict=True):
        np.testing.assert_array_equal(result["z"], _plain(layers, feed)["z"])


# A graph, and feeds whose values, but not shapes, differ.
BY_VALUES = {
    "the shape": (
        "g (float[4, 6] x, int64[2] s) => (float[A, B] z) { a = Reshape(x, s) b = Relu(a) z = Exp(b) }",
        [{"s": np.array(s)} for s in ([4, 6], [6, 4], [24, 1], [2, 12])],
    ),
    "the bounds": (
        "g (float[4, 6] x, int64[1] b, int64[1] e) => (float[A, 6] z)\n"
        "{ a = Slice(x, b, e) s = Shape(a) c = Relu(a) d = Exp(c) z = Reshape(d, s) }",
        [{"b": np.array([b]), "e": np.array([e])} for b, e in ((0, 2), (1, 3), (0, 4), (3, 4))],
    ),
    "the number of results": (
        "g (float[4, 6] x) => (int64[2, A] z, int64[2] s) { a = Relu(x) z = NonZero(a) s = Shape(z) }",
        [{}] * 4,
    ),
    "a limit": (
        "g (float[4, 6] x, float high) => (float[4, 6] z) { a = Relu(x) b = Clip(a, , high) z = Exp(b) }",
        [{"high": np.float32(high) + np.zeros((), np.float32)} for high in (1, 0.5, 2, 0)],
    ),
    "a branch": (
        "g (float[4, 6] x, bool flag) => (float[4, 6] z) {\n"
        "z = If(flag) <then_branch = t () => (float[4, 6] p) { q = Relu(x) p = Exp(q) },"
        " else_branch = e () => (float[4, 6] p) { q = Neg(x) r = Relu(q) p = Sigmoid(r) }> }",
        [{"flag": np.array(flag)} for flag in (True, False, True, False, True, False)],
    ),
    "the number of iterations": (
        "g (float[4, 6] x, int64 n) => (float[4, 6] z) <bool yes = {1}> {\n"
        "z = Loop(n, yes, x) <body = b (int64 i, bool c, float[4, 6] p) => (bool d, float[4, 6] r)"
        " { d = Identity(c) k = Cast<to = 1>(i) l = Add(p, k) q = Relu(l) r = Sigmoid(q) }> }",
        [{"n": np.array(n)} for n in (5, 2, 4, 0)],
    ),
}


@pytest.mark.parametrize("case", BY_VALUES)
def test_results_that_depend_on_values(case):
    text, feeds = BY_VALUES[case]
    session = _session(text)
    _agree(session, [{"x": _numbers(4, 6), **feed} for feed in feeds])


def test_changed_results_of_shapes():
    """Results that depend only on shapes are stored, but callers receive copies."""
    session = _session(
        "g (float[N, 6] x) => (int64[2] s, float[N, 6] ones)\n"
        "{ s = Shape(x) ones = ConstantOfShape<value = float[1] {1}>(s) }"
    )
    for _ in range(4):
        found = session.run({"x": _numbers(4, 6)})
        assert found["s"].tolist() == [4, 6] and found["ones"].sum() == 24
        found["s"][:], found["ones"][:] = 0, 0
    assert _form(session) == []


def test_many_shapes():
    """The number of stored forms is limited."""
    session = _session("g (float[N] x) => (float[N] z) { a = Relu(x) z = Exp(a) }")
    for size in range(1, 40):
        _agree(session, [{"x": _numbers(size)} for _ in range(2)])
    assert len(session._repeated._forms) <= 16


@pytest.mark.parametrize("threads", [1, 2])
def test_empty_and_large_values(threads):
    """Large values are computed in separate calls."""
    session = _session("g (float[N] x) => (float[N] z) { a = Relu(x) z = Exp(a) }", threads=threads)
    for size in (0, 1 << 21):
        _agree(session, [{"x": _numbers(size)} for _ in range(3)])
    assert all(form is session.plan for form in session._repeated._forms.values())


# Graphs whose calls become one program.
JOINED = {
    "copies": """g (float[2, 6] x, float[1, 6] y) => (float[3, 13] z, float[18] t)
        <int64[4] sides = {0, 3, 0, 4}, int64[1] all = {-1}> {
        a = Concat<axis = 0>(x, y) b = Pad<mode = "reflect">(a, sides) z = Relu(b)
        c = Transpose(a) d = Reshape(c, all) t = Relu(d) }""",
    "padding": """g (float[2, 6] x) => (float[4, 7] z) <int64[4] sides = {1, 0, 1, 1}, float one = {1.5}> {
        a = Relu(x) b = Pad(a, sides, one) z = Exp(b) }""",
    "functions": """g (float[2, 6] x, float[6] y) => (float[2, 6] z) <float two = {2}> {
        a = Pow(x, two) b = Sqrt(a) c = Neg(b) d = Abs(c) e = Div(d, y) f = Sub(e, y) z = Mul(f, f) }""",
    "types": """g (float[2, 6] x) => (float[2, 6] z) {
        a = Cast<to = 10>(x) b = Cast<to = 1>(a) z = Relu(b) }""",
    "indices": """g (float[3, 2, 6] x) => (float[2, 6] z, float[1, 6] v) <int64 two = {-1}, int64[1] zero = {0}> {
        a = Gather(x, two) b = Relu(a) z = Exp(b) c, d = Split<axis = 0, num_outputs = 2>(b) v = Exp(d) }""",
    "selection": """g (float[2, 6] x) => (float[4, 9] z, int64[2, 3] i) <int64[1] k = {3}, int64[2] times = {2, 3}> {
        v, i = TopK(x, k) t = Tile(v, times) z = Relu(t) }""",
    "branches": """g (float[2, 6] x) => (float[2, 6] z) <int64 one = {1}, int64 six = {6}> {
        s = Shape(x) n = Gather(s, one) wide = Equal(n, six) y = Exp(x)
        z = If(wide) <then_branch = t () => (float[2, 6] p) { q = Relu(y) p = Exp(q) },
        else_branch = e () => (float[2, 6] p) { q = Neg(y) p = Identity(q) }> }""",
    "layers": f"""g (float[3, 2, 16] x, float[1, 2, 16] h, float[1, 2, 16] c)
        => (float[3, 1, 2, 16] z, float[1, 2, 16] last)
        <{_constant("w", 1, 64, 16)}, {_constant("r", 1, 64, 16)}, {_constant("b", 1, 128)}> {{
        y, last, cell = LSTM<hidden_size = 16>(x, w, r, b, , h, c) z = Relu(y) }}""",
    "gates": f"""g (float[3, 2, 16] x, float[1, 2, 16] h) => (float[3, 1, 2, 16] z)
        <{_constant("w", 1, 48, 16)}, {_constant("r", 1, 48, 16)}, {_constant("b", 1, 96)}> {{
        y, last = GRU<hidden_size = 16, linear_before_reset = 1>(x, w, r, b, , h) z = Relu(y) }}""",
}


@pytest.mark.parametrize("case", JOINED)
def test_calls_that_become_one_program(case):
    session = _session(JOINED[case])
    shapes = {value.name: value.type.shape for value in session.inputs}
    _agree(session, [{name: _numbers(*shape) for name, shape in shapes.items()} for _ in range(4)])
    assert _form(session) == ["Joined"]


def test_views_that_other_kernels_read():
    """A view of an input is made once, for the kernel that needs an array."""
    session = _session(
        "g (float[2, 6] x) => (float[6, 2] z, int64[2, A] n) <int64[2] shape = {6, 2}>\n"
        "{ v = Reshape(x, shape) a = Relu(v) z = Exp(a) w = Transpose(v) n = NonZero(w) }"
    )
    _agree(session, [{"x": np.maximum(_numbers(2, 6), 0)} for _ in range(4)])
    assert sorted(_form(session)) == ["Joined", "NonZero", "Reshape", "Transpose"]


def test_absent_results():
    """The operator returns a norm and a sum; its other results are absent."""
    text = f"""<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[2, 3, 16] x, float[2, 3, 16] y) => (float[2, 3, 16] z, float[2, 3, 16] sum) <{_constant("w", 16)}> {{
        n, , , sum = com.microsoft.SkipSimplifiedLayerNormalization(x, y, w) z = Relu(n) }}"""
    session = Session(onnx.parser.parse_model(text), SessionConfig(threads=1))
    _agree(session, [{"x": _numbers(2, 3, 16), "y": _numbers(2, 3, 16)} for _ in range(4)])
    assert _form(session) == ["Joined"]


def test_a_copy_that_only_numpy_makes():
    """NumPy pads six axes of two words, which are too many axes for a program."""
    session = _session(
        "g (double[3,4,3,4,2,2] x) => (double[A,B,C,D,E,F] z)\n"
        "<int64[12] pads = {1,0,0,2,1,1,2,1,1,1,0,1}, double fill = {1.5}> { a = Relu(x) z = Pad(a, pads, fill) }"
    )
    _agree(session, [{"x": RNG.standard_normal((3, 4, 3, 4, 2, 2))} for _ in range(5)])


@pytest.mark.parametrize("runs", [1, 2])
def test_a_program_with_other_results_is_not_used(runs, monkeypatch):
    session, count = _session(LAYERS), 0
    run = JoinedProgram.run

    def forgetful(program, addresses, **options):
        nonlocal count
        count += 1
        if count >= runs:
            return None
        return run(program, addresses, **options)

    monkeypatch.setattr(JoinedProgram, "run", forgetful)
    _agree(session, [_feed() for _ in range(6)])
    assert count == runs


def test_an_index_in_a_branch_is_refused_in_every_run():
    session = _session(
        "g (float[4] x, int64[1] i) => (float[1] z) <bool yes = {1}> { z = If(yes) <\n"
        "then_branch = t () => (float[1] p) { q = Relu(x) p = Gather(q, i) },\n"
        "else_branch = e () => (float[1] p) { q = Neg(x) p = Gather(q, i) }> }"
    )
    for index in (1, 9, 2, 9, 3, 9, 9):
        feed = {"x": np.arange(4, dtype=np.float32), "i": np.array([index])}
        if index < 4:
            assert session.run(feed)["z"] == index
        else:
            with pytest.raises(ArgumentError, match=r"Gather .*index 9 is out of bounds"):
                session.run(feed)


@pytest.mark.parametrize("layer", ["LSTM<hidden_size = 16", "GRU<linear_before_reset = 1, hidden_size = 16"])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_lengths_of_sequences_that_differ_in_each_run(layer, direction):
    gates = 4 if layer.startswith("LSTM") else 3
    session = _session(f"""g (float[5, 3, 16] x, int32[3] lengths) => (float[5, 1, 3, 16] z, float[1, 3, 16] last)
        <{_constant("w", 1, 16 * gates, 16)}, {_constant("r", 1, 16 * gates, 16)}> {{
        y, last = {layer}, direction = "{direction}">(x, w, r, , lengths) z = Relu(y) }}""")
    for lengths in [[5, 5, 5]] * 6 + [[2, 5, 0], [5, 1, 3]]:
        _agree(session, [{"x": _numbers(5, 3, 16), "lengths": np.array(lengths, np.int32)}])


def _quantized(type_, per_channel):
    low, high = (-128, 128) if type_ == "int8" else (0, 256)
    point = int(RNG.integers(low, high))
    weights = ", ".join(map(str, RNG.integers(-128, 128, 32 * 5 * 9)))
    deep = ", ".join(map(str, RNG.integers(-128, 128, 32 * 9)))
    count = 32 if per_channel else 1
    zeros = ", ".join("0" * count)
    scales = ", ".join(f"{scale:.5f}" for scale in RNG.uniform(0.001, 0.004, count))
    bias = ", ".join(map(str, RNG.integers(-2000, 2000, 32)))
    return f"""<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[2, 5, 18, 17] x) => (float[2, 32, 9, 9] z)
        <float s = {{0.02}}, {type_} p = {{{point}}}, int8[32, 5, 3, 3] w = {{{weights}}}, int32[32] b = {{{bias}}},
        int8[32, 1, 3, 3] v = {{{deep}}}, float[{count}] t = {{{scales}}}, int8[{count}] q = {{{zeros}}},
        float r = {{0.05}}, {type_} o = {{{128 + low}}}> {{
        a = QuantizeLinear(x, s, p)
        c = QLinearConv<pads = [1, 1, 1, 1], strides = [2, 2]>(a, s, p, w, t, q, r, o, b)
        d = QLinearConv<pads = [1, 1, 1, 1], group = 32>(c, r, o, v, t, q, r, o, b)
        e = com.microsoft.QLinearAdd(c, r, o, d, r, o, r, o)
        z = DequantizeLinear(e, r, o) }}"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("type_", ["int8", "uint8"])
def test_quantized_convolutions_become_one_program(type_, per_channel, threads):
    model = onnx.parser.parse_model(_quantized(type_, per_channel))
    session = Session(model, SessionConfig(threads=threads))
    _agree(session, [{"x": _numbers(2, 5, 18, 17)} for _ in range(6)])
    assert _form(session) == ["Joined"]


def test_a_scale_that_depends_on_shapes():
    """NumPy returns scalars, not arrays, for results without axes."""
    session = _session("""g (float[N, 100] x) => (float[N, 100] z)
        <int64 zero = {0}, float part = {0.001}, int8 point = {3}> {
        shape = Shape(x) n = Gather(shape, zero) size = Cast<to = 1>(n) scale = Mul(size, part)
        a = Relu(x) q = QuantizeLinear(a, scale, point) d = DequantizeLinear(q, scale, point) z = Exp(d) }""")
    _agree(session, [{"x": _numbers(40, 100)} for _ in range(6)])
    assert _form(session) == ["Joined"]


def test_a_scale_that_differs_in_each_run():
    session = _session("""g (float[40, 100] x, float s, int8 p) => (int8[40, 100] q, float[40, 100] z) {
        a = Relu(x) q = QuantizeLinear(a, s, p) d = DequantizeLinear(q, s, p) z = Exp(d) }""")
    for number in range(1, 8):
        feed = {"x": _numbers(40, 100), "s": np.float32(number / 50) + np.zeros((), np.float32)}
        _agree(session, [{**feed, "p": np.array(number - 4, np.int8)}])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_a_program(threads):
    """Several callers at once: long and short calls, values in several sizes, memory that is not kept between runs."""
    session = _session(
        f"""g (float[1, 48, 40, 40] x) => (float[1, 32, 20, 20] z, float[1, 64, 40, 40] y)
        <{_constant("v", 64, 48, 1, 1)}, {_constant("w", 32, 64, 3, 3)}, {_constant("b", 64, 1, 1)},
        {_constant("u", 64, 64, 1, 1)}> {{
        a = Conv(x, v) c = Relu(a) d = GlobalAveragePool(c) e = Sigmoid(d) f = Mul(c, e) g = Conv(f, u)
        h = Add(g, c) k = Mul(h, b) y = Exp(k) m = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(h, w) z = Tanh(m) }}
    """,
        threads=threads,
    )
    feeds = [{"x": _numbers(1, 48, 40, 40)} for _ in range(24)]
    _agree(session, feeds[:6])
    assert _form(session) == ["Joined"]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(session.run, feeds))
    for feed, result in zip(feeds, results, strict=True):
        for name, value in _plain(session, feed).items():
            np.testing.assert_array_equal(result[name], value)


def test_checks_after_accepted_shapes():
    """The shapes of the last run are not checked again; other shapes, views and shared results are."""
    session = _session("g (float[N, 2] x) => (float[N, 2] y, float[N, 2] same, float[N, 2] z) "
                       "{ y = Identity(x) same = Identity(x) z = Neg(x) }")  # fmt: skip
    whole = _numbers(6, 2)
    for x in (whole, whole, whole[:3], whole, whole[::2]):
        found = session.run({"x": x})
        for name, expected in (("y", x), ("same", x), ("z", -x)):
            np.testing.assert_array_equal(found[name], expected)
        arrays = [x, *found.values()]
        assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
        assert all(value.flags.writeable and value.flags.c_contiguous for value in found.values())
        for wrong, message in ((_numbers(6, 3), "invalid dimensions"), (_numbers(12), "invalid rank")):
            with pytest.raises(ArgumentError, match=message):
                session.run({"x": wrong})
        with pytest.raises(ArgumentError, match="unexpected data type"):
            session.run({"x": x.astype(np.float64)})


def test_every_result_of_another_shape_is_reported():
    """A shape that differs from the declaration is not remembered as accepted."""
    text = "g (float[N] x) => (float[3] y) { y = Neg(x) }"
    session = _session(text)
    for _ in range(4):
        session.run({"x": _numbers(3)})
        with pytest.warns(UserWarning, match=r"output 'y' has shape \[2\]"):
            session.run({"x": _numbers(2)})


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        ("AveragePool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>(x)", (2, 3, 9, 7)),
        ("AveragePool<kernel_shape = [2, 2], pads = [1, 0, 1, 0], count_include_pad = 1>(x)", (1, 2, 5, 6)),
        ("MaxPool<kernel_shape = [5, 5], pads = [2, 2, 2, 2]>(x)", (1, 2, 9, 11)),
        ("GlobalAveragePool(x)", (2, 3, 5, 5)),
        ("InstanceNormalization(x, scale, shift)", (2, 3, 6, 5)),
        ("BatchNormalization(x, scale, shift, shift, square)", (2, 3, 6, 5)),
        ("ReduceMean(x, last)", (4, 33)),
        ("ReduceL2(x, last)", (4, 3, 19)),
        ("LogSoftmax(x)", (5, 21)),
        ("Relu(x)", (7,)),
        ('Resize<mode = "nearest", nearest_mode = "floor">(x, , scales)', (1, 2, 5, 9)),
    ],
)
def test_a_single_node_becomes_a_program(node, shape):
    """A program of one call needs none of the checks and decisions of its kernel."""
    constants = (
        f"{_constant('scale', 3)}, {_constant('shift', 3)}, float[3] square = {{0.5, 2, 3}}, int64[1] last = {{-1}}, "
        "float[4] scales = {1, 1, 2, 3}"
    )
    dims = ", ".join("ABCD"[: len(shape)]), ", ".join("PQRS"[: len(shape)])
    session = _session(f"g (float[{dims[0]}] x) => (float[{dims[1]}] y) <{constants}> {{ y = {node} }}")
    feeds = [{"x": _numbers(*shape)} for _ in range(6)]
    _agree(session, [*feeds, {"x": _numbers(*shape[:-1], shape[-1] + 2)}, *feeds])
    assert [op.op_type for op in next(iter(session._repeated._forms.values())).calls] == ["Joined"]


_TENSOR = "float[1, 8, A, B]"


@pytest.mark.parametrize(
    ("graph", "constants"),
    [
        # Padding, and a sum after the convolution.
        ("t = Conv<pads = [1, 1, 1, 1]>(x, w, b) u = Relu(t) v = Conv<pads = [2, 2, 2, 2], dilations = [2, 2]>(u, w)"
         " y = Add(v, x)", {"w": (8, 8, 3, 3), "b": (8,)}),
        # Depthwise kernels without a bias, between normalisations of the last axis.
        ("t = Conv<pads = [3, 3, 3, 3], group = 8>(x, w) u = Transpose<perm = [0, 2, 3, 1]>(t)"
         " v = LayerNormalization(u, b, b) z = Transpose<perm = [0, 3, 1, 2]>(v) y = Add(z, x)",
         {"w": (8, 1, 7, 7), "b": (8,)}),
        # Pools of padded windows of images that are not contiguous.
        ("t = Transpose<perm = [0, 1, 3, 2]>(x) u = MaxPool<kernel_shape = [2, 2], pads = [1, 0, 0, 1]>(t)"
         " v = Transpose<perm = [0, 1, 3, 2]>(u) y = Conv(v, w)", {"w": (8, 8, 1, 1)}),
    ],
)  # fmt: skip
def test_small_convolutions_become_one_program(graph, constants):
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
        g ({_TENSOR} x) => (float[1, 8, P, Q] y) {{ {graph} }}""")
    rng = np.random.default_rng(0)
    for name, shape in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name))
    session = Session(model, SessionConfig(threads=1))
    for rows, columns in [(6, 5), (6, 5), (6, 5), (6, 5), (9, 7), (9, 7), (9, 7), (9, 7), (6, 5)]:
        _agree(session, [{"x": rng.standard_normal((1, 8, rows, columns), np.float32)}])
    assert [op.op_type for op in next(iter(session._repeated._forms.values())).calls] == ["Joined"]


def test_a_single_sum_beside_an_ordinary_call_remains_an_ordinary_call():
    session = _session("g (float[N] x) => (float[N] z, int64[M, K] y) { z = Add(x, x) y = NonZero(x) }")
    _agree(session, [{"x": _numbers(8)} for _ in range(4)])
    assert sorted(_form(session)) == ["Add", "NonZero"]


def test_a_graph_of_a_single_sum_becomes_a_program():
    session = _session("g (float[N] x) => (float[N] z) { z = Add(x, x) }")
    _agree(session, [{"x": _numbers(8)} for _ in range(4)])
    assert _form(session) == ["Joined"]


def test_results_of_a_checked_program_are_new_arrays():
    session = _session("g (float[N] x) => (float[N] y, float[N] z) { y = Add(x, x) z = Mul(y, x) }")
    given = [_numbers(8) for _ in range(8)]
    found = [session.run({"x": x}) for x in given]
    (program,) = session._repeated._programs.values()
    assert program.is_checked
    for x, made in zip(given, found, strict=True):
        np.testing.assert_array_equal(made["y"], x + x)
        np.testing.assert_array_equal(made["z"], (x + x) * x)


def test_a_checked_program_accepts_arrays_of_other_strides_and_the_same_array_twice():
    session = _session("g (float[N] x, float[N] y) => (float[N] z) { z = Add(x, y) }")
    x = _numbers(16)
    for _ in range(6):
        session.run({"x": _numbers(8), "y": _numbers(8)})
    np.testing.assert_array_equal(session.run({"x": x[::2], "y": x[1::2]})["z"], x[::2] + x[1::2])
    np.testing.assert_array_equal(session.run({"x": x[:8], "y": x[:8]})["z"], x[:8] + x[:8])
    np.testing.assert_array_equal(session.run({"y": x[:8], "x": x[8:]})["z"], x[:8] + x[8:])


def test_dictionaries_are_made_from_the_results_of_a_program():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
        g (float[N, 2] x) => (float[N, 2] y, seq(map(int64, float)) z) {
            y = Softmax(x) z = ai.onnx.ml.ZipMap<classlabels_int64s = [7, 9]>(y)
        }""")
    session = Session(model, SessionConfig(threads=1))
    for rows in (2, 2, 2, 2, 2, 1, 1, 1, 1, 2):
        feed = {"x": _numbers(rows, 2)}
        found, expected = session.run(feed), _plain(session, feed)
        np.testing.assert_array_equal(found["y"], expected["y"])
        assert found["z"] == expected["z"] == [dict(zip((7, 9), row, strict=True)) for row in expected["y"].tolist()]
    assert len(session._repeated._programs) == 2
    assert all(program.is_checked for program in session._repeated._programs.values())


def test_results_of_a_program_that_are_returned_twice_share_no_memory():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
        g (float[N, 2] x) => (float[N, 2] y, float[N, 2] w, seq(map(int64, float)) z) {
            y = Softmax(x) w = Identity(y) z = ai.onnx.ml.ZipMap<classlabels_int64s = [7, 9]>(y)
        }""")
    session = Session(model, SessionConfig(threads=1))
    for _ in range(8):
        found = session.run({"x": _numbers(3, 2)})
        expected = found["w"].copy()
        found["y"][...] = 0
        np.testing.assert_array_equal(found["w"], expected)


def test_a_wrong_declared_shape_is_named_in_every_run():
    session = _session("g (float[N] x) => (float[3] z) { z = Add(x, x) }")
    for _ in range(8):
        with pytest.warns(UserWarning, match="the model declares"):
            session.run({"x": _numbers(8)})


def test_inputs_of_a_joined_body_remain_for_later_calls():
    """The calls of a body release other slots than the calls of the plan."""
    session = _session("""g (float[N, M] x) => (float[P, Q] y, float[N, M] z) <bool no = {0}> {
        y = If(no) <then_branch = then () => (float[N, M] a) { a = Exp(x) },
                    else_branch = other () => (float[N, M] b) { b = Softmax(x) }>
        z = LogSoftmax(x)
    }""")
    _agree(session, [{"x": _numbers(3, 5)} for _ in range(6)])
    assert _form(session) == ["Joined"]


@pytest.mark.parametrize("threads", [1, 2])
def test_short_calls_with_larger_values_become_one_program(threads):
    """Their results are not in memory that the session keeps."""
    session = _session(
        """g (float[N, M] x) => (float[N, 1] y, float[P, N, M] z) <int64[1] last = {-1}, int64[1] first = {0}> {
        w = Unsqueeze(x, first)
        z = Relu(w)
        y = ReduceMax(x, last)
    }""",
        threads=threads,
    )
    feeds = [{"x": _numbers(400, 1000)} for _ in range(6)]
    _agree(session, feeds)
    assert _form(session) == ["Joined"]
    for name in "yz":
        assert not np.shares_memory(*[session.run(feed)[name] for feed in feeds[:2]])


@pytest.mark.parametrize(("shape", "form"), [("float[64, 1, 1]", "Joined"), ("float[1, 64, 40, 40]", "Add")])
def test_large_sums_are_programs_if_an_operand_is_broadcast(shape, form):
    """NumPy adds arrays of the same shape faster."""
    session = _session(f"g (float[1, 64, 40, 40] x, {shape} y) => (float[A, B, C, D] z) {{ z = Add(x, y) }}")
    shapes = {value.name: value.type.shape for value in session.inputs}
    _agree(session, [{name: _numbers(*sizes) for name, sizes in shapes.items()} for _ in range(4)])
    assert _form(session) == [form]


def test_a_mask_becomes_a_part_of_the_program():
    session = _session("""g (int64[N, M] mask, float[N, M, 4] x) => (float[N, M, 4] y)
        <int64[1] two = {2}, float low = {-100.0}, int64 one = {1}, int64[2] rows = {1, 0}> {
            kept = Cast<to = 9>(mask) equal = Equal(mask, one) both = And(kept, equal) turned = Gather(both, rows)
            wide = Unsqueeze(turned, two) bias = Where(wide, x, low) y = Softmax(bias)
        }""")
    feeds = [{"mask": np.random.default_rng(n).integers(0, 3, (2, 3)), "x": _numbers(2, 3, 4)} for n in range(6)]
    _agree(session, feeds)
    assert _form(session) == ["Joined"]
