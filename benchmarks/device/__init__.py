"""Tests and benchmarks for a machine with a GPU, in two calls. docs/device.md explains their use.

__main__    the command line: --prepare, prove, measure
plan        the phases of a call and their time limits
pool        worker processes that run items under time limits; a process that dies costs one item
worker      the program of a worker process
suite, checks, bench, tools   the items, that is, the single checks and measurements
record      the results of items, as lines of JSON
summary     what a call prints at its end
carried     how a call uses the parts that `--prepare` made
prepare, precompile           how `--prepare` makes these parts
rehearse    a trial of `prove` and `measure` on a CPU
publish     turns records into docs/status.md, proven kernels and the README's table
"""
