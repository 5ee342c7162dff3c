"""Work and depth of the operators of a network: how many operations, and how many of them in a row.

The model is that of Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning" (ACM Computing
Surveys 52(4), 2019, arXiv:1802.09941): work W is the time on one processor, depth D the time on infinitely
many, and W / D the average parallelism. An operation is one addition, comparison, special function or
multiply-add of scalars; n values are reduced in a tree of ceil(log2 n) levels. Where the survey gives an
order of growth, the functions here count: constants are those of the formula in the docstring.

Sizes, as in the survey: N samples, C_in and C_out channels, H' x W' output points, K_y x K_x kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Evaluation(StrEnum):
    """What an operator evaluates: its output, or the gradient of its weights or of its input."""

    OUTPUT = "output"
    WEIGHTS = "weights"
    INPUT = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDepth:
    """Operations of a computation, and the operations of its longest chain."""

    work: float
    depth: float

    @property
    def parallelism(self) -> float:
        """Average parallelism W / D: how many processors the computation can keep busy on average."""
        return self.work / self.depth if self.depth else 0.0

    def then(self, after: WorkDepth) -> WorkDepth:
        """Both, one after the other."""
        return WorkDepth(work=self.work + after.work, depth=self.depth + after.depth)

    def beside(self, other: WorkDepth) -> WorkDepth:
        """Both, at the same time."""
        return WorkDepth(work=self.work + other.work, depth=max(self.depth, other.depth))


NOTHING = WorkDepth(work=0.0, depth=0.0)


def levels(values: float) -> int:
    """Levels of a tree that reduces so many values: ceil(log2 n)."""
    return (max(1, math.ceil(values)) - 1).bit_length()


def _levels(sizes: Iterable[float]) -> int:
    """Levels of reductions along several dimensions, one dimension after another."""
    return sum(levels(size) for size in sizes)


def _at_least_one(work: float, depth: float) -> WorkDepth:
    """Whatever does some work takes at least one operation."""
    return WorkDepth(work=float(work), depth=float(max(1, depth)) if work else 0.0)


def pointwise(elements: float, operations: float = 1) -> WorkDepth:
    """An activation, or any function of single elements: W = elements x operations, D = operations.

    Survey: W = O(N C H W), D = O(1).
    """
    return _at_least_one(elements * operations, operations)


def product(batch: float, m: float, n: float, k: float) -> WorkDepth:
    """Matrix products (m x k) (k x n): W = batch m n k, D = ceil(log2 k)."""
    return _at_least_one(batch * m * n * k, levels(k))


def fully_connected(
    samples: float, c_in: float, c_out: float, evaluation: Evaluation = Evaluation.OUTPUT
) -> WorkDepth:
    """W = N C_in C_out for each evaluation; the output reduces C_in values, the gradient of the weights N,
    that of the input C_out: D = ceil(log2 C_in), ceil(log2 N), ceil(log2 C_out).
    """
    reduced = {Evaluation.OUTPUT: c_in, Evaluation.WEIGHTS: samples, Evaluation.INPUT: c_out}[evaluation]
    return _at_least_one(samples * c_in * c_out, levels(reduced))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSize:
    """Sizes of a convolution; `output` (H', W') and `kernel` (K_y, K_x) may have any number of dimensions.

    `input_points` is H W of the input, as the Fourier transform needs it.
    """

    samples: int
    c_in: int
    c_out: int
    output: tuple[int, ...]
    kernel: tuple[int, ...]
    groups: int = 1
    stride: int = 1
    input_points: int = 0

    @property
    def outputs(self) -> int:
        """Output points of a channel."""
        return math.prod(self.output)

    @property
    def taps(self) -> int:
        """Points of the kernel."""
        return math.prod(self.kernel)


def convolution_direct(size: ConvolutionSize, evaluation: Evaluation = Evaluation.OUTPUT) -> WorkDepth:
    """W = N C_out H' W' C_in K_y K_x for each evaluation (C_in of a group).

    D = ceil(log2 C_in) + ceil(log2 K_y) + ceil(log2 K_x) for the output, the same with C_out for the gradient
    of the input; the gradient of the weights reduces N H' W' values instead.
    """
    per_group = size.c_in / size.groups
    work = size.samples * size.c_out * size.outputs * per_group * size.taps
    reduced: dict[Evaluation, Sequence[float]] = {
        Evaluation.OUTPUT: (per_group, *size.kernel),
        Evaluation.INPUT: (size.c_out / size.groups, *size.kernel),
        Evaluation.WEIGHTS: (size.samples, *size.output),
    }
    return _at_least_one(work, _levels(reduced[evaluation]))


def convolution_im2col(size: ConvolutionSize, evaluation: Evaluation = Evaluation.OUTPUT) -> WorkDepth:
    """One matrix product of the patches with the kernels: W and D of the direct convolution (Chellapilla et
    al., 2006). The copy of the patches moves N H' W' C_in K_y K_x values and computes nothing.
    """
    return convolution_direct(size, evaluation)


def convolution_fft(
    size: ConvolutionSize, evaluation: Evaluation = Evaluation.OUTPUT, constant: float = 1.0
) -> WorkDepth:
    """Transforms of inputs, kernels and outputs, and products between them (Mathieu et al., 2014).

    W = c H W log2(H W) (C_out C_in + N C_in + N C_out) + H W N C_in C_out,
    D = 2 ceil(log2 H W) + ceil(log2 C_in). The `constant` c is that of the transform, per point and level.
    Each evaluation transforms two of the three sets of planes, multiplies, and transforms the third back: W
    is the same, and D has C_out for the gradient of the input and N for that of the weights instead of C_in.
    """
    points = size.input_points or size.outputs
    c_in = size.c_in / size.groups
    planes = size.c_out * c_in + size.samples * size.c_in + size.samples * size.c_out
    transforms = constant * points * math.log2(max(2, points)) * planes
    products = points * size.samples * c_in * size.c_out
    reduced = {
        Evaluation.OUTPUT: c_in,
        Evaluation.INPUT: size.c_out / size.groups,
        Evaluation.WEIGHTS: size.samples,
    }
    return _at_least_one(transforms + products, 2 * levels(points) + levels(reduced[evaluation]))


def convolution_winograd(
    size: ConvolutionSize, evaluation: Evaluation = Evaluation.OUTPUT, tile: int = 2
) -> WorkDepth:
    """F(m x m, r x r): output tiles of m = `tile`, kernels of r x r, input tiles of alpha = m + r - 1 (Lavin
    and Gray, 2016). For stride 1 and a square kernel, see `winograd_fits`.

    With P = N ceil(H'/m) ceil(W'/m) tiles:
        kernels   C_in C_out (alpha r^2 + alpha^2 r)
        inputs    C_in P 2 alpha^3
        products  C_in C_out P alpha^2
        outputs   C_out P (m alpha^2 + m^2 alpha)
    W is their sum; D = 2 ceil(log2 r) + 4 ceil(log2 alpha) + ceil(log2 C_in), the transforms taken one after
    the other as in the survey. The gradient of the input is such a convolution of the outputs' gradients,
    C_in and C_out exchanged. That of the weights is F(r x r, m x m): the tiles of the outputs' gradients are
    its kernels, and products are summed over the tiles:
        W = C_out P (alpha m^2 + alpha^2 m) + C_in P 2 alpha^3 + C_in C_out P alpha^2
            + C_in C_out (r alpha^2 + r^2 alpha),
        D = 2 ceil(log2 m) + 4 ceil(log2 alpha) + ceil(log2 P)
    """
    tiles = size.samples * math.prod(math.ceil(side / tile) for side in size.output)
    if evaluation == Evaluation.WEIGHTS:
        kernels, outputs = size.c_out * tiles, size.c_in * size.c_out
        return _winograd((size.c_in, size.c_out), tiles, (kernels, outputs), (size.kernel[0], tile), tiles)
    c_in, c_out = size.c_in, size.c_out
    if evaluation == Evaluation.INPUT:
        c_in, c_out = c_out, c_in
    return _winograd((c_in, c_out), tiles, (c_in * c_out, c_out * tiles), (tile, size.kernel[0]), c_in)


def _winograd(
    channels: tuple[int, int], tiles: int, sets: tuple[int, int], sides: tuple[int, int], reduced: int
) -> WorkDepth:
    """Tiles of inputs, `sets` of kernels and outputs with these `sides` of outputs and kernels."""
    m, r = sides
    alpha = m + r - 1
    kernels = sets[0] * (alpha * r * r + alpha * alpha * r)
    inputs = channels[0] * tiles * 2 * alpha**3
    products = channels[0] * channels[1] * tiles * alpha * alpha
    outputs = sets[1] * (m * alpha * alpha + m * m * alpha)
    depth = 2 * levels(r) + 4 * levels(alpha) + levels(reduced)
    return _at_least_one(kernels + inputs + products + outputs, depth)


def winograd_fits(size: ConvolutionSize) -> bool:
    """Whether `convolution_winograd` describes this convolution."""
    square = len(size.kernel) == 2 and size.kernel[0] == size.kernel[1] > 1
    return square and len(size.output) == 2 and size.stride == size.groups == 1


def pooling(outputs: float, kernel: Sequence[int]) -> WorkDepth:
    """W = outputs x window, D = ceil(log2 K_y) + ceil(log2 K_x).

    Backward a point of the input gets gradients from at most a window of outputs: the same bound.
    """
    return _at_least_one(outputs * math.prod(kernel), _levels(kernel))


def batch_norm(rows: float, channels: float, *, backward: bool = False) -> WorkDepth:
    """Normalisation over `rows` values (N H W of a batch norm, the features of a layer norm) of each channel.

    Forward: the mean; differences; the variance; inverse root and scale of each channel; a multiply-add.
        W = 4 R C + 2 C,   D = 2 ceil(log2 R) + 4
    Backward: the normalised value; the sums of gradients and of their products with it, side by side (they
    are the gradients of weight and bias); three operations for the gradient of the input.
        W = 6 R C,   D = ceil(log2 R) + 4
    Survey: O(N C H W) and O(log N).
    """
    elements = rows * channels
    if backward:
        return _at_least_one(6 * elements, levels(rows) + 4)
    return _at_least_one(4 * elements + 2 * channels, 2 * levels(rows) + 4)


def rms_norm(rows: float, columns: float, *, backward: bool = False) -> WorkDepth:
    """A norm without a mean. Forward: mean square, inverse root, two products: W = 3 R C + R,
    D = ceil(log2 C) + 3. Backward: the normalised value, its products with the gradient summed, and three
    operations: W = 5 R C, D = ceil(log2 C) + 4.
    """
    if backward:
        return _at_least_one(5 * rows * columns, levels(columns) + 4)
    return _at_least_one(3 * rows * columns + rows, levels(columns) + 3)


def softmax(rows: float, columns: float, *, backward: bool = False) -> WorkDepth:
    """Forward: maximum, difference, exponential, sum, quotient: W = 5 R C, D = 2 ceil(log2 C) + 3.

    Backward: y (g - sum(g y)): W = 3 R C, D = ceil(log2 C) + 2.
    """
    if backward:
        return _at_least_one(3 * rows * columns, levels(columns) + 2)
    return _at_least_one(5 * rows * columns, 2 * levels(columns) + 3)


def reduction(kept: float, reduced: float) -> WorkDepth:
    """A sum, maximum or the like of `reduced` values each: W = kept reduced, D = ceil(log2 reduced)."""
    return _at_least_one(kept * reduced, levels(reduced))


def prefix_sum(values: float) -> WorkDepth:
    """A scan by trees up and down (Blelloch, 1990): W = 2 n, D = 2 ceil(log2 n)."""
    return _at_least_one(2 * values, 2 * levels(values))


def sort(values: float) -> WorkDepth:
    """A bitonic network (Batcher, 1968): with k = ceil(log2 n), W = n k (k + 1) / 4, D = k (k + 1) / 2."""
    stages = levels(values)
    depth = stages * (stages + 1) / 2
    return _at_least_one(max(values, values / 2 * depth), depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSize:
    """Sizes of scaled dot-product attention; `scores` counts those that a mask leaves."""

    scores: float
    queries: int
    keys: int
    head: int
    value: int


def attention(size: AttentionSize, *, backward: bool = False) -> WorkDepth:
    """softmax(Q K') V; not in the survey, counted as its products and softmax.

    Forward: W = scores (d + 5 + d_v), D = ceil(log2 d) + (2 ceil(log2 L_k) + 3) + ceil(log2 L_k).
    Backward as fused kernels run it, with the scores computed again (d + 2): dV (d_v), dP (d_v), the softmax
    (3), dQ (d), dK (d).
        W = scores (3 d + 2 d_v + 5),
        D = max(ceil(log2 d) + 2, ceil(log2 d_v)) + (ceil(log2 L_k) + 2) + max(ceil(log2 L_k), ceil(log2 L_q))
    """
    keys, queries = levels(size.keys), levels(size.queries)
    if not backward:
        work = size.scores * (size.head + 5 + size.value)
        return _at_least_one(work, levels(size.head) + 3 * keys + 3)
    work = size.scores * (3 * size.head + 2 * size.value + 5)
    scores = max(levels(size.head) + 2, levels(size.value))
    return _at_least_one(work, scores + keys + 2 + max(keys, queries))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSize:
    """Sizes of a recurrent stack; `gates` is 4 for an LSTM, 3 for a GRU, 1 for a plain cell."""

    samples: int
    steps: int
    inputs: int
    hidden: int
    gates: int = 4
    layers: int = 1
    directions: int = 1

    @property
    def inputs_by_layer(self) -> list[int]:
        """Values that a cell of each layer gets from below."""
        return [self.inputs, *[self.hidden * self.directions] * (self.layers - 1)]

    @property
    def cells(self) -> int:
        """Cells of one layer that are evaluated."""
        return self.steps * self.samples * self.directions

    @property
    def waves(self) -> int:
        """Cells in a row: layers overlap, unless each waits for both directions of the one below."""
        if self.directions > 1:
            return self.steps * self.layers
        return self.steps + self.layers - 1


#: pointwise operations of a cell: of each hidden value, and in a row behind the products.
#: LSTM: three sigmoids, two tanh, f c, i g added, o tanh(c). GRU: two sigmoids, tanh, r times the product
#: added, 1 - z, its product, z h added. Plain: tanh.
_CELL = {4: (8, 5), 3: (7, 5), 1: (1, 1)}


def recurrent(size: RecurrentSize, *, backward: bool = False) -> WorkDepth:
    """A cell reduces its inputs and its last state together, then its pointwise operations p follow.

    Forward: W = T N D sum_l gates H (I_l + H) + pointwise; layers run as a wavefront,
        D = (T + L - 1) (ceil(log2(max_l I_l + H)) + p);
    with two directions a layer waits for all of the layer below: T L in place of T + L - 1.
    Backward: twice the products; a state's gradient reduces gates H values; weights reduce T N at the end,
        D = (T + L - 1) (ceil(log2(gates H)) + p) + ceil(log2(T N)).
    """
    each, behind = _CELL.get(size.gates, (2 * size.gates, 5))
    inputs = size.inputs_by_layer
    products = sum(size.gates * size.hidden * (one + size.hidden) for one in inputs)
    work = size.cells * (products + size.layers * size.hidden * each)
    if not backward:
        return _at_least_one(work, size.waves * (levels(max(inputs) + size.hidden) + behind))
    chain = size.waves * (levels(size.gates * size.hidden) + behind)
    return _at_least_one(2 * work, chain + levels(size.steps * size.samples))
