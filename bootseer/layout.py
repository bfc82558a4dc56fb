"""`bootseer.layout(pp=2, dp=4, tp=8)`: a training script says how its ranks lie in parallel groups.

Goes to the rank-side file of the launcher when the script was started with hooks, and nowhere otherwise. When the
job stands still, the report says which group the ranks apart from the rest share. Every rank may call it.
"""

from __future__ import annotations

import sys


def layout(mesh: object = None, /, **sizes: int) -> None:
    """Names of the dimensions and their sizes, slowest first: ranks count up along the last one.

    Args: mesh: torch's DeviceMesh with mesh_dim_names, in place of sizes.
    Raises: ValueError for what is no layout.
    """
    from bootseer.diagnose.layout import format_layout, make_layout

    if mesh is None:
        made = make_layout(sizes)
    else:
        names = getattr(mesh, "mesh_dim_names", None)
        grid = getattr(mesh, "mesh", None)
        if sizes or not names or grid is None:
            raise ValueError("a mesh needs mesh_dim_names, and no sizes beside it")
        made = make_layout(dict(zip(names, map(int, grid.shape), strict=True)), grid.flatten().tolist())
    rank = sys.modules.get("_bootseer_rank")
    if rank is not None and (keep := getattr(rank, "keep_layout", None)) is not None:
        keep(format_layout(made))
