"""Work and depth against computations that are carried out scalar by scalar and counted."""

import itertools
import math

import pytest

from paceline.cost import parallel_forms as pf
from paceline.cost import work_depth as wd
from paceline.cost.work_depth import ConvolutionSize, Evaluation, WorkDepth


class Counter:
    """Runs scalar operations: a number is the depth at which it is ready. A product that feeds a sum is one
    multiply-add with it.
    """

    def __init__(self):
        self.work = 0
        self.deepest = 0

    def tree(self, ready):
        """A reduction, pair by pair; the level of each pair."""
        ready = list(ready)
        while len(ready) > 1:
            ready = [max(ready[i : i + 2]) + (len(ready[i : i + 2]) > 1) for i in range(0, len(ready), 2)]
        self.deepest = max(self.deepest, *ready)
        return ready[0]

    def times(self, *ready):
        """A product whose level is that of the sum behind it."""
        self.work += 1
        return max(ready)

    def op(self, *ready):
        self.work += 1
        self.deepest = max(self.deepest, max(ready) + 1)
        return max(ready) + 1

    def total(self, ready):
        self.work += len(ready)
        return self.tree(ready)

    def dot(self, left, right):
        return self.tree(self.times(a, b) for a, b in zip(left, right, strict=True))

    @property
    def found(self):
        return WorkDepth(work=self.work, depth=self.deepest)


@pytest.mark.parametrize("values", range(1, 70))
def test_levels_of_a_tree(values):
    counter = Counter()
    assert counter.tree([0] * values) == wd.levels(values) == math.ceil(math.log2(values))


