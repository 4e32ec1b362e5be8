"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

    weights, chosen = top_k(router(x), k=2)             # x is (tokens, width), chosen (tokens, k)
    routed = dispatch(x, chosen, up)                    # rows of x sorted by expert, where the experts are
    y = grouped_linear(routed, F.gelu(grouped_linear(routed, routed.rows, up)), down)
    y = combine(routed, y, weights)                     # (tokens, width), laid out as x was

Sorted by expert, the rows are one global tensor: those of expert 0 in the order of their tokens, those of expert 1, and
so on. Before dispatch a rank holds the rows of its own tokens, in several pieces; after it, those of its experts. So
dispatch and combine are changes of layout, in which exactly the rows that change rank travel. The same functions work
on plain tensors.
"""
