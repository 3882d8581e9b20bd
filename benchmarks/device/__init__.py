"""Tests and benchmarks for a machine with a GPU, in two calls; docs/device.md says how they are used.

__main__    the command line: --prepare, prove, measure
plan        which phases a call has, and how long each may take
pool        worker processes that run items under time limits; a process that dies costs one item
worker      what such a process does
suite, checks, bench, tools   what the items are
record      their results: lines of JSON
summary     the end of a call, for a person
carried     what `--prepare` made, as the device takes it
prepare, precompile           how that is made
rehearse    both calls on a CPU, as a machine with a GPU would run them
publish     from records to docs/status.md, proven kernels and the README
"""
