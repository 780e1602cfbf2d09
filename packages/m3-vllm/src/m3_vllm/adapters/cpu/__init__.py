"""MiniMax-M3 for vLLM on a CPU: vLLM's own layers where they run there, classes of m3 where they do not.

vLLM's in-tree class needs a GPU: its norms, head norms, indexer, sparse attention and experts are CUDA or Triton kernels, and
importing it needs torchvision. Only ``model`` is named to vLLM; everything else is reached from there.
"""
