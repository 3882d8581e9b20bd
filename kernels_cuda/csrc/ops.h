// The machine layer: a kernel body is written once, in terms of `op`, and compiled twice.
//
//   nvcc                     sm90/hopper.h: the instructions of sm_90a
//   g++ -DRA_EMULATE         emulator/emulated.h: an emulation on CPU threads that exposes undefined behaviour
//
// Both define
//   tid, bid, fresh_tid, fresh_bid              the thread in its block, the block in its grid; fresh: read again
//   opaque                                      its argument, a pointer whose origin is hidden from the compiler
//   bytes_of                                    four bytes of two words, selected by the digits of a number
//   reg_alloc<N>, reg_dealloc<N>                set the registers per thread of this warpgroup
//   syncthreads, syncwarp, named_sync, named_arrive, shfl_xor, shfl
//   any_in_warp                                 whether a condition holds for some thread of the warp
//   MBar: init, arrive, arrive_expect, wait     an mbarrier of arrivals and bytes, with a phase bit
//   fence_barrier_init, fence_async_shared      the latter makes ordinary writes visible to wgmma and TMA
//   load_constant                               a load from global memory that no running kernel writes
//   load16<Reuse>, load8<Reuse>, load4          loads of 16, 8 or 4 bytes; zeros if a load is not valid
//   copy16<Reuse>, arrive_after_copies          an asynchronous copy of 16 bytes, or zeros, to shared memory
//   bulk_load                                   a copy of a row's bytes, which an mbarrier counts
//   make_tma, descriptor_of, tma_load           loads of 64 x 64 tiles of a (rows, columns, (heads, pages)) tensor
//   store                                       an ordinary write to shared memory that wgmma will read
//   store_matrices                              such a write of four matrices of 8 x 8 16-bit numbers, by a warp
//   load_matrices                               the inverse of store_matrices
//   wgmma_ss, wgmma_rs, wgmma_wait<N>           asynchronous products; the wait names the accumulators it completes
//   mma<T>                                      synchronous products of a warp, 16 x 8 x 16 each, from registers
//   exp2, log2, reciprocal, pack<T>             2^x, the base-2 logarithm, 1/x, two floats as one word of T
//   multiply                                    the products of two pairs of bfloat16
//   half_pair, low_half, high_half              two e4m3 codes as a word of float16; its halves as float
//   half_pairs                                  four e4m3 codes as two words of float16
//   launch                                      launches blocks that run Body::run(params, shared memory)
//   launch_dependent                            launches a grid once all blocks of the previous one allow it or have ended
//   let_dependents_launch                       allows it for this block
//   wait_for_previous_grid, load_result         every thread waits for the previous grid, then reads its results
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

using bf16 = cutlass::bfloat16_t;
using f16 = cutlass::half_t;

// Whether loaded data will be read again, as rows of keys are by neighbouring threads and other thread blocks.
enum Reuse { kOnce, kAgain };

#ifdef RA_EMULATE
#include "emulator/emulated.h"
#else
#include "sm90/hopper.h"
#endif
