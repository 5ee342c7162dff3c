"""The sign of each element: by vote, or with the error kept for the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.spec.compression.scheme import Scheme, Shape, Work, bytes_of, numel, register


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class SignSGD(Scheme):
    """The sign of each element; ranks vote, the majority decides, and the mean magnitude scales the vote."""

    name: ClassVar[str] = "signsgd"
    title: ClassVar[str] = "signSGD, majority vote"
    accuracy: ClassVar[str] = "biased: it may not converge to the optimum; onebit, with error feedback, does"
    evidence: ClassVar[str] = (
        "Bernstein et al., signSGD with Majority Vote, ICLR 2019 (ResNet-50); Karimireddy et al., ICML 2019"
        " (counter-examples)"
    )
    encoder: ClassVar[str] = "paceline.train.compress.sign:SignSGDCompressor"
    #: multiply the vote by the mean over ranks of the mean magnitude, so that the learning rate of SGD serves
    #: (Karimireddy et al.); otherwise each element is -1, 0 or 1 (Bernstein et al.), for a much lower rate
    scaled: bool = True

    def payload_bytes(self, shape: Shape, step: int) -> int:
        return bytes_of(numel(shape)) + 4

    def encode_work(self, shape: Shape) -> Work:
        return self.per_element(shape, 5, 4, 0, 1)  # magnitudes and signs in one pass

    def decode_work(self, shape: Shape, world: int) -> Work:
        return self.added_up(shape, world, 4)


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class OneBit(Scheme):
    """The sign of each element, decoded as the mean of its side; the error is kept and added to the next
    gradient.
    """

    name: ClassVar[str] = "onebit"
    title: ClassVar[str] = "1-bit SGD, error feedback"
    accuracy: ClassVar[str] = (
        "small: what is lost in a step is sent later; the first steps are best taken in full"
    )
    evidence: ClassVar[str] = (
        "Seide et al., 1-Bit SGD, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD, ICML"
        " 2019"
    )
    encoder: ClassVar[str] = "paceline.train.compress.sign:OneBitCompressor"

    @property
    def state_bytes(self) -> int:
        return 4

    def payload_bytes(self, shape: Shape, step: int) -> int:
        return bytes_of(numel(shape)) + 8

    def encode_work(self, shape: Shape) -> Work:
        # gradient and residual; then the sum of both again, to know the error
        return self.per_element(shape, 12, 16, 8, 2)

    def decode_work(self, shape: Shape, world: int) -> Work:
        return self.added_up(shape, world, 5)
