"""The persistent kernels of m3 and their hosts, formats and references. Importing this package compiles and loads nothing."""
