"""The autograd of a distributed tensor, whose graph lives in its local tensors."""
