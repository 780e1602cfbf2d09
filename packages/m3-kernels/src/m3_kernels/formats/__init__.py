"""Expert weight formats: element codes, the layouts that the kernels read, and conversions between them. Pure torch."""
