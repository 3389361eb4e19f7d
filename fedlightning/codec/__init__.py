"""Values to bytes and back, where nothing that was read is trusted: plain values, tensors, objects of known classes."""
