"""Kernels for CPUs, written in Python and compiled by Numba on first use.

They read the pages where they lie, convert 16-bit and 8-bit values as they load them, and compute in float32. A kernel
divides a call into programs, one per sequence, block of queries, KV head and split of the keys, as the Triton kernels
do; the front end's own threads take one program after another. No program waits for another one.

    _vectors   some floats at a time, memory by address         _formats   what is stored, to and from float32
    _tiles     one program's memory                             _products, _softmax   the steps of an attention
    _kernels   records, compiling, threads, XLA                 _paged, _latent, _varlen   where keys and values lie
    _indexer   logits that choose what is attended to           _selection   the largest numbers of a row
    _slots     where this step's rows are written
"""
