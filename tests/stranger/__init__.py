"""A backend as a stranger would write it: plain Triton kernels that know nothing of this project.

They round by `.to(out_ptr.dtype.element_ty)`, multiply 16-bit operands by `tl.dot`, or let `tl.store` convert.
"""
