"""Products of rows with the matrix of their group, for experts.

Shapes: N rows, ascending by group, E groups, F outputs, D inputs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def grouped_products(rows_ND: Tensor, weights_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Each row with the matrix of its group, [N, F].

    Args:
        rows_ND: Rows of one group follow each other.
        weights_EFD: Matrices of the groups.
        ends_E: int32, number of rows up to the end of each group; the last is N.
    """
    return F.grouped_mm(rows_ND, weights_EFD.transpose(-2, -1), offs=ends_E)
