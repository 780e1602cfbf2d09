"""m3_kernels"""
