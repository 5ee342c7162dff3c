"""Large batches: layer-wise learning rates, warm-up and linear scaling, growing batches, the gradient noise
scale.
"""

from paceline.train.optim.layerwise import LAMB, LARS, Layerwise
from paceline.train.optim.noise import NoiseScale
from paceline.train.optim.schedule import BatchGrowth, annealed, scaled_lr, warmup

__all__ = ["LAMB", "LARS", "BatchGrowth", "Layerwise", "NoiseScale", "annealed", "scaled_lr", "warmup"]
