"""All that a machine with a GPU is good for, in two calls; docs/device.md says how they are used.

__main__    the command line: --prepare, prove, measure
plan        which phases a call has, and how long each may take
pool        processes that answer for items; each item has a limit, and a process that dies costs one item
worker      the other end of such a process
suite, checks, bench, tools   what the items are
record      what is known of them: lines of JSON
summary     what a person reads at the end of a call
carried     what `--prepare` made, as the device takes it
prepare, precompile           how it is made
publish     from records to docs/status.md, proven kernels and the README
"""
