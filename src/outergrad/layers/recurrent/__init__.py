"""Recurrent layers: one product per weight of a direction, for all time steps together.

PyTorch's own kernel computes the hidden states. The states before every step are then known like an
input, so the gates of all steps are computed at once, and only deltas are computed step by step.

Letters: N rows of all steps, B sequences, T steps, H hidden width, M number of gates times H, P
width of the hidden state (H, or less with a projection).
"""

from outergrad.layers.recurrent.gru import gru
from outergrad.layers.recurrent.lstm import lstm
from outergrad.layers.recurrent.rnn import rnn
from outergrad.layers.recurrent.rule import RecurrentRule

__all__ = ["RecurrentRule", "gru", "lstm", "rnn"]
