"""Recurrent layers: all steps in time are one product with each weight of a direction.

PyTorch's own kernel computes the hidden states. Those before every step are then as good as an
input, the gates of all steps follow at once, and only deltas are found step by step.

Letters: N rows of all steps, B sequences, T steps, H hidden width, M gates times H, P width of the
hidden state (H, or less where it is projected).
"""

from outergrad.layers.recurrent.gru import gru
from outergrad.layers.recurrent.lstm import lstm
from outergrad.layers.recurrent.rnn import rnn
from outergrad.layers.recurrent.rule import RecurrentRule

__all__ = ["RecurrentRule", "gru", "lstm", "rnn"]
