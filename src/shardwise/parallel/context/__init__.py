"""Context parallelism: the sequence cut over a mesh axis, and attention exact all the same.

Attention itself needs nothing from here: scaled_dot_product_attention of DTensors whose sequence is cut, in whatever
pieces, leaves the queries where they are (`shardwise.attention`). Here is the split that gives all ranks the same work
under a causal mask with ways into it and back (`buffers`), and PyTorch's context manager (`manager`).
"""
