// Carries the precompiled header (pch_tensor.h) that the layers reuse.
