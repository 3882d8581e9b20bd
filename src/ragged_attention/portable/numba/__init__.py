"""Kernels for CPUs, written in Python and compiled by Numba on first use.

Kernels read the pages in place, convert 16-bit and 8-bit values as they load them, and compute in float32. A kernel
divides a call into programs, as the Triton kernels do: attention has one per sequence, block of queries, KV head and
split of the keys. Each thread runs one program after another, and no program waits for another.

    _vectors   vectors of floats, memory by address      _formats              number formats, to and from float32
    _tiles     the memory of one program                 _products, _softmax   the steps of attention
    _kernels   launching (_records, _compiling, _xla)    _paged, _latent       attention over K and V, over latents
    _indexer   the lightning indexer                     _selection            the top-k of a row
    _slots     the slots to which new rows are written   _splits               splits of the keys and their merge
    _masks     the keys that ranges let a query see
"""