@pytest.mark.parametrize(("n", "c_in", "c_out"), [(2, 3, 5), (7, 8, 4), (9, 2, 17)])
def test_fully_connected(n, c_in, c_out):
    reduced = {Evaluation.OUTPUT: c_in, Evaluation.WEIGHTS: n, Evaluation.INPUT: c_out}
    for evaluation, size in reduced.items():
        counter = Counter()
        for _ in range(n * c_in * c_out // size):
            counter.dot([0] * size, [0] * size)
        assert wd.fully_connected(n, c_in, c_out, evaluation) == counter.found


SIZE = ConvolutionSize(samples=3, c_in=5, c_out=2, output=(4, 3), kernel=(3, 2), input_points=24)


def convolved(size, reduced_of):
    """Every multiply-add of a convolution, gathered by what it is added to, and reduced one dimension after
    another.
    """
    (height, width), (tall, wide) = size.output, size.kernel
    ranges = (size.samples, size.c_out, height, width, size.c_in, tall, wide)
    sums = {}
    for place in itertools.product(*map(range, ranges)):
        kept, reduced = reduced_of(*place)
        sums.setdefault(kept, []).append(reduced)
    counter = Counter()
    for terms in sums.values():
        partial = {term: counter.times(0) for term in terms}
        while len(next(iter(partial))):
            groups = {}
            for term, ready in partial.items():
                groups.setdefault(term[1:], []).append(ready)
            partial = {term: counter.tree(ready) for term, ready in groups.items()}
    return counter.found


@pytest.mark.parametrize("formula", [wd.convolution_direct, wd.convolution_im2col])
def test_convolution(formula):
    by = {
        Evaluation.OUTPUT: lambda n, k, y, x, c, v, u: ((n, k, y, x), (c, v, u)),
        Evaluation.INPUT: lambda n, k, y, x, c, v, u: ((n, c, y + v, x + u), (k, v, u)),
        Evaluation.WEIGHTS: lambda n, k, y, x, c, v, u: ((k, c, v, u), (n, y, x)),
    }
    for evaluation, reduced_of in by.items():
        assert formula(SIZE, evaluation) == convolved(SIZE, reduced_of)


def test_survey_row_of_direct_convolution():
    size = ConvolutionSize(samples=32, c_in=64, c_out=128, output=(56, 56), kernel=(5, 5))
    found = wd.convolution_direct(size)
    assert found.work == 32 * 128 * 56 * 56 * 64 * 25
    assert found.depth == 6 + 3 + 3
    assert found.parallelism == found.work / 12


def test_grouped_convolution():
    deep = ConvolutionSize(samples=2, c_in=32, c_out=32, output=(7, 7), kernel=(3, 3), groups=32)
    assert wd.convolution_direct(deep) == WorkDepth(work=2 * 32 * 49 * 9, depth=4)


def transformed(counter, rows, inner, columns, ready=0):
    """A product of small dense matrices: (rows x inner) (inner x columns)."""
    for _ in range(rows * columns):
        ready_at = counter.dot([ready] * inner, [0] * inner)
    return ready_at


@pytest.mark.parametrize("tile", [2, 4])
def test_winograd(tile):
    size = ConvolutionSize(samples=2, c_in=3, c_out=2, output=(5, 4), kernel=(3, 3))
    counter, alpha, r = Counter(), tile + 2, 3
    tiles = 2 * math.ceil(5 / tile) * math.ceil(4 / tile)
    for _ in range(3 * 2):
        kernels = transformed(counter, alpha, r, r)
        kernels = transformed(counter, alpha, r, alpha, kernels)
    # the survey takes the transforms one after the other
    for _ in range(3 * tiles):
        inputs = transformed(counter, alpha, alpha, alpha, kernels)
        inputs = transformed(counter, alpha, alpha, alpha, inputs)
    for _ in range(2 * tiles):
        for _ in range(alpha * alpha):
            summed = counter.tree(counter.times(inputs) for _ in range(3))
        outputs = transformed(counter, tile, alpha, alpha, summed)
        transformed(counter, tile, alpha, tile, outputs)
    assert wd.convolution_winograd(size, tile=tile) == counter.found
    assert counter.deepest == 2 * wd.levels(r) + 4 * wd.levels(alpha) + wd.levels(3)


@pytest.mark.parametrize("tile", [2, 4])
def test_winograd_gradients(tile):
    size = ConvolutionSize(samples=2, c_in=3, c_out=5, output=(5, 4), kernel=(3, 3))
    exchanged = ConvolutionSize(samples=2, c_in=5, c_out=3, output=(5, 4), kernel=(3, 3))
    gradient = wd.convolution_winograd(size, Evaluation.INPUT, tile)
    assert gradient == wd.convolution_winograd(exchanged, tile=tile)
    counter, alpha, r = Counter(), tile + 2, 3
    tiles = 2 * math.ceil(5 / tile) * math.ceil(4 / tile)
    for _ in range(5 * tiles):
        slopes = transformed(counter, alpha, tile, tile)
        slopes = transformed(counter, alpha, tile, alpha, slopes)
    for _ in range(3 * tiles):
        inputs = transformed(counter, alpha, alpha, alpha, slopes)
        inputs = transformed(counter, alpha, alpha, alpha, inputs)
    for _ in range(3 * 5):
        for _ in range(alpha * alpha):
            summed = counter.tree(counter.times(inputs) for _ in range(tiles))
        outputs = transformed(counter, r, alpha, alpha, summed)
        transformed(counter, r, alpha, r, outputs)
    assert wd.convolution_winograd(size, Evaluation.WEIGHTS, tile) == counter.found


def test_winograd_is_for_square_kernels_and_stride_one():
    plain = ConvolutionSize(samples=1, c_in=4, c_out=4, output=(8, 8), kernel=(3, 3))
    assert wd.winograd_fits(plain)
    for change in ({"kernel": (3, 5)}, {"kernel": (1, 1)}, {"stride": 2}, {"groups": 4}, {"output": (64,)}):
        sizes = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
        assert not wd.winograd_fits(ConvolutionSize(**{**sizes, **change}))


def test_fft():
    size = ConvolutionSize(samples=3, c_in=5, c_out=2, output=(8, 8), kernel=(5, 5), input_points=64)
    # half of n log2 n butterflies a plane of n = 64 points; a transform forward, one back
    counter = Counter()
    for _ in range(2 * 5 + 3 * 5 + 3 * 2):
        for ready in range(6):
            for _ in range(32):
                counter.op(ready)
    counter.work += 64 * 3 * 5 * 2
    found = wd.convolution_fft(size, constant=0.5)
    assert found.work == counter.work and found.depth == 2 * counter.deepest + wd.levels(5)
    assert wd.convolution_fft(size).work == 64 * 6 * (10 + 15 + 6) + 64 * 30
    for evaluation, reduced in ((Evaluation.INPUT, 2), (Evaluation.WEIGHTS, 3)):
        gradient = wd.convolution_fft(size, evaluation, constant=0.5)
        assert gradient == WorkDepth(work=found.work, depth=2 * 6 + wd.levels(reduced))


def test_pooling():
    counter = Counter()
    for _ in range(10):
        counter.tree([counter.total([0, 0, 0]) for _ in range(3)])
    assert wd.pooling(10, (3, 3)) == counter.found


def normalised(rows, backward):
    counter = Counter()
    if backward:
        values = [counter.op(0) for _ in range(rows)]
        gradients = counter.total([0] * rows)
        along = counter.dot([0] * rows, values)
        for value in values:
            counter.op(counter.op(counter.op(value, along, gradients)))
        return counter.found
    mean = counter.total([0] * rows)
    apart = [counter.op(mean) for _ in range(rows)]
    scale = counter.op(counter.op(counter.dot(apart, apart)))
    for value in apart:
        counter.op(value, scale)
    return counter.found


@pytest.mark.parametrize("rows", [2, 7, 32, 100])
@pytest.mark.parametrize("backward", [False, True])
def test_batch_norm(rows, backward):
    one = normalised(rows, backward)
    assert wd.batch_norm(rows, 6, backward=backward) == WorkDepth(work=6 * one.work, depth=one.depth)


@pytest.mark.parametrize("columns", [2, 9, 64])
def test_softmax(columns):
    forward, back = Counter(), Counter()
    apart = [forward.op(forward.op(top)) for top in [forward.total([0] * columns)] for _ in range(columns)]
    whole = forward.total(apart)
    for value in apart:
        forward.op(value, whole)
    assert wd.softmax(1, columns) == forward.found
    along = back.dot([0] * columns, [0] * columns)
    for _ in range(columns):
        back.op(back.op(along))
    assert wd.softmax(1, columns, backward=True) == back.found


def attended(queries, keys, head, value):
    counter = Counter()
    for _ in range(queries):
        scores = [counter.dot([0] * head, [0] * head) for _ in range(keys)]
        top = counter.total(scores)
        apart = [counter.op(counter.op(score, top)) for score in scores]
        whole = counter.total(apart)
        shares = [counter.op(one, whole) for one in apart]
        for _ in range(value):
            counter.dot(shares, [0] * keys)
    return counter.found


def test_attention():
    size = wd.AttentionSize(scores=5 * 9, queries=5, keys=9, head=8, value=6)
    assert wd.attention(size) == attended(5, 9, 8, 6)


def attended_backward(queries, keys, head, value):
    counter = Counter()
    shares = [[0] * keys for _ in range(queries)]
    slopes = [[0] * keys for _ in range(queries)]
    for i in range(queries):
        for j in range(keys):
            shares[i][j] = counter.op(counter.op(counter.dot([0] * head, [0] * head)))
            slopes[i][j] = counter.dot([0] * value, [0] * value)
        along = counter.dot(shares[i], slopes[i])
        slopes[i] = [counter.op(counter.op(along)) for _ in range(keys)]
        for _ in range(head):
            counter.dot(slopes[i], [0] * keys)
    for j in range(keys):
        for _ in range(head):
            counter.dot([slopes[i][j] for i in range(queries)], [0] * queries)
        for _ in range(value):
            counter.dot([shares[i][j] for i in range(queries)], [0] * queries)
    return counter.found


def test_attention_backward():
    size = wd.AttentionSize(scores=5 * 9, queries=5, keys=9, head=8, value=6)
    assert wd.attention(size, backward=True) == attended_backward(5, 9, 8, 6)


#: pointwise operations of a cell on the products of its gates, as they depend on one another
def lstm(counter, i, f, g, o, c):
    i, f, o = (counter.op(gate) for gate in (i, f, o))
    g = counter.op(g)
    c = counter.op(f, c, counter.op(i, g))
    return counter.op(o, counter.op(c)), c


def gru(counter, r, z, n, _):
    r, z = counter.op(r), counter.op(z)
    n = counter.op(counter.op(n, r))
    return counter.op(z, counter.op(n, counter.op(z))), 0


def plain(counter, h, _):
    return counter.op(h), 0


@pytest.mark.parametrize(("cell", "gates"), [(lstm, 4), (gru, 3), (plain, 1)])
@pytest.mark.parametrize(("steps", "layers"), [(1, 1), (6, 1), (5, 3)])
def test_recurrent(cell, gates, steps, layers):
    hidden, counter = 4, Counter()
    last = [([0] * hidden, [0] * hidden) for _ in range(layers)]
    for _ in range(steps):
        below = [0] * hidden
        for layer, (state, memory) in enumerate(last):
            products = [
                [counter.dot([*below, *state], [0] * 2 * hidden) for _ in range(gates)] for _ in range(hidden)
            ]
            made = [cell(counter, *product, memory[place]) for place, product in enumerate(products)]
            below = [h for h, _ in made]
            last[layer] = (below, [c for _, c in made])
    size = wd.RecurrentSize(samples=1, steps=steps, inputs=hidden, hidden=hidden, gates=gates, layers=layers)
    assert wd.recurrent(size) == counter.found


def test_recurrent_backward_is_a_longer_chain():
    size = wd.RecurrentSize(samples=8, steps=20, inputs=64, hidden=64, gates=4)
    forward, backward = wd.recurrent(size), wd.recurrent(size, backward=True)
    assert backward.work == 2 * forward.work
    assert backward.depth == 20 * (8 + 5) + wd.levels(20 * 8)
    both_ways = wd.RecurrentSize(samples=8, steps=20, inputs=64, hidden=64, layers=2, directions=2)
    assert wd.recurrent(both_ways).depth == 2 * 20 * (wd.levels(128 + 64) + 5)


def test_scans_and_sorts():
    assert wd.prefix_sum(1024) == WorkDepth(work=2048, depth=20)
    assert wd.sort(8) == WorkDepth(work=8 / 2 * 6, depth=6)
    assert wd.reduction(3, 100) == WorkDepth(work=300, depth=7)
    assert wd.pointwise(50, 3) == WorkDepth(work=150, depth=3)


def test_put_together():
    one, two = WorkDepth(work=6, depth=2), WorkDepth(work=4, depth=3)
    assert one.then(two) == WorkDepth(work=10, depth=5)
    assert one.beside(two) == WorkDepth(work=10, depth=3)
    assert wd.NOTHING.parallelism == 0 and one.parallelism == 3
    assert wd.product(0, 3, 3, 3) == wd.NOTHING
    # whatever works takes one operation at least
    assert wd.product(1, 5, 5, 1).depth == 1


# -- forms of parallelism --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_of_data_parallelism_are_those_of_a_ring(ranks):
    sent = 0
    chunks = [1.0 / ranks] * ranks
    for _ in range(2 * (ranks - 1)):
        sent += chunks[0]
    assert pf.data_sending(ranks, 100.0).bytes == pytest.approx(100 * sent)
    assert pf.data_sending(1, 100.0) == pf.Sending(bytes=0, messages=0)


def test_bytes_of_model_parallelism():
    sent = pf.model_sending(4, outputs=[10.0, 20.0], inputs=[30.0, 10.0])
    assert sent.bytes == pytest.approx(3 / 4 * (30 + 2 * 40))
    assert sent.messages == 2 * (2 + 2 * 2)
    assert sent.seconds(10.0, 0.5) == pytest.approx(sent.bytes / 10 + 6)
    assert pf.model_seconds(8, [1.0, 2.0], [4, 16]) == 1 / 4 + 2 / 8


def test_a_pipeline_fills_and_drains():
    # stages of one second each, four micro-batches of a quarter: the last leaves after 4 + 3 - 1 quarters
    assert pf.pipeline_seconds(1.0, 3, 4) == pytest.approx(6 / 4)
    assert pf.pipeline_sending([5.0, 8.0], 4) == pf.Sending(bytes=16.0, messages=2 * (4 + 1))
    assert pf.pipeline_sending([], 4).bytes == 0


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_cuts_are_the_best_there_are(stages):
    layers = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    best = min(
        max(sum(layers[a:b]) for a, b in itertools.pairwise((0, *cuts, len(layers))))
        for cuts in itertools.combinations(range(1, len(layers)), stages - 1)
    )
    cuts = pf.balanced_cuts(layers, stages)
    assert len(cuts) < stages or stages == 1
    assert pf.slowest_stage(layers, cuts) == pytest.approx(best)
