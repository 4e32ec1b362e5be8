"""What torch functions do on sharded tensors. Each module registers its functions when it is imported."""
