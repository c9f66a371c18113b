// Carries the precompiled header (pch.h) that the layers reuse.
