"""A backend as an outside author would write it: plain Triton kernels without any of this project's helpers.

The kernels round with `.to(out_ptr.dtype.element_ty)`, multiply 16-bit operands with `tl.dot`, or let `tl.store`
convert.
"""
