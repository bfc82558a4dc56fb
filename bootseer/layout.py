"""`bootseer.layout(pp=2, dp=4, tp=8)`: report of a training script on the parallel groups of its ranks.

It goes to the rank bootstrap if the script was started with hooks, and otherwise nowhere. If the job hangs, the
report names the group that the odd ranks share. Every rank may call it.
"""

from __future__ import annotations

import sys


def layout(mesh: object = None, /, **sizes: int) -> None:
    """Report names and sizes of the dimensions, slowest first: ranks count up along the last one.

    Args: mesh: torch's DeviceMesh with mesh_dim_names, in place of sizes.
    Raises: ValueError for an invalid layout.
    """
    from bootseer.hangs.layout import format_layout, make_layout

    if mesh is None:
        made = make_layout(sizes)
    else:
        names = getattr(mesh, "mesh_dim_names", None)
        grid = getattr(mesh, "mesh", None)
        if sizes or not names or grid is None:
            raise ValueError("a mesh needs mesh_dim_names, and no sizes in addition")
        made = make_layout(dict(zip(names, map(int, grid.shape), strict=True)), grid.flatten().tolist())
    rank = sys.modules.get("_bootseer_rank")
    if rank is not None and (keep := getattr(rank, "keep_layout", None)) is not None:
        keep(format_layout(made))
